#include "worker/merge.h"

#include <utility>

#include "base/check.h"

namespace kvasir::worker {

bool may_merge(const wire::ExecHead& head, std::uint32_t merged_pairs_max) {
  return head.numerics != wire::Numerics::kExact && head.n_pairs < merged_pairs_max && head.n_rows <= head.n_pairs;
}

std::shared_ptr<MergeableWork> mergeable_work(MemoryBudget& budget, const wire::LayerId& layer_id, const wire::Recipe& recipe,
                                              ByteSpan payload) {
  auto work = std::make_shared<MergeableWork>(budget, layer_id, recipe, Bytes(payload.begin(), payload.end()));
  const Result<wire::ExecView> view = wire::decode_exec(work->payload);  // now of the copy
  KVASIR_CHECK(view.has_value());
  work->view = *view;
  return work;
}

TakenAlong::TakenAlong(ComputeGate& gate, const ExecRequest& own, const wire::ExecView& view, const BoundRecipe& bound,
                       std::uint32_t merged_pairs_max)
    : gate_(gate) {
  if (!may_merge(view.head, merged_pairs_max) || !own.in_one_piece() || gate.waiting() == 0) return;
  std::uint32_t n_pairs = view.head.n_pairs;
  bool full = false;  // once one of them finds no room, those behind it do not overtake it
  const auto taken = gate.take_along([&](const ComputeGate::Work& waiting) {
    const auto& work = static_cast<const MergeableWork&>(waiting);
    if (full || work.layer_id != bound.layer->layer_id || work.recipe != bound.recipe ||
        work.view.head.numerics != view.head.numerics)
      return false;
    full = n_pairs + work.view.head.n_pairs > merged_pairs_max;
    if (!full) n_pairs += work.view.head.n_pairs;
    return !full;
  });
  for (const auto& waiting : taken) works_.push_back(std::static_pointer_cast<MergeableWork>(waiting));
  std::erase_if(works_, [&](const auto& work) {
    auto refusal = work->request.prepare(work->view, bound);
    if (refusal) deliver(*work, std::move(refusal));
    return work->refusal.has_value();
  });
}

TakenAlong::~TakenAlong() { refuse("The computation that this request shared was given up."); }

void TakenAlong::refuse(const std::string& why) {
  for (const auto& work : works_) deliver(*work, wire::ErrorMessage{wire::ErrorCode::kInternal, why});
  works_.clear();
}

void TakenAlong::deliver(MergeableWork& work, std::optional<wire::ErrorMessage> refusal) {
  work.refusal = std::move(refusal);
  gate_.deliver(work);
}

std::uint32_t TakenAlong::pairs() const {
  std::uint32_t n = 0;
  for (const auto& work : works_) n += work->view.head.n_pairs;
  return n;
}

std::size_t TakenAlong::experts(const ExecRequest& own) const {
  std::vector<bool> seen;
  std::size_t n = own.count_new_experts(seen);
  for (const auto& work : works_) n += work->request.count_new_experts(seen);
  return n;
}

Status TakenAlong::compute(ffn::Engine& engine, ExecRequest& own, ExecRequest::Batch& batch) {
  std::vector<ExecRequest*> requests{&own};
  for (const auto& work : works_) requests.push_back(&work->request);
  const TimePoint start = monotonic_now();
  if (Status computed = ExecRequest::compute_together(engine, requests, batch); !computed) {
    refuse(computed.error().message);
    return computed;
  }
  const Nanos took = monotonic_now() - start;
  for (const auto& work : works_) {
    work->took = took;
    deliver(*work, std::nullopt);
  }
  works_.clear();
  return {};
}

}  // namespace kvasir::worker
