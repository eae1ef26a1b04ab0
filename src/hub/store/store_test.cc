// One contract for every store.

#include "hub/store/store.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "hub/store/postgres_server.h"

namespace kvasir::hub {
namespace {

namespace fs = std::filesystem;

// Opens the same store again and again, as a restarted hub does.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual Result<std::unique_ptr<Store>> open() = 0;
  virtual bool durable() const { return true; }
};

class MemoryBackend final : public Backend {
 public:
  Result<std::unique_ptr<Store>> open() override { return make_memory_store(); }
  bool durable() const override { return false; }
};

class SqliteBackend final : public Backend {
 public:
  SqliteBackend() {
    char folder[] = "/tmp/kvasir-store-XXXXXX";
    EXPECT_NE(::mkdtemp(folder), nullptr);
    folder_ = folder;
  }
  ~SqliteBackend() override { fs::remove_all(folder_); }
  Result<std::unique_ptr<Store>> open() override { return open_sqlite_store(folder_ / "data"); }
  fs::path folder_;
};

PostgresServer& postgres() {
  static const auto server = PostgresServer::start();
  if (!server) throw std::runtime_error(server.error().message);
  return **server;
}

// A database of its own for each test: the store's tables live in one schema.
class PostgresBackend final : public Backend {
 public:
  PostgresBackend() {
    static int n = 0;
    const std::string name = "t" + std::to_string(++n);
    const std::string host = postgres().url().substr(postgres().url().find('?'));
    const std::string socket = host.substr(6, host.find('&') - 6);
    EXPECT_EQ(std::system(("psql -q -h " + socket + " -U postgres -c 'CREATE DATABASE " + name + "' postgres").c_str()),
              0);
    url_ = "postgresql:///" + name + host;
  }
  Result<std::unique_ptr<Store>> open() override { return open_postgres_store(url_); }
  std::string url_;
};

using MakeBackend = std::unique_ptr<Backend> (*)();
template <typename T>
std::unique_ptr<Backend> make_backend() {
  return std::make_unique<T>();
}

class StoreContract : public testing::TestWithParam<std::pair<const char*, MakeBackend>> {
 protected:
  void SetUp() override {
    backend_ = GetParam().second();
    reopen();
  }
  void reopen() {
    store_.reset();
    auto opened = backend_->open();
    ASSERT_TRUE(opened) << opened.error().message;
    store_ = std::move(*opened);
  }
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Store> store_;
};

TokenRecord token(std::string id, std::optional<UnixSeconds> expires = std::nullopt) {
  return {.id = std::move(id),
          .secret_hash = std::string(64, 'a'),
          .scope = Scope::kBackbone,
          .note = "O'Brien's; DROP TABLE tokens --",
          .created = 1000,
          .expires = expires};
}

TEST_P(StoreContract, TokensAreKeptListedAndRevokedOnce) {
  ASSERT_TRUE(store_->put_token(token("b")));
  ASSERT_TRUE(store_->put_token(token("a", 5000)));
  EXPECT_FALSE(store_->put_token(token("a")));  // and the first stays
  const auto list = store_->list_tokens();
  ASSERT_TRUE(list);
  ASSERT_EQ(list->size(), 2u);
  EXPECT_EQ((*list)[0], token("b"));
  EXPECT_EQ((*list)[1], token("a", 5000));
  EXPECT_EQ(**store_->find_token("a"), token("a", 5000));
  EXPECT_FALSE(store_->find_token("a' OR '1'='1")->has_value());
  EXPECT_FALSE(*store_->revoke_token("c", 10));
  EXPECT_TRUE(*store_->revoke_token("a", 2000));
  EXPECT_TRUE(*store_->revoke_token("a", 3000));
  EXPECT_EQ((*store_->find_token("a"))->revoked, 2000);
  EXPECT_EQ((*store_->find_token("b"))->revoked, std::nullopt);
  TokenRecord limited = token("limited");
  limited.pairs_per_day = 1'000'000'000'000;
  ASSERT_TRUE(store_->put_token(limited));
  EXPECT_EQ(**store_->find_token("limited"), limited);
}

TEST_P(StoreContract, ARelaySessionIsWhereItWasLast) {
  EXPECT_EQ(*store_->find_relay_session("laptop"), std::nullopt);
  ASSERT_TRUE(store_->put_relay_session("laptop", "https://a.example", 100));
  ASSERT_TRUE(store_->put_relay_session("laptop", "https://b.example", 200));
  ASSERT_TRUE(store_->put_relay_session("tower", "https://a.example", 100));
  EXPECT_EQ(*store_->find_relay_session("laptop"), "https://b.example");
  ASSERT_TRUE(store_->prune(150));
  EXPECT_EQ(*store_->find_relay_session("laptop"), "https://b.example");
  EXPECT_EQ(*store_->find_relay_session("tower"), std::nullopt);
}

TEST_P(StoreContract, PairsUsedAreABackbonesOfThatDay) {
  const auto entry = [](std::int64_t day, const char* worker, const char* reporter, Side side, std::int64_t pairs) {
    Contribution c;
    c.day = day;
    c.worker_id = worker;
    c.reporter = reporter;
    c.side = side;
    c.pairs = pairs;
    return c;
  };
  ASSERT_TRUE(*store_->add_contributions({entry(5, "v", "t", Side::kBackbone, 10), entry(5, "w", "t", Side::kBackbone, 5),
                                          entry(5, "w", "u", Side::kBackbone, 100), entry(5, "w", "t", Side::kWorker, 1000),
                                          entry(6, "w", "t", Side::kBackbone, 10000),
                                          entry(8, "v", "t", Side::kServedTo, 30), entry(8, "w", "t", Side::kServedTo, 20),
                                          entry(8, "w", "t", Side::kBackbone, 40)},
                                         "", 1));
  EXPECT_EQ(*store_->pairs_used(5, "t"), 15);
  EXPECT_EQ(*store_->pairs_used(6, "t"), 10000);
  EXPECT_EQ(*store_->pairs_used(7, "t"), 0);
  EXPECT_EQ(*store_->pairs_used(8, "t"), 50);  // its workers say more than it does itself
}

TEST_P(StoreContract, KeysMayBeAdmittedAgain) {
  KeyRecord key{.public_key = std::string(64, '1'), .scope = Scope::kWorker, .note = "laptop", .created = 5};
  ASSERT_TRUE(store_->put_key(key));
  EXPECT_EQ(**store_->find_key(key.public_key), key);
  EXPECT_TRUE(*store_->revoke_key(key.public_key, 9));
  EXPECT_EQ((*store_->find_key(key.public_key))->revoked, 9);
  ASSERT_TRUE(store_->put_key(key));
  EXPECT_EQ(*store_->list_keys(), std::vector{key});
  EXPECT_FALSE(*store_->revoke_key("no such", 9));
}

TEST_P(StoreContract, AWorkerIdBelongsToTheFirst) {
  EXPECT_EQ(*store_->claim_worker("w", "alice", 1), "alice");
  EXPECT_EQ(*store_->claim_worker("w", "bob", 2), "alice");
  EXPECT_EQ(*store_->claim_worker("v", "bob", 3), "bob");
}

TEST_P(StoreContract, BansCanBeLifted) {
  ASSERT_TRUE(store_->put_ban({"w", "wrong answers", 7}));
  ASSERT_TRUE(store_->put_ban({"w", "wrong answers again", 8}));
  EXPECT_EQ(*store_->list_bans(), (std::vector<BanRecord>{{"w", "wrong answers again", 8}}));
  EXPECT_TRUE(*store_->remove_ban("w"));
  EXPECT_FALSE(*store_->remove_ban("w"));
  EXPECT_TRUE(store_->list_bans()->empty());
}

TEST_P(StoreContract, ContributionsAddUpAndRepeatedReportsDoNot) {
  const Contribution mine{20'000, "w", "t1", Side::kBackbone, 10, 5, 1 << 20};
  const Contribution theirs{20'000, "w", "t2", Side::kWorker, 9, 5, 1 << 19};
  EXPECT_TRUE(*store_->add_contributions({mine, theirs}, "r1", 100));
  EXPECT_FALSE(*store_->add_contributions({mine, theirs}, "r1", 101));
  EXPECT_TRUE(*store_->add_contributions({mine, mine}, "r2", 102));
  EXPECT_TRUE(*store_->add_contributions({{19'999, "v", "t1", Side::kBackbone, INT64_C(1) << 40, 1, 1}}, "", 103));
  const auto all = *store_->contributions(19'999, 20'000);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].worker_id, "v");
  EXPECT_EQ(all[0].pairs, INT64_C(1) << 40);
  EXPECT_EQ(all[1], (Contribution{20'000, "w", "t1", Side::kBackbone, 30, 15, 3 << 20}));
  EXPECT_EQ(all[2], theirs);
  EXPECT_EQ(store_->contributions(20'000, 20'000)->size(), 2u);
  ASSERT_TRUE(store_->prune(101));
  EXPECT_TRUE(*store_->add_contributions({mine}, "r1", 200));
  EXPECT_FALSE(*store_->add_contributions({mine}, "r2", 200));
}

TEST_P(StoreContract, WhatWasAcknowledgedOutlivesARestart) {
  if (!backend_->durable()) GTEST_SKIP();
  ASSERT_TRUE(store_->put_token(token("a", 5000)));
  ASSERT_TRUE(*store_->add_contributions({{1, "w", "t", Side::kWorker, 1, 2, 3}}, "r", 1));
  reopen();
  EXPECT_EQ(**store_->find_token("a"), token("a", 5000));
  EXPECT_FALSE(*store_->add_contributions({{1, "w", "t", Side::kWorker, 1, 2, 3}}, "r", 2));
  EXPECT_EQ(store_->contributions(1, 1)->at(0).bytes, 3);
  EXPECT_TRUE(store_->check());
}

TEST_P(StoreContract, ServesManyThreads) {
  std::atomic<int> failures = 0;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        for (int i = 0; i < 25; ++i) {
          const auto added = store_->add_contributions({{1, "w", "t", Side::kWorker, 1, 1, 1}},
                                                       std::to_string(t) + "-" + std::to_string(i), 1);
          if (!added || !*added) ++failures;
        }
      });
  }
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(store_->contributions(1, 1)->at(0).pairs, 100);
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreContract,
                         testing::Values(std::pair<const char*, MakeBackend>("Memory", make_backend<MemoryBackend>),
                                         std::pair<const char*, MakeBackend>("Sqlite", make_backend<SqliteBackend>),
                                         std::pair<const char*, MakeBackend>("Postgres",
                                                                             make_backend<PostgresBackend>)),
                         [](const auto& param_info) { return std::string(param_info.param.first); });

TEST(SqliteStore, FilesAreTheOwnersOnly) {
  SqliteBackend backend;
  const auto store = *backend.open();
  ASSERT_TRUE(store->put_token(token("a")));
  struct stat info{};
  ASSERT_EQ(::stat((backend.folder_ / "data").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  for (const char* name : {"hub.db", "hub.db-wal", "hub.db-shm"}) {
    ASSERT_EQ(::stat((backend.folder_ / "data" / name).c_str(), &info), 0) << name;
    EXPECT_EQ(info.st_mode & 0777, 0600u) << name;
  }
}

TEST(SqliteStore, TwoProcessesMayWriteAndANewerSchemaIsRefused) {
  SqliteBackend backend;
  const auto hub = *backend.open(), command = *backend.open();
  ASSERT_TRUE(command->put_token(token("a")));
  EXPECT_TRUE(hub->find_token("a")->has_value());
}

TEST(SqliteStore, ADamagedFileIsAnErrorAndNoCrash) {
  SqliteBackend backend;
  fs::create_directories(backend.folder_ / "data");
  std::ofstream(backend.folder_ / "data" / "hub.db") << std::string(8192, 'x');
  const auto opened = backend.open();
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().message.find("hub.db"), std::string::npos);
}

TEST(PostgresStore, ComesBackAfterTheServerDid) {
  PostgresBackend backend;
  const auto store = *backend.open();
  ASSERT_TRUE(store->put_token(token("a")));
  ASSERT_TRUE(postgres().restart());
  const auto found = store->find_token("a");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_TRUE(found->has_value());
}

TEST(PostgresStore, ErrorsDoNotRepeatTheUrl) {
  const auto opened = open_postgres_store("postgres://someone:hunter2@127.0.0.1:1/db");
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().message.find("hunter2"), std::string::npos);
}

}  // namespace
}  // namespace kvasir::hub
