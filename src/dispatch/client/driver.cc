#include "dispatch/client/driver.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "dispatch/client/row_copy.h"

namespace kvasir::dispatch {
namespace {

constexpr Nanos kProgressAfter = std::chrono::seconds(1);
constexpr Nanos kLookAgain = std::chrono::milliseconds(20);
// A round looks up from its poll at least this often.
constexpr Nanos kPollMax = std::chrono::seconds(1);

void clear_sums(const Round& round) {
  if (round.weighted()) std::fill_n(round.out, std::size_t{round.n_rows} * round.layer->recipe.n_embd, 0.0f);
}

}  // namespace

Driver::Driver(Shared& shared, std::shared_ptr<Port> port)
    : shared_(shared),
      port_(std::move(port)),
      engine_(0, shared.options.local != LocalPolicy::kNever, shared.fleet.tuning()),
      check_rows_(shared) {}

Driver::~Driver() {
  {
    const MutexLock lock(shared_.mutex);
    std::erase(shared_.ports, port_);
    // What is outstanding will be answered to nobody.
    for (WorkerIndex w = 0; w < links_.size(); ++w) engine_.link_down(w);
    engine_.settle(shared_.fleet, monotonic_now());
    tell_bytes();
  }
  shared_.bell.ring();
}

Status Driver::run(const Round& round, const LocalCompute& local, const Meanwhile& meanwhile) {
  // Called across a C ABI: nothing may throw out of here.
  try {
    meanwhile_ = meanwhile ? &meanwhile : nullptr;
    Status status = run_round(round, local);
    while (status && meanwhile_ != nullptr) status = compute_meanwhile();
    meanwhile_ = nullptr;
    return status;
  } catch (const std::exception& error) {
    return give_up(error);
  }
}

// Half-done state goes with the links; the next round starts clean.
Status Driver::give_up(const std::exception& error) {
  round_ = nullptr;
  meanwhile_ = nullptr;
  try {
    for (WorkerIndex w = 0; w < links_.size(); ++w) drop_link(w, Nanos(0));
    engine_.abandon();
    return retry_later(std::string("a layer round failed (") + error.what() + "); lower --ubatch-size if memory is short.");
  } catch (const std::exception&) {
    engine_.abandon();
    return std::unexpected(Error{ErrorAction::kRetryLater, {}});
  }
}

Status Driver::run_round(const Round& round, const LocalCompute& local) {
  const TimePoint start = monotonic_now();
  if (round.pairs.empty()) {
    clear_sums(round);
    return {};
  }
  if (round.weighted() && shared_.options.numerics != wire::Numerics::kFast)
    return fix_input("weighted sums are not what this numeric class promises; choose KVASIR_NUMERICS=fast.");
  Status status;
  if (!shared_.remote || round.layer->recipe_id >= wire::kRecipesMax) {
    status = run_local_only(round, local);
  } else {
    if (port_->has_mail()) collect_mail();
    take_moved();
    let_go();
    if (!waited_) wait_for_first_links();
    round_ = &round;
    status = drive(round, local);
    round_ = nullptr;
    take_moved();
    let_go();
  }
  finish_stats(round, monotonic_now() - start);
  return status;
}

Status Driver::run_local_only(const Round& round, const LocalCompute& local) {
  if (shared_.options.local == LocalPolicy::kNever)
    return fix_input("layer " + std::to_string(round.layer->layer) +
                     ": no worker can be asked and local compute is off; set KVASIR_WORKERS.");
  clear_sums(round);
  all_pairs_.resize(round.pairs.size());
  std::iota(all_pairs_.begin(), all_pairs_.end(), 0u);
  add(shared_.stats.pairs_local, round.pairs.size());
  return local(round, all_pairs_);
}

// Gives the configured workers time to connect, once; later drivers wait for the links to
// those that are up.
void Driver::wait_for_first_links() {
  waited_ = true;
  const TimePoint start = monotonic_now();
  bool told = false;
  while (true) {
    std::string missing;
    std::size_t n_missing = 0;
    {
      const MutexLock lock(shared_.mutex);
      Fleet& fleet = shared_.fleet;
      if (!shared_.table_known && !shared_.first_wait_done) {
        n_missing = 1;
        missing = "their list has not come yet";
      }
      for (WorkerIndex w = 0; w < fleet.size(); ++w) {
        if ((w < links_.size() && links_[w].link) || fleet.state(w) == WorkerState::kRemoved) continue;
        const bool up = fleet.state(w) == WorkerState::kUp;
        if (!up && (shared_.first_wait_done || fleet.refused(w) || fleet.failures(w) >= kFailuresSettled)) continue;
        ++n_missing;
        missing += (missing.empty() ? "" : ", ") + shared_.slots[w].name;
      }
    }
    const TimePoint now = monotonic_now();
    if (n_missing == 0 || now - start >= shared_.options.connect_wait) break;
    if (!told && now - start >= kProgressAfter) {
      told = true;
      shared_.log("waiting for " + std::to_string(n_missing) + " workers (" + missing + ").");
    }
    pollfd entry{.fd = port_->fd(), .events = POLLIN, .revents = 0};
    ::poll(&entry, 1, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(kLookAgain).count()));
    if (port_->has_mail()) collect_mail();
  }
  const MutexLock lock(shared_.mutex);
  shared_.first_wait_done = true;
}

Status Driver::drive(const Round& round, const LocalCompute& local) {
  const wire::Recipe& recipe = round.layer->recipe;
  const Options& options = shared_.options;
  const auto row_size = wire::row_bytes(options.row_type, recipe.n_embd);
  const auto result_size = wire::row_bytes(options.result_type, recipe.n_embd);
  if (!row_size || !result_size)
    return fix_input("rows of " + std::to_string(recipe.n_embd) + " values do not fit the row type asked for; set KVASIR_WIRE=f32.");
  // Late answers first: the choice of workers depends on them. (A connection that was closed
  // meanwhile shows when it is used.)
  if (engine_.owes_answers()) poll_links(Nanos(0));
  {
    const MutexLock lock(shared_.mutex);
    shared_.hot.note_uses(round.layer->recipe_id, round.pairs);
    std::span<const wire::RowType> types;
    if (options.wire_auto) types = wire_choice_.types(shared_.fleet.size(), round.layer->recipe_id, round.n_rows);
    KVASIR_TRY(engine_.begin(shared_.fleet,
                             {.key = {round.layer->layer_id, recipe.group},
                              .layer = round.layer->layer,
                              .n_expert = recipe.n_expert,
                              .n_rows = round.n_rows,
                              .n_embd = recipe.n_embd,
                              .row_type = options.row_type,
                              .result_type = options.result_type,
                              .worker_types = types,
                              // In the widest type: what overflows a narrow one travels in that.
                              .request_rows_max = exec_rows_max(recipe.n_embd * sizeof(float)),
                              .request_pairs_max = exec_pairs_max(recipe.n_embd * sizeof(float)),
                              .pairs = round.pairs,
                              .weights = round.weights,
                              .hot = shared_.hot.members(round.layer->recipe_id)},
                             monotonic_now()));
  }
  check_rows_.begin_round(round);
  carry_out(round);
  clear_sums(round);  // while the requests travel; no answer to them is read before this
  if (!round.weighted()) warm_for_writing(round.out, round.pairs.size() * recipe.n_embd);
  Status local_status;
  TimePoint spin_until = monotonic_now() + options.spin;
  bool all_seen = false;  // once, all links are looked at; no answer can have come yet
  while (!engine_.finished()) {
    TimePoint now = monotonic_now();
    if (meanwhile_ != nullptr) {
      local_status = compute_meanwhile();
      if (!local_status) break;
      poll_links(Nanos(0));
      spin_until = monotonic_now() + options.spin;
    } else if (engine_.has_local()) {
      local_status = compute_here(round, local);
      if (!local_status) break;
      poll_links(Nanos(0));
    } else if (engine_.has_local_check()) {
      local_status = compute_check(round, local);
      if (!local_status) break;
      poll_links(Nanos(0));
    } else if (now < spin_until) {
      if (std::exchange(all_seen, true)) look();
      else poll_links(Nanos(0));
    } else {
      poll_links(std::clamp(engine_.next_wake() - now, Nanos(0), kPollMax));
    }
    if (engine_.has_checks_to_judge()) engine_.judge_checks(check_rows_);
    // `now` is from before the reading: nobody is late whose answer lay there already.
    if (engine_.needs_advance(now)) {
      {
        const MutexLock lock(shared_.mutex);
        engine_.advance(shared_.fleet, now);
      }
      carry_out(round);
      spin_until = now + options.spin;
    }
  }
  Status status;
  {
    const MutexLock lock(shared_.mutex);
    status = engine_.end(shared_.fleet, monotonic_now());
    tell_bytes();
  }
  carry_out(round);
  if (options.wire_auto)
    for (const RoundEngine::Timing& timing : engine_.timings) wire_choice_.observe(timing.worker, timing.type, round.n_rows, timing.ratio);
  if (!local_status) return local_status;
  return status;
}

Status Driver::compute_meanwhile() {
  KVASIR_ASSIGN(const bool more, (*meanwhile_)());
  if (!more) meanwhile_ = nullptr;
  return {};
}

Status Driver::compute_here(const Round& round, const LocalCompute& local) {
  // One expert at a time while answers are on their way, so that they are read in between.
  const std::span<const std::uint32_t> indices = engine_.take_local(engine_.awaits_remote());
  if (indices.empty()) return {};
  const TimePoint start = monotonic_now();
  KVASIR_TRY(local(round, indices));
  const Nanos took = monotonic_now() - start;
  const std::size_t n_embd = round.layer->recipe.n_embd;
  engine_.local_done(took, [&](std::uint32_t pair) {
    return all_sane({round.out + (round.weighted() ? round.pairs[pair].row : pair) * n_embd, n_embd});
  });
  return {};
}

// The expert alone, as a round of its own: its rows are all of that expert's, so the bits are
// those of the round.
Status Driver::compute_check(const Round& round, const LocalCompute& local) {
  std::uint32_t first_slot = 0;
  const std::span<const std::uint32_t> indices = engine_.take_local_check(first_slot);
  if (indices.empty()) return {};
  const TimePoint start = monotonic_now();
  check_rows_.grow(engine_.check_slots());
  check_pairs_.clear();
  for (std::uint32_t i : indices) check_pairs_.push_back(round.pairs[i]);
  Round again = round;
  again.pairs = check_pairs_;
  again.out = check_rows_.row(first_slot).data();
  all_pairs_.resize(check_pairs_.size());
  std::iota(all_pairs_.begin(), all_pairs_.end(), 0u);
  KVASIR_TRY(local(again, all_pairs_));
  const Nanos took = monotonic_now() - start;
  engine_.check_computed(took);
  check_time_ += took;
  return {};
}

// --- orders ------------------------------------------------------------------------------

void Driver::carry_out(const Round& round) {
  for (std::size_t i = 0; i < engine_.to_send.size(); ++i) send_request(round, engine_.request(engine_.to_send[i]));
  engine_.to_send.clear();
  for (const RoundEngine::Cancel& cancel : engine_.to_cancel) {
    DataLink& data = links_[cancel.worker];
    if (!data.link) continue;
    const Bytes frame = wire::encode_empty_frame(wire::FrameType::kCancel, cancel.id);
    count_sent(cancel.worker, frame.size());
    if (!data.link->writer.send(*data.link->stream, frame)) drop_link(cancel.worker, Nanos(0));
  }
  engine_.to_cancel.clear();
  for (WorkerIndex w : engine_.to_drop) {
    Nanos wait;
    {
      const MutexLock lock(shared_.mutex);
      wait = shared_.fleet.on_link_stalled(w);
    }
    if (links_[w].link) shared_.log("worker " + shared_.name(w) + " has owed an answer for too long; its connection is made anew.");
    drop_link(w, wait);
  }
  engine_.to_drop.clear();
  for (WorkerIndex w : engine_.quarantined) {
    shared_.log("worker " + shared_.name(w) + " answered wrongly; it is not asked for a while, and then on probation.");
    drop_link(w, Nanos(0));
  }
  engine_.quarantined.clear();
}

Driver::Rows Driver::rows_of(const Round& round, const Request& request, DataLink& data) {
  const std::size_t n_embd = round.layer->recipe.n_embd;
  const auto n_rows = static_cast<std::uint32_t>(request.rows.size());
  const bool consecutive = request.rows.back() - request.rows.front() + 1 == n_rows;  // they ascend
  wire::RowType type = request.row_type;
  if (shared_.options.wire_auto && type == wire::RowType::kF32)
    show(WireChoice::Direction::kSent, std::span(round.rows + request.rows.front() * round.row_stride, n_embd));
  if (type == wire::RowType::kF32 && consecutive && (round.row_stride == n_embd || n_rows == 1))
    return {std::as_bytes(std::span(round.rows + request.rows.front() * round.row_stride, n_rows * n_embd)), type, true};
  const auto row = [&](std::uint32_t r) { return std::span(round.rows + request.rows[r] * round.row_stride, n_embd); };
  for (std::uint32_t r = 0; r < n_rows; ++r)
    if (!fits(type, row(r))) type = wire::RowType::kBF16;
  const std::size_t row_size = *wire::row_bytes(type, round.layer->recipe.n_embd);
  if (!data.gathered || data.gathered.use_count() > 1) data.gathered = std::make_shared<Bytes>();
  data.gathered->resize(n_rows * row_size);
  for (std::uint32_t r = 0; r < n_rows; ++r)
    wire::encode_row(type, row(r), std::span(*data.gathered).subspan(r * row_size, row_size));
  return {*data.gathered, type, false};
}

void Driver::show(WireChoice::Direction direction, std::span<const float> row) {
  const std::uint32_t layer = round_->layer->recipe_id;
  if (wire_choice_.gate_wants(layer, direction)) wire_choice_.show(layer, direction, f16_loss(row));
}

void Driver::send_request(const Round& round, const Request& request) {
  DataLink& data = links_[request.worker];
  if (!data.link) return engine_.link_down(request.worker);  // lost while orders were carried out
  Link& link = *data.link;
  const Layer& layer = *round.layer;
  if (link.recipes_bound.size() <= layer.recipe_id) link.recipes_bound.resize(layer.recipe_id + 1);
  if (!link.recipes_bound[layer.recipe_id]) {
    link.recipes_bound[layer.recipe_id] = true;
    const wire::LayerRecipe message{.recipe_id = layer.recipe_id, .layer_id = layer.layer_id, .recipe = layer.recipe};
    const Bytes frame = wire::encode_frame(wire::FrameType::kLayerRecipe, 0, message, link.checksum());
    count_sent(request.worker, frame.size());
    if (!link.writer.send(*link.stream, frame)) return drop_link(request.worker, Nanos(0));
  }
  const Rows rows = rows_of(round, request, data);
  const wire::ExecHead head{.recipe_id = layer.recipe_id,
                            .numerics = shared_.options.numerics,
                            .row_type = rows.type,
                            .result_type = request.result_type,
                            .result_kind = round.weighted() ? wire::ResultKind::kWeightedSum : wire::ResultKind::kPerPair,
                            .n_rows = static_cast<std::uint32_t>(request.rows.size()),
                            .n_pairs = static_cast<std::uint32_t>(request.wire_pairs.size()),
                            .n_embd = layer.recipe.n_embd};
  const Result<Bytes> prefix = wire::encode_exec_prefix(request.id, head, request.wire_pairs, request.weights, rows.bytes, link.checksum());
  if (!prefix) {
    shared_.log(prefix.error().message);
    return drop_link(request.worker, Nanos(0));
  }
  count_sent(request.worker, prefix->size() + rows.bytes.size());
  const Status sent = rows.in_place ? link.writer.send(*link.stream, *prefix, rows.bytes)
                                    : link.writer.send_shared(*link.stream, *prefix, rows.bytes, data.gathered);
  if (!sent) drop_link(request.worker, Nanos(0));
}

void Driver::finish_stats(const Round& round, Nanos took) {
  AtomicStats& stats = shared_.stats;
  const RoundCounters& now = engine_.counters();
  add(stats.rounds, 1);
  add(stats.pairs_remote, now.pairs_remote - told_.pairs_remote);
  add(stats.pairs_local, now.pairs_local - told_.pairs_local);
  add(stats.hedges, now.hedges - told_.hedges);
  add(stats.late_answers, now.late_answers + now.unknown_answers - told_.late_answers - told_.unknown_answers);
  add(stats.rounds_busy, now.busy > told_.busy ? 1 : 0);
  add(stats.invalid_answers, now.invalid_answers - told_.invalid_answers);
  add(stats.spot_pairs, now.pairs_verified + now.pairs_wrong - told_.pairs_verified - told_.pairs_wrong);
  add(stats.spot_wrong, now.pairs_wrong - told_.pairs_wrong);
  add(stats.spot_unanswered, now.checks_unanswered - told_.checks_unanswered);
  add(stats.spot_undecided, now.checks_undecided - told_.checks_undecided);
  add(stats.spot_ns_sum, static_cast<std::uint64_t>(std::exchange(check_time_, Nanos(0)).count()));
  add(stats.bytes_sent, std::exchange(bytes_sent_, 0));
  add(stats.bytes_received, std::exchange(bytes_received_, 0));
  add(stats.round_ns_sum, static_cast<std::uint64_t>(took.count()));
  told_ = now;
  // Every Layer handed out is the base of a LayerEntry (register_layer).
  const LayerEntry& entry = static_cast<const LayerEntry&>(*round.layer);
  const auto ns = static_cast<std::uint64_t>(std::max<std::int64_t>(took.count(), 1));
  for (const wire::Pair& pair : round.pairs)
    if (pair.expert < entry.recipe.n_expert) add(entry.uses[pair.expert], 1);
  add(entry.rounds[std::min<std::size_t>(std::bit_width(ns) - 1u, entry.rounds.size() - 1)], 1);
  add(entry.round_ns_sum, ns);
}

}  // namespace kvasir::dispatch
