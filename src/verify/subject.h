// What is compared with the oracle: something that computes rows of experts, be it a device of
// this machine or a worker at the end of a connection.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/error.h"
#include "base/expert_set.h"
#include "ffn/engine.h"
#include "gguf/moe_model.h"
#include "wire/messages.h"

namespace kvasir::verify {

class Subject {
 public:
  virtual ~Subject() = default;

  virtual const std::string& name() const = 0;
  // Whether its bits must be those of this process's exact engine.
  virtual bool exact() const = 0;
  // How rows travel to it and back.
  virtual wire::RowType row_type() const { return wire::RowType::kF32; }
  // Of the layer; the model's ids. Empty where it has none.
  virtual ExpertSet experts(const gguf::LayerExperts& layer, const wire::LayerId& id) const = 0;
  // One output row per pair; experts are the model's ids, all from experts().
  virtual Status compute(const gguf::LayerExperts& layer, const wire::LayerId& id, const wire::Recipe& recipe,
                         ffn::RowsView rows, std::span<const wire::Pair> pairs, float* out) = 0;
};

// The engine in this process on `device`, over the experts of `model`, which must outlive it.
Result<std::unique_ptr<Subject>> make_device_subject(const gguf::MoeModel& model, const std::string& device, int n_threads);

}  // namespace kvasir::verify
