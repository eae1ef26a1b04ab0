#include "verify/worker_client.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <format>
#include <map>

#include "dispatch/client/handshake.h"
#include "net/connect.h"
#include "wire/codec.h"

namespace kvasir::verify {
namespace {

using dispatch::Handshake;
using net::FrameReader;
using wire::FrameType;

// Far below every limit of the protocol at any width: the answer stays in a few frames.
constexpr std::size_t kPairsPerRequest = 512;

int ms_left(TimePoint deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - monotonic_now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000));
}

class Client final : public WorkerClient {
 public:
  Client(std::string name, std::unique_ptr<dispatch::Link> link, wire::Holdings holdings, wire::Numerics numerics, std::string why_fast,
         const WorkerClientOptions& options)
      : name_(std::move(name)),
        link_(std::move(link)),
        holdings_(std::move(holdings)),
        numerics_(numerics),
        why_fast_(std::move(why_fast)),
        answer_wait_(options.answer_wait),
        row_type_(numerics == wire::Numerics::kFast ? options.row_type : wire::RowType::kF32) {}

  const std::string& name() const override { return name_; }
  bool exact() const override { return numerics_ == wire::Numerics::kExact; }
  const wire::Holdings& holdings() const override { return holdings_; }
  wire::RowType row_type() const override { return row_type_; }
  const std::string& why_fast() const override { return why_fast_; }

  ExpertSet experts(const gguf::LayerExperts& layer, const wire::LayerId& id) const override {
    for (const wire::Holding& holding : holdings_.entries)
      if (holding.layer_id == id && holding.group == static_cast<wire::ExpertGroup>(layer.group)) return holding.experts;
    return {};
  }

  Status compute(const gguf::LayerExperts&, const wire::LayerId& id, const wire::Recipe& recipe, ffn::RowsView rows,
                 std::span<const wire::Pair> pairs, float* out) override {
    KVASIR_ASSIGN(const std::uint32_t recipe_id, bind(id, recipe));
    // An expert's pairs stay in one request: its rows are one call of the kernels.
    for (std::size_t first = 0; first < pairs.size();) {
      std::size_t end = std::min(first + kPairsPerRequest, pairs.size());
      while (end < pairs.size() && end > first + 1 && pairs[end].expert == pairs[end - 1].expert) --end;
      KVASIR_TRY(exec(recipe_id, recipe.n_embd, rows, pairs.subspan(first, end - first), out + first * recipe.n_embd));
      first = end;
    }
    return {};
  }

 private:
  Result<std::uint32_t> bind(const wire::LayerId& id, const wire::Recipe& recipe) {
    if (const auto known = bound_.find(id); known != bound_.end()) return known->second;
    const auto recipe_id = static_cast<std::uint32_t>(bound_.size());
    if (recipe_id >= wire::kRecipesMax) return retry_later(std::format("{}: too many layers for one connection.", name_));
    const wire::LayerRecipe message{.recipe_id = recipe_id, .layer_id = id, .recipe = recipe};
    KVASIR_TRY(named(link_->writer.send(*link_->stream, wire::encode_frame(FrameType::kLayerRecipe, 0, message, link_->checksum()))));
    bound_.emplace(id, recipe_id);
    return recipe_id;
  }

  Status exec(std::uint32_t recipe_id, std::uint32_t n_embd, ffn::RowsView rows, std::span<const wire::Pair> pairs, float* out) {
    // Only the rows that are used travel.
    std::map<std::uint32_t, std::uint32_t> sent;
    std::vector<wire::Pair> renumbered;
    std::vector<float> values;
    for (const wire::Pair& pair : pairs) {
      const auto [at, added] = sent.try_emplace(pair.row, static_cast<std::uint32_t>(sent.size()));
      if (added) values.insert(values.end(), rows.data + pair.row * rows.row_stride, rows.data + pair.row * rows.row_stride + n_embd);
      renumbered.push_back({at->second, pair.expert});
    }
    const wire::ExecHead head{.recipe_id = recipe_id, .numerics = numerics_, .row_type = row_type_, .result_type = row_type_, .n_rows = static_cast<std::uint32_t>(sent.size()),
                              .n_pairs = static_cast<std::uint32_t>(pairs.size()), .n_embd = n_embd};
    const auto row_bytes = wire::row_bytes(row_type_, n_embd);
    if (!row_bytes) return fix_input(std::format("rows of {} values do not fit this row type; use --wire f16.", n_embd));
    Bytes bytes(head.n_rows * *row_bytes);
    for (std::size_t r = 0; r < head.n_rows; ++r)
      wire::encode_row(row_type_, std::span(values).subspan(r * n_embd, n_embd), std::span(bytes).subspan(r * *row_bytes, *row_bytes));
    const std::uint64_t id = next_id_++;
    KVASIR_ASSIGN(const Bytes prefix, wire::encode_exec_prefix(id, head, renumbered, {}, bytes, link_->checksum()));
    KVASIR_TRY(named(link_->writer.send(*link_->stream, prefix, bytes)));
    return read_answer(id, head, out);
  }

  Status read_answer(std::uint64_t id, const wire::ExecHead& head, float* out) {
    const TimePoint deadline = monotonic_now() + answer_wait_;
    std::uint32_t received = 0;
    while (received < head.n_pairs) {
      const Result<FrameReader::State> state = link_->reader.read(*link_->stream);
      if (!state) return named(state);
      if (*state == FrameReader::State::kEnd) return retry_elsewhere(std::format("{} closed the connection.", name_));
      if (*state == FrameReader::State::kWouldBlock) {
        KVASIR_TRY(wait(deadline));
        continue;
      }
      const net::Frame& frame = link_->reader.frame();
      if (frame.header.type == FrameType::kError) {
        const Result<wire::ErrorMessage> error = wire::decode_error(frame.payload);
        return retry_elsewhere(std::format("{} refused: {}", name_, error ? error->message : error.error().message));
      }
      if (frame.header.type == FrameType::kHoldings) {
        KVASIR_ASSIGN(holdings_, wire::decode_holdings(frame.payload));
        continue;
      }
      if (frame.header.type != FrameType::kResult || frame.header.request_id != id) continue;
      KVASIR_ASSIGN(const wire::ResultView result, wire::decode_result(frame.payload));
      const wire::ResultHead& r = result.head;
      if (r.row_type != row_type_ || r.n_embd != head.n_embd || r.total_rows != head.n_pairs || r.first_row != received ||
          r.n_rows == 0 || r.n_rows > head.n_pairs - received)
        return retry_elsewhere(std::format("{} answered with other rows than were asked for.", name_));
      const std::size_t row_bytes = result.rows.size() / r.n_rows;
      for (std::size_t i = 0; i < r.n_rows; ++i)
        wire::decode_row(row_type_, result.rows.subspan(i * row_bytes, row_bytes), {out + (received + i) * head.n_embd, head.n_embd});
      received += r.n_rows;
    }
    return {};
  }

  Status wait(TimePoint deadline) {
    KVASIR_TRY(named(link_->writer.flush(*link_->stream)));
    if (monotonic_now() >= deadline)
      return retry_elsewhere(std::format("{} did not answer within {} s.", name_, std::chrono::duration_cast<std::chrono::seconds>(answer_wait_).count()));
    pollfd entry{.fd = link_->stream->fd(), .events = link_->stream->wants(), .revents = 0};
    if (!link_->writer.idle(*link_->stream)) entry.events |= POLLOUT;
    ::poll(&entry, 1, ms_left(deadline));
    return {};
  }

  template <typename T>
  Status named(const Result<T>& result) const {
    if (result) return {};
    return std::unexpected(Error{result.error().action, name_ + ": " + result.error().message});
  }

  std::string name_;
  std::unique_ptr<dispatch::Link> link_;
  wire::Holdings holdings_;
  wire::Numerics numerics_;
  std::string why_fast_;
  Nanos answer_wait_;
  wire::RowType row_type_;
  std::map<wire::LayerId, std::uint32_t> bound_;
  std::uint64_t next_id_ = 1;
};

struct Greeted {
  std::unique_ptr<dispatch::Link> link;
  wire::Holdings holdings;
};

// The connection; or an error whose action is kFixInput where the worker refused us as we are.
Result<Greeted> greet(const dispatch::Peer& peer, const wire::Hello& hello, const net::TlsContext& tls) {
  Handshake handshake(peer, hello, &tls, monotonic_now());
  while (true) {
    switch (handshake.step(monotonic_now())) {
      case Handshake::State::kDone: return Greeted{handshake.take_link(), handshake.take_holdings()};
      case Handshake::State::kFailed: return retry_later(std::format("{} cannot be reached: {}", peer.name, handshake.error()));
      case Handshake::State::kRefused: return fix_input(std::format("{} refused: {}", peer.name, handshake.error()));
      case Handshake::State::kPending: break;
    }
    pollfd entry{.fd = handshake.fd(), .events = handshake.wants(), .revents = 0};
    ::poll(&entry, 1, ms_left(handshake.deadline()));
  }
}

}  // namespace

Result<std::unique_ptr<WorkerClient>> WorkerClient::connect(const dispatch::WorkerAddress& where, const WorkerClientOptions& options) {
  if (where.host.empty()) return fix_input("verify reaches workers directly; give HOST:PORT instead of a relay's name.");
  dispatch::Peer peer;
  peer.where = where;
  peer.name = dispatch::worker_name(where);
  if (!where.fingerprint.empty()) {
    KVASIR_ASSIGN(peer.fingerprint, net::parse_fingerprint(where.fingerprint));
  }
  KVASIR_ASSIGN(peer.addresses, net::resolve({where.host, where.port}));
  KVASIR_ASSIGN(const net::TlsContext tls, net::TlsContext::client());
  wire::Hello hello{.numerics = options.fast ? wire::Numerics::kFast : wire::Numerics::kExact, .software = "kvasir verify", .numerics_id = options.numerics_id, .token = options.token};
  Result<Greeted> greeted = greet(peer, hello, tls);
  std::string why_fast = options.fast ? "fast numerics were asked for" : "";
  if (!options.fast && !greeted && greeted.error().action == ErrorAction::kFixInput) {
    why_fast = greeted.error().message;
    hello.numerics = wire::Numerics::kFast;
    greeted = greet(peer, hello, tls);
  }
  if (!greeted) return std::unexpected(greeted.error());
  return std::make_unique<Client>(peer.name, std::move(greeted->link), std::move(greeted->holdings), hello.numerics, std::move(why_fast),
                                  options);
}

}  // namespace kvasir::verify
