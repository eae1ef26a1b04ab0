#include "join/node.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <format>
#include <fstream>
#include <optional>
#include <random>
#include <thread>

#include "base/hex.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "ffn/device.h"
#include "ffn/engine.h"
#include "hub/auth/secrets.h"
#include "hub/store/private_folder.h"
#include "join/line.h"
#include "net/text_server.h"
#include "net/tls_identity.h"
#include "worker/relay_listener.h"
#include "worker/server.h"
#include "worker/tuning.h"

namespace kvasir::join {
namespace {

namespace fs = std::filesystem;

constexpr Nanos kTick = std::chrono::milliseconds(500);
constexpr Nanos kAskAgain = std::chrono::seconds(10), kAskAgainMax = std::chrono::minutes(5);
constexpr Nanos kOncePatience = std::chrono::minutes(2);
constexpr Nanos kCountedPatience = std::chrono::seconds(60);  // --once: for the hub to count what is held

// "machine-1a2b3c4d", made once.
Result<std::string> worker_id(const fs::path& data_dir) {
  KVASIR_TRY(hub::make_private_folder(data_dir));
  const fs::path path = data_dir / "worker-id";
  std::string id;
  std::getline(std::ifstream(path) >> std::ws, id);
  if (!id.empty()) return id;
  char host[65] = {};
  if (::gethostname(host, sizeof host - 1) != 0 || host[0] == '\0') std::snprintf(host, sizeof host, "node");
  id = std::format("{}-{}", host, hub::random_hex(4));
  if (!(std::ofstream(path) << id << '\n'))
    return fix_input(std::format("cannot write '{}'; choose another --data.", path.string()));
  return id;
}

// "CPU" or "Vulkan0", and what that is.
std::string device_text(const std::string& name) {
  constexpr std::size_t kBytesMax = 96;
  const auto device = ffn::find_device(name);
  if (!device) return name;
  const std::string description = ggml_backend_dev_description(*device);
  std::string out = description.empty() || description == name ? name : name + ": " + description;
  // The hub takes printable characters only.
  std::erase_if(out, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  return out.substr(0, kBytesMax);
}

// A worker's server on a thread of its own.
class Serving {
 public:
  explicit Serving(std::unique_ptr<worker::Server> server)
      : server_(std::move(server)), thread_([this] { server_->run(); }) {}
  ~Serving() {
    relay_.reset();  // nobody new
    server_->request_stop();  // what is being computed is finished first
    thread_.join();
  }
  const worker::Server& server() const { return *server_; }

  void wait_at_relay(net::RelayDialer dialer, std::string session, net::TlsContext tls,
                     std::function<void(const std::string&)> log) {
    relay_.emplace(worker::RelayListenerOptions{
        .dialer = std::move(dialer),
        .session = std::move(session),
        .tls = std::move(tls),
        .accept = [this](std::unique_ptr<net::Stream> stream,
                         std::string peer) { server_->adopt(std::move(stream), std::move(peer)); },
        .log = std::move(log)});
  }

 private:
  std::unique_ptr<worker::Server> server_;
  std::thread thread_;
  std::optional<worker::RelayListener> relay_;
};

struct Assignment {
  std::string model, reservation;
  std::vector<hub::Segment> ranges;
};

class Node {
 public:
  explicit Node(NodeOptions options) : options_(std::move(options)) {
    options_.fetch.log = options_.log;
    if (!options_.warn) options_.warn = options_.log;
    options_.fetch.wait = [this](Nanos time) { return wait_while_fetching(time); };
  }

  Status run() {
    KVASIR_ASSIGN(const std::string id, worker_id(options_.data_dir));
    worker_id_ = id;
    KVASIR_ASSIGN(client_, hub::HubClient::create(options_.hub));
    KVASIR_ASSIGN(SliceCache cache, SliceCache::open(options_.cache_dir));
    cache_.emplace(std::move(cache));
    if (options_.tls) {
      KVASIR_ASSIGN(identity_, net::load_or_make_tls_identity(options_.data_dir));
      ticket_ = hub::random_hex(16);
    }
    KVASIR_ASSIGN(heartbeat_, Heartbeat::start({options_.hub, worker_id_, device_text(options_.device), options_.advertise,
                                               served_, options_.log, options_.warn}));
    // From here on: the heartbeat's thread keeps its priority, those that compute are made later.
    if (options_.nice != 0) ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), options_.nice);
    KVASIR_ASSIGN(numerics_, ffn::numerics_id(options_.device));
    if (options_.metrics_port) {
      KVASIR_ASSIGN(metrics_, net::TextServer::start(*options_.metrics_port, std::string(kMetricsContentType),
                                                     [this] { return metrics(); }));
      options_.log(std::format("metrics on port {}", metrics_->port()));
    }
    options_.log(std::format("node '{}' offers {} bytes to {}", worker_id_, options_.memory_bytes, options_.hub.url));
    const Status ended = work();
    say_goodbye();
    return ended;
  }

 private:
  Status work() {
    Nanos ask_in = Nanos::zero();
    TimePoint asked{};
    while (options_.wait(Nanos::zero())) {
      const TimePoint now = monotonic_now();
      KVASIR_TRY(follow_conditions());
      if (!paused_) {
        const bool idle = files_.empty();
        if (heartbeat_->take_move_request()) wants_move_ = true;
        if ((idle || wants_move_) && now - asked >= ask_in) {
          asked = now;
          KVASIR_ASSIGN(const auto wait, take_assignment());
          ask_in = wait;
          wants_move_ = false;
          if (options_.once && !files_.empty()) return finish_once();
          if (options_.once && now - started_ > kOncePatience)
            return retry_later("the hub cannot be reached or gave no assignment; try again later.");
        }
      }
      if (serving_) report_speed();
      if (line_ == nullptr && heartbeat_->known()) {
        KVASIR_ASSIGN(line_, Line::open(options_.hub, worker_id_, [this] { heartbeat_->say_alive(); }));
      }
      tell_status(paused_ ? "paused" : serving_ ? "serving" : "waiting for work");
      if (!options_.wait(kTick)) break;
    }
    return {};
  }

  // How long to wait before asking again.
  Result<Nanos> take_assignment() {
    nlohmann::json offer = {
        {"model", options_.model}, {"memory_bytes", options_.memory_bytes}, {"worker_id", worker_id_}};
    const auto reply = client_->post("/api/expert-volunteer", offer);
    if (!reply && reply.error().action == ErrorAction::kFixInput) return std::unexpected(reply.error());
    if (!reply || reply->status == 429 || reply->status >= 500) {
      backoff_ = std::min(std::max(backoff_ * 2, kAskAgain / 2), kAskAgainMax);
      options_.warn(std::format("{} Asking again in {} s.", reply ? reply->error() : reply.error().message,
                               std::chrono::ceil<std::chrono::seconds>(backoff_).count()));
      return jitter(std::max(backoff_, reply ? reply->retry_after.value_or(Nanos::zero()) : Nanos::zero()));
    }
    backoff_ = Nanos::zero();
    if (reply->status != 200) return fix_input(reply->error());
    const auto assignment = parse(reply->json());
    if (!assignment) {
      const std::string reason = reply->json().value("reason", std::string("nothing is assigned."));
      if (reason != last_reason_) options_.log(std::format("the hub has no work: {}", reason));
      last_reason_ = reason;
      if (options_.once) return fix_input(std::format("the hub has no work: {}", reason));
      return jitter(kAskAgain);
    }
    last_reason_.clear();
    KVASIR_TRY(adopt(*assignment));
    return jitter(kAskAgain);
  }

  static std::optional<Assignment> parse(const nlohmann::json& reply) {
    if (!reply.value("assigned", false)) return std::nullopt;
    Assignment out;
    out.model = reply.value("model", std::string());
    out.reservation = reply.value("reservation", std::string());
    const auto add = [&out](const nlohmann::json& range) {
      if (!range.is_object() || !range.contains("layer") || !range["layer"].is_number_unsigned() ||
          !range.contains("experts") || !range["experts"].is_array() || range["experts"].size() != 2 ||
          !range["experts"][0].is_number_unsigned() || !range["experts"][1].is_number_unsigned())
        return;
      out.ranges.push_back({range["layer"], range["experts"][0], range["experts"][1]});
    };
    add(reply);
    if (const auto also = reply.find("also"); also != reply.end() && also->is_array())
      for (const auto& range : *also) add(range);
    out.ranges = hub::normalize(std::move(out.ranges));
    // The name becomes part of a file's name here.
    const bool plain = !out.model.empty() && std::ranges::all_of(out.model, [](unsigned char c) {
      return std::isalnum(c) || c == '.' || c == '_' || c == '-';
    });
    if (out.ranges.empty() || !plain || out.model[0] == '.') return std::nullopt;
    return out;
  }

  // Fetches everything while the old goes on being served, then changes over.
  Status adopt(const Assignment& assignment) {
    heartbeat_->update([&](NodeState& s) {
      s.reservation = assignment.reservation;
      if (s.model.empty()) s.model = assignment.model;
    });
    tell_status("fetching");
    std::vector<fs::path> files;
    std::set<fs::path> in_use(files_.begin(), files_.end());
    for (const hub::Segment& range : assignment.ranges) {
      options_.log(
          std::format("fetching {}: layer {}, experts {}:{}", assignment.model, range.layer, range.begin, range.end));
      cache_->set_in_use(in_use);
      auto file = cache_->fetch(*client_, assignment.model, range, options_.fetch);
      if (!file) {
        heartbeat_->update([](NodeState& s) { s.reservation.clear(); });
        if (file.error().action == ErrorAction::kFixInput && files_.empty() && options_.once)
          return std::unexpected(file.error());
        options_.warn(file.error().message);
        return {};  // the model may have changed meanwhile: ask again
      }
      in_use.insert(*file);
      files.push_back(*std::move(file));
    }
    stop_serving();
    files_ = std::move(files);
    model_ = assignment.model;
    holdings_ = hub::normalize(assignment.ranges);
    cache_->set_in_use({files_.begin(), files_.end()});
    return start_serving(assignment.reservation);
  }

  Status start_serving(const std::string& reservation) {
    std::vector<std::string> names;
    std::vector<std::shared_ptr<const gguf::MoeModel>> slices;
    for (const fs::path& file : files_) {
      names.push_back(file.string());
      KVASIR_ASSIGN(gguf::MoeModel slice, gguf::MoeModel::open(file.string()));
      slices.push_back(std::make_shared<const gguf::MoeModel>(std::move(slice)));
    }
    worker::StoreOptions store_options;
    store_options.device = options_.device;
    store_options.bytes_max = options_.memory_bytes;
    store_options.verify = false;  // the cache has just done it
    store_options.packing = worker::Packing::kBeside;
    KVASIR_ASSIGN(worker::SliceStore store, worker::SliceStore::load(names, store_options));
    KVASIR_ASSIGN(const ggml_backend_dev_t device, ffn::find_device(options_.device));
    KVASIR_ASSIGN(auto engine, ffn::Engine::create({.device = options_.device, .n_threads = options_.n_threads}));
    worker::ServerOptions server_options;
    if (options_.tune) {
      worker::TuneOptions tune_options;
      tune_options.device = options_.device;
      tune_options.n_threads = options_.n_threads;
      tune_options.cache_file = (options_.data_dir / "plans").string();
      KVASIR_ASSIGN(const std::optional<worker::WorkerTuning> tuned, worker::tune_store(store, *engine, tune_options));
      if (tuned) {
        server_options.tuning = tuned->tuning;
        for (const std::string& line : tuned->lines)
          options_.log(std::format("{} {}", tuned->cached ? "plan, as measured before:" : "plan:", line));
      }
    }
    server_options.software = options_.software;
    server_options.token = ticket_;
    server_options.grants = grant_check();
    server_options.served = served_;
    server_options.metrics_file = options_.metrics_file;
    if (identity_) {
      KVASIR_ASSIGN(server_options.tls, net::TlsContext::server(*identity_));
    }
    KVASIR_ASSIGN(auto server,
                  worker::Server::listen(options_.listen, std::move(store), ggml_backend_dev_buffer_type(device),
                                         std::move(engine), numerics_, std::move(server_options)));
    options_.listen.port = server->port();  // keeps it when it changes over
    {
      const MutexLock lock(serving_mutex_);
      serving_.emplace(std::move(server));
    }
    const std::uint32_t pair_us = serving_->server().stats().costs.pair_us();
    if (pair_us > 0) speed_ = 1e6 / pair_us;
    const bool relayed = options_.reach != NodeReach::kDirectOnly;
    if (relayed) {
      KVASIR_ASSIGN(net::TlsContext tls, net::TlsContext::server(*identity_));
      KVASIR_ASSIGN(net::RelayDialer dialer,
                    net::RelayDialer::create(
                        {.url = options_.hub.url, .token = options_.hub.token, .ca_file = options_.hub.ca_file}));
      serving_->wait_at_relay(std::move(dialer), worker_id_, std::move(tls), options_.log);
    }
    heartbeat_->update([&](NodeState& s) {
      s.model = model_;
      s.holdings = holdings_;
      s.slices = std::move(slices);
      s.port = options_.listen.port;
      s.relayed = relayed;
      s.direct = options_.reach != NodeReach::kRelayOnly;
      s.fingerprint = identity_ ? net::format_fingerprint(identity_->fingerprint) : "";
      s.ticket = ticket_;
      s.capacity_bytes = options_.memory_bytes;
      s.speed_rows_per_s = speed_;
      s.draining = false;
      s.reservation = reservation;
    });
    options_.log(std::format("serving {} experts of {} on port {}", hub::count_experts(holdings_), model_,
                             options_.listen.port));
    return {};
  }

  // The hub's key for session grants; without it (an older hub) the ticket alone opens.
  std::optional<worker::GrantCheck> grant_check() {
    if (!identity_) return std::nullopt;
    const auto reply = client_->get("/api/grant-key");
    if (!reply || reply->status != 200) return std::nullopt;
    const auto key = from_hex(reply->json().value("public_key", std::string()));
    worker::GrantCheck check{.hub = {}, .worker_id = worker_id_};
    if (!key || key->size() != check.hub.size()) return std::nullopt;
    std::ranges::copy(*key, check.hub.begin());
    return check;
  }

  void stop_serving() {
    if (!serving_) return;
    heartbeat_->update([](NodeState& s) { s.draining = true; });
    count(serving_->server().stats(), served_before_);
    {
      const MutexLock lock(serving_mutex_);
      serving_.reset();
    }
  }

  // Looks now and then.
  Status follow_conditions() {
    const TimePoint now = monotonic_now();
    if (now - looked_ < options_.conditions_interval) return {};
    looked_ = now;
    const auto reason = reason_to_pause(options_.conditions, options_.look(), paused_, own_load());
    if (reason && !paused_) {
      paused_ = true;
      options_.log(std::format("pausing: {}", *reason));
      stop_serving();
    } else if (!reason && paused_) {
      paused_ = false;
      options_.log("going on.");
      if (!files_.empty()) KVASIR_TRY(start_serving({}));
    }
    return {};
  }

  // Between the steps of a download: what is served meanwhile pauses in time, and so does the
  // download itself.
  bool wait_while_fetching(Nanos time) {
    const TimePoint end = monotonic_now() + time;
    while (true) {
      if (const Status followed = follow_conditions(); !followed) {
        options_.log(followed.error().message);
        return false;
      }
      const Nanos left = std::max(Nanos::zero(), end - monotonic_now());
      if (!options_.wait(paused_ ? kTick : std::min(left, kTick))) return false;
      if (!paused_ && monotonic_now() >= end) return true;
    }
  }

  // Cores that this node's computing has kept busy since the last look.
  double own_load() {
    if (!serving_) return 0;
    const TimePoint now = monotonic_now();
    const std::uint64_t busy_ns = serving_->server().stats().compute_ns;
    const double passed = std::chrono::duration<double, std::nano>(now - load_looked_).count();
    const double load =
        passed > 0 && busy_ns >= busy_ns_ ? static_cast<double>(busy_ns - busy_ns_) / passed * options_.n_threads : 0;
    load_looked_ = now;
    busy_ns_ = busy_ns;
    return std::min<double>(load, options_.n_threads);
  }

  void report_speed() {
    const std::uint32_t pair_us = serving_->server().stats().costs.pair_us();
    if (pair_us == 0) return;
    const double speed = 1e6 / pair_us;
    // Not every wobble is worth a heartbeat of its own.
    if (speed > 0.8 * speed_ && speed < 1.25 * speed_) return;
    speed_ = speed;
    heartbeat_->update([&](NodeState& s) { s.speed_rows_per_s = speed; });
  }

  // From the metrics server's thread.
  std::string metrics() {
    const MutexLock lock(serving_mutex_);
    if (serving_) return serving_->server().metrics();
    MetricsText idle;
    idle.process();
    return idle.text();
  }

  static void count(const worker::WorkerStats& stats, NodeStatus& into) {
    into.requests += stats.requests;
    into.pairs += stats.pairs;
    into.bytes_received += stats.bytes_received;
    into.bytes_sent += stats.bytes_sent;
  }

  void tell_status(const char* state) {
    if (!options_.status) return;
    NodeStatus status = served_before_;
    if (serving_) count(serving_->server().stats(), status);
    status.state = state;
    status.model = model_;
    status.experts = serving_ ? hub::count_experts(holdings_) : 0;
    options_.status(status);
  }

  Status finish_once() {
    const std::uint64_t wanted = hub::count_experts(holdings_);
    for (const TimePoint end = monotonic_now() + kCountedPatience; heartbeat_->experts_counted() < wanted;) {
      if (monotonic_now() > end) return retry_later("the hub does not count what this node holds.");
      if (!options_.wait(std::chrono::milliseconds(50))) break;
    }
    for (const fs::path& file : files_) std::printf("%s\n", file.c_str());
    std::fflush(stdout);
    return {};
  }

  // So that backbones need not find out by themselves.
  void say_goodbye() {
    if (!serving_) return;
    nlohmann::json body = {
        {"worker_id", worker_id_}, {"model", model_}, {"segments", nlohmann::json::array()}, {"draining", true}};
    stop_serving();
    line_.reset();  // calls the heartbeat
    heartbeat_.reset();
    (void)client_->post("/api/expert-coverage", body);
  }

  Nanos jitter(Nanos time) { return time + time * static_cast<int>(random_() % 200) / 1000; }

  NodeOptions options_;
  std::string worker_id_, ticket_, last_reason_;
  std::unique_ptr<hub::HubClient> client_;
  std::optional<SliceCache> cache_;
  std::optional<net::TlsIdentity> identity_;
  wire::NumericsId numerics_;
  const std::shared_ptr<worker::ServedLedger> served_ = std::make_shared<worker::ServedLedger>();
  std::unique_ptr<Heartbeat> heartbeat_;
  std::unique_ptr<Line> line_;  // gone before the heartbeat
  // Held to change serving_, which metrics() reads from another thread, holding it too.
  Mutex serving_mutex_;
  std::optional<Serving> serving_;
  NodeStatus served_before_;  // by servers that are gone
  std::unique_ptr<net::TextServer> metrics_;
  std::vector<fs::path> files_;  // what is held
  std::string model_;
  hub::Segments holdings_;
  bool paused_ = false, wants_move_ = false;
  Nanos backoff_{};
  double speed_ = 0;
  const TimePoint started_ = monotonic_now();
  TimePoint looked_{};  // at the conditions
  TimePoint load_looked_ = monotonic_now();
  std::uint64_t busy_ns_ = 0;
  std::mt19937 random_{std::random_device{}()};
};

}  // namespace

Status run_node(NodeOptions options) { return Node(std::move(options)).run(); }

}  // namespace kvasir::join
