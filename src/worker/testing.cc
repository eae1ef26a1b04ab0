#include "worker/testing.h"

#include <unistd.h>

#include <random>

#include "base/check.h"
#include "gguf/slice.h"
#include "gguf/synth.h"

namespace kvasir::worker::testing {
namespace {

// A test that waits this long has failed.
constexpr std::chrono::seconds kPatience{20};

template <typename T>
T must(Result<T> result) {
  if (!result) {
    ADD_FAILURE() << result.error().message;
    std::abort();
  }
  if constexpr (!std::is_void_v<T>) return *std::move(result);
}

}  // namespace

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "kvasir-worker-XXXXXX").string();
  KVASIR_CHECK(::mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void make_model(const std::string& path, const ModelShape& shape) {
  gguf::SynthOptions options;
  options.n_layer = shape.n_layer;
  options.n_expert = shape.n_expert;
  options.n_embd = shape.n_embd;
  options.n_ff = shape.n_ff;
  options.gate = options.up = options.down = shape.type;
  options.seed = shape.seed;
  must(gguf::write_synthetic(options, path));
}

void make_slice(const std::string& model_path, const std::string& layers, const std::string& experts,
                const std::string& path) {
  const gguf::MoeModel model = must(gguf::MoeModel::open(model_path));
  const gguf::SlicePlan plan = must(gguf::SlicePlan::from_ranges(model, layers, experts));
  must(gguf::write_slice(must(gguf::SliceLayout::make(model, plan)), path));
}

SliceStore load(const std::vector<std::string>& files, StoreOptions options) {
  return must(SliceStore::load(files, options));
}

std::vector<float> random_rows(std::size_t n, std::uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(rng);
  return values;
}

std::vector<float> direct(const HeldLayer& layer, const wire::Recipe& recipe, std::span<const wire::Pair> pairs,
                          std::span<const float> rows) {
  const auto engine = must(ffn::Engine::create({}));
  std::vector<ffn::LocalPair> local;
  for (const wire::Pair& pair : pairs)
    local.push_back({pair.row, static_cast<std::uint32_t>(layer.local_of[pair.expert])});
  std::vector<float> out(pairs.size() * recipe.n_embd);
  must(engine->compute(recipe, layer.tensors,
                       {rows.data(), recipe.n_embd, static_cast<std::uint32_t>(rows.size() / recipe.n_embd)}, local,
                       out.data()));
  return out;
}

const wire::NumericsId& our_numerics_id() {
  static const wire::NumericsId id = must(ffn::numerics_id());
  return id;
}

TestServer::TestServer(const std::vector<std::string>& files, ServerOptions options, std::unique_ptr<ffn::Engine> engine) {
  if (!engine) engine = must(ffn::Engine::create({}));
  server_ = must(Server::listen({"127.0.0.1", 0}, load(files), ggml_backend_cpu_buffer_type(), std::move(engine), our_numerics_id(),
                                std::move(options)));
  thread_ = std::thread([this] { finished_in_time_ = server_->run(); });
}

bool TestServer::stop() {
  server_->request_stop();
  if (thread_.joinable()) thread_.join();
  return finished_in_time_;
}

TestServer::~TestServer() { stop(); }

wire::Hello backbone_hello() {
  wire::Hello hello;
  hello.software = "test";
  hello.numerics_id = our_numerics_id();
  return hello;
}

TestClient::TestClient(std::uint16_t port, const net::TlsContext* tls, const net::Fingerprint* pin) {
  net::Fd fd = must(net::connect_to({"127.0.0.1", port}, kPatience));
  stream_ = tls ? must(net::make_tls_client_stream(std::move(fd), *tls, *pin)) : net::make_plain_stream(std::move(fd));
}

void TestClient::send(ByteSpan bytes) {
  Timeouts timeouts;
  timeouts.stall = kPatience;
  const Status sent = send_whole(*stream_, writer_, timeouts, bytes);
  // A worker that has closed already is what some tests are about.
  if (!sent) std::fprintf(stderr, "note: %s\n", sent.error().message.c_str());
}

std::optional<wire::FrameHeader> TestClient::next() {
  const TimePoint deadline = monotonic_now() + kPatience;
  while (true) {
    const auto state = reader_.read(*stream_);
    if (!state || *state == net::FrameReader::State::kEnd) return std::nullopt;
    if (*state == net::FrameReader::State::kFrame) return reader_.frame().header;
    if (monotonic_now() >= deadline) {
      ADD_FAILURE() << "no frame came";
      return std::nullopt;
    }
    wait_for(stream_.get(), true, nullptr, deadline);
  }
}

wire::Holdings TestClient::greet(const wire::Hello& hello) {
  send(wire::FrameType::kHello, 0, hello);
  const auto theirs = next();
  if (!theirs || theirs->type != wire::FrameType::kHello) {
    ADD_FAILURE() << "no HELLO came";
    return {};
  }
  EXPECT_EQ(must(wire::decode_hello(payload())).numerics_id, our_numerics_id());
  const auto holdings = next();
  if (!holdings || holdings->type != wire::FrameType::kHoldings) {
    ADD_FAILURE() << "no HOLDINGS came";
    return {};
  }
  return must(wire::decode_holdings(payload()));
}

void TestClient::bind(std::uint32_t recipe_id, const wire::LayerId& layer_id, const wire::Recipe& recipe) {
  send(wire::FrameType::kLayerRecipe, recipe_id, wire::LayerRecipe{recipe_id, layer_id, recipe});
}

void TestClient::send_exec(std::uint64_t request_id, const wire::ExecHead& head, std::span<const wire::Pair> pairs,
                           std::span<const float> rows, std::span<const float> weights) {
  const std::size_t row_bytes = wire::row_bytes(head.row_type, head.n_embd).value();
  Bytes encoded(head.n_rows * row_bytes);
  for (std::size_t i = 0; i < head.n_rows; ++i)
    wire::encode_row(head.row_type, rows.subspan(i * head.n_embd, head.n_embd),
                     std::span(encoded).subspan(i * row_bytes, row_bytes));
  Bytes frame = must(wire::encode_exec_prefix(request_id, head, pairs, weights, encoded, true));
  frame.insert(frame.end(), encoded.begin(), encoded.end());
  send(frame);
}

std::vector<float> TestClient::result(std::uint64_t request_id) {
  std::vector<float> values;
  while (true) {
    const auto header = next();
    if (!header) {
      ADD_FAILURE() << "the worker closed";
      return {};
    }
    if (header->type == wire::FrameType::kDrain) continue;
    if (header->type == wire::FrameType::kError) {
      ADD_FAILURE() << must(wire::decode_error(payload())).message;
      return {};
    }
    EXPECT_EQ(header->type, wire::FrameType::kResult);
    EXPECT_EQ(header->request_id, request_id);
    const wire::ResultView view = must(wire::decode_result(payload()));
    values.resize(std::size_t{view.head.total_rows} * view.head.n_embd);
    const std::size_t row_bytes = view.rows.size() / view.head.n_rows;
    for (std::size_t i = 0; i < view.head.n_rows; ++i)
      wire::decode_row(view.head.row_type, view.rows.subspan(i * row_bytes, row_bytes),
                       std::span(values).subspan((view.head.first_row + i) * view.head.n_embd, view.head.n_embd));
    if (!(header->flags & wire::kFlagMore)) return values;
  }
}

wire::ErrorMessage TestClient::error(std::uint64_t request_id) {
  std::optional<wire::FrameHeader> header;
  do {
    header = next();
  } while (header && header->type == wire::FrameType::kDrain);
  if (!header) {
    ADD_FAILURE() << "the worker closed without an ERROR";
    return {};
  }
  EXPECT_EQ(header->type, wire::FrameType::kError);
  EXPECT_EQ(header->request_id, request_id);
  return header->type == wire::FrameType::kError ? must(wire::decode_error(payload())) : wire::ErrorMessage{};
}

bool TestClient::closed() { return !next(); }

}  // namespace kvasir::worker::testing
