#include "verify/stand_in.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <thread>

#include "base/mutex.h"
#include "net/connect.h"
#include "net/frame_io.h"
#include "verify/recipes.h"
#include "wire/codec.h"

namespace kvasir::verify {
namespace {

using net::FrameReader;
using wire::FrameType;

// How long a thread may go without looking whether it shall stop.
constexpr int kLook_ms = 20;
// A backbone has a control connection and one data connection a stream.
constexpr std::size_t kConnectionsMax = 64;

class StandInImpl final : public StandIn {
 public:
  StandInImpl(std::map<wire::LayerId, const gguf::LayerExperts*> layers, Subject* subject, wire::Holdings holdings, net::Listener listener)
      : layers_(std::move(layers)), subject_(subject), holdings_(std::move(holdings)), listener_(std::move(listener)) {
    acceptor_ = std::thread([this] { accept_loop(); });
  }
  ~StandInImpl() override { join(); }

  std::uint16_t port() const override { return listener_.port; }

  Result<std::map<wire::LayerId, LayerRows>> stop() override {
    join();
    const MutexLock lock(mutex_);
    if (!subject_status_) return std::unexpected(subject_status_.error());
    return std::move(recorded_);
  }

 private:
  struct Connection {
    std::unique_ptr<net::Stream> stream;
    FrameReader reader;
    net::FrameWriter writer;
    std::map<std::uint32_t, wire::LayerRecipe> recipes;
    bool send(const Bytes& frame) { return writer.send(*stream, frame).has_value(); }
  };

  void join() {
    stop_ = true;
    if (acceptor_.joinable()) acceptor_.join();
    for (std::thread& thread : connections_) thread.join();
    connections_.clear();
  }

  void accept_loop() {
    while (!stop_) {
      pollfd entry{.fd = listener_.fd.get(), .events = POLLIN, .revents = 0};
      if (::poll(&entry, 1, kLook_ms) <= 0) continue;
      Result<std::optional<net::Accepted>> accepted = net::accept_from(listener_);
      if (!accepted || !*accepted || connections_.size() >= kConnectionsMax) continue;
      connections_.emplace_back([this, fd = std::move((*accepted)->fd)]() mutable { serve(std::move(fd)); });
    }
  }

  void serve(net::Fd fd) {
    Connection c{.stream = net::make_plain_stream(std::move(fd)), .reader = FrameReader(), .writer = net::FrameWriter(), .recipes = {}};
    while (!stop_) {
      const Result<FrameReader::State> state = c.reader.read(*c.stream);
      if (!state || *state == FrameReader::State::kEnd || !c.writer.flush(*c.stream)) return;
      if (*state == FrameReader::State::kFrame) {
        if (!on_frame(c, c.reader.frame())) return;
        continue;
      }
      pollfd entry{.fd = c.stream->fd(), .events = c.stream->wants(), .revents = 0};
      if (!c.writer.idle(*c.stream)) entry.events |= POLLOUT;
      ::poll(&entry, 1, kLook_ms);
    }
  }

  bool on_frame(Connection& c, const net::Frame& frame) {
    switch (frame.header.type) {
      case FrameType::kHello: {
        Result<wire::Hello> hello = wire::decode_hello(frame.payload);
        if (!hello) return false;
        // Whatever the backbone computes with, it is going to compute with that itself.
        hello->role = wire::Role::kWorker;
        hello->token.clear();
        return c.send(wire::encode_frame(FrameType::kHello, 0, *hello, true)) &&
               c.send(wire::encode_frame(FrameType::kHoldings, 0, holdings_, true));
      }
      case FrameType::kPing: {
        const Result<wire::Ping> ping = wire::decode_ping(frame.payload);
        return ping && c.send(wire::encode_frame(FrameType::kPong, 0, wire::Pong{.sent_ns = ping->sent_ns}, true));
      }
      case FrameType::kLayerRecipe: {
        const Result<wire::LayerRecipe> recipe = wire::decode_layer_recipe(frame.payload);
        if (!recipe) return false;
        c.recipes[recipe->recipe_id] = *recipe;
        return true;
      }
      case FrameType::kExec: {
        const Result<wire::ExecView> exec = wire::decode_exec(frame.payload);
        if (!exec) return false;
        const auto bound = c.recipes.find(exec->head.recipe_id);
        if (bound == c.recipes.end() || exec->head.row_type != wire::RowType::kF32 || exec->head.n_embd != bound->second.recipe.n_embd)
          return false;
        record(bound->second, *exec);
        if (subject_) return answer(c, frame.header.request_id, bound->second, *exec);
        return decline(c, frame.header.request_id, {wire::ErrorCode::kBusy, "This worker only records."});
      }
      default: return true;
    }
  }

  static bool decline(Connection& c, std::uint64_t id, const wire::ErrorMessage& why) {
    return c.send(wire::encode_frame(FrameType::kError, id, why, true));
  }

  bool answer(Connection& c, std::uint64_t id, const wire::LayerRecipe& bound, const wire::ExecView& exec) {
    const std::size_t n_embd = bound.recipe.n_embd;
    std::vector<float> rows(exec.head.n_rows * n_embd), out(exec.head.n_pairs * n_embd);
    std::memcpy(rows.data(), exec.rows.data(), exec.rows.size());
    std::vector<wire::Pair> pairs;
    for (std::uint32_t i = 0; i < exec.head.n_pairs; ++i) pairs.push_back(exec.pair(i));
    {
      const MutexLock lock(mutex_);
      const auto layer = layers_.find(bound.layer_id);
      if (layer == layers_.end()) return decline(c, id, {wire::ErrorCode::kUnknownLayer, "This layer is not the model's."});
      Status computed = subject_->compute(*layer->second, bound.layer_id, bound.recipe, {rows.data(), n_embd, exec.head.n_rows}, pairs, out.data());
      if (!computed) {
        const wire::ErrorMessage why{wire::ErrorCode::kInternal, computed.error().message};
        subject_status_ = std::move(computed);
        return decline(c, id, why);
      }
    }
    const std::uint32_t n = exec.head.n_pairs, step = wire::result_rows_per_frame(wire::RowType::kF32, exec.head.n_embd);
    for (std::uint32_t first = 0; first < n; first += step) {
      const std::uint32_t count = std::min(step, n - first);
      const ByteSpan bytes = std::as_bytes(std::span(out).subspan(first * n_embd, count * n_embd));
      const wire::ResultHead head{.n_embd = exec.head.n_embd, .first_row = first, .n_rows = count, .total_rows = n};
      if (!c.writer.send(*c.stream, wire::encode_result_prefix(id, head, bytes, first + count < n, true), bytes)) return false;
    }
    return true;
  }

  void record(const wire::LayerRecipe& bound, const wire::ExecView& exec) {
    const MutexLock lock(mutex_);
    LayerRows& layer = recorded_[bound.layer_id];
    layer.recipe = bound.recipe;
    const std::uint32_t have = layer.n_rows();
    const std::uint32_t taken = std::min(exec.head.n_rows, kRecordedRowsMax - std::min(have, kRecordedRowsMax));
    const std::size_t n_floats = std::size_t{taken} * bound.recipe.n_embd;
    layer.rows.resize(layer.rows.size() + n_floats);
    std::memcpy(layer.rows.data() + layer.rows.size() - n_floats, exec.rows.data(), n_floats * sizeof(float));
    for (std::uint32_t i = 0; i < exec.head.n_pairs; ++i)
      if (const wire::Pair pair = exec.pair(i); pair.row < taken) layer.routed[pair.expert].push_back(have + pair.row);
  }

  const std::map<wire::LayerId, const gguf::LayerExperts*> layers_;
  Subject* const subject_;
  const wire::Holdings holdings_;
  net::Listener listener_;
  std::atomic<bool> stop_{false};
  std::thread acceptor_;
  std::vector<std::thread> connections_;  // the acceptor's, until it has ended
  Mutex mutex_;
  std::map<wire::LayerId, LayerRows> recorded_ KVASIR_GUARDED_BY(mutex_);
  Status subject_status_ KVASIR_GUARDED_BY(mutex_);
};

}  // namespace

Result<std::unique_ptr<StandIn>> StandIn::start(const gguf::MoeModel& model, Subject* subject) {
  wire::Holdings holdings;
  std::map<wire::LayerId, const gguf::LayerExperts*> layers;
  for (const gguf::LayerExperts& layer : model.layers()) {
    KVASIR_ASSIGN(const wire::LayerId id, model.layer_id(layer));
    layers[id] = &layer;
    const ExpertSet experts = subject ? subject->experts(layer, id) : ExpertSet::all(layer.n_expert);
    if (experts.empty()) continue;
    // Not the model's width: some architectures run their experts in a narrower space.
    KVASIR_ASSIGN(const wire::Recipe recipe, recipe_from_file(model, layer));
    holdings.entries.push_back({.layer_id = id, .layer = layer.layer, .group = recipe.group, .n_expert = layer.n_expert,
                                .n_embd = recipe.n_embd, .experts = experts});
  }
  KVASIR_ASSIGN(net::Listener listener, net::listen_on({"127.0.0.1", 0}));
  return std::make_unique<StandInImpl>(std::move(layers), subject, std::move(holdings), std::move(listener));
}

}  // namespace kvasir::verify
