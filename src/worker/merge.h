// Requests of several backbones in one computation. What waits while the engine is busy and asks
// for the same layer, in the same class, is taken along by whoever has the turn next: an expert's
// weights are then read once for all of them. Never in class exact, where a row's bits depend on
// how many rows its expert computes; in invariant they do not, and in fast they may.
//
// Fair: the line stays first come, first served, and one request of a connection at a time can be
// taken along, so that nobody waits longer than for the batch in front of it.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "ffn/engine.h"
#include "worker/compute_gate.h"
#include "worker/exec_request.h"

namespace kvasir::worker {

// A request that waits and may be taken along; then its owner, woken, finishes and sends it.
struct MergeableWork final : ComputeGate::Work {
  MergeableWork(MemoryBudget& budget, const wire::LayerId& id, const wire::Recipe& how, Bytes bytes)
      : layer_id(id), recipe(how), payload(std::move(bytes)), request(budget, /*piece_pairs=*/0) {}
  const wire::LayerId layer_id;
  const wire::Recipe recipe;
  const Bytes payload;
  wire::ExecView view;  // of the payload

  // Written by whoever took it, before it is delivered.
  ExecRequest request;
  std::optional<wire::ErrorMessage> refusal;
  Nanos took{};
};

bool may_merge(const wire::ExecHead& head, std::uint32_t merged_pairs_max);
// `payload`: of an EXEC that has been decoded once, and may merge.
std::shared_ptr<MergeableWork> mergeable_work(MemoryBudget& budget, const wire::LayerId& layer_id, const wire::Recipe& recipe,
                                              ByteSpan payload);

// What the bearer of the turn takes along for `own`, which is prepared.
class TakenAlong {
 public:
  TakenAlong(ComputeGate& gate, const ExecRequest& own, const wire::ExecView& view, const BoundRecipe& bound,
             std::uint32_t merged_pairs_max);
  ~TakenAlong();  // nobody waits in vain, however the turn ends
  TakenAlong(const TakenAlong&) = delete;
  TakenAlong& operator=(const TakenAlong&) = delete;

  bool empty() const { return works_.empty(); }
  std::size_t size() const { return works_.size(); }
  std::uint32_t pairs() const;
  std::size_t experts(const ExecRequest& own) const;  // different ones, of `own` and them
  // Computes `own` and them, and delivers them.
  Status compute(ffn::Engine& engine, ExecRequest& own, ExecRequest::Batch& batch);

 private:
  void refuse(const std::string& why);
  void deliver(MergeableWork& work, std::optional<wire::ErrorMessage> refusal);

  ComputeGate& gate_;
  std::vector<std::shared_ptr<MergeableWork>> works_;  // not delivered yet
};

}  // namespace kvasir::worker
