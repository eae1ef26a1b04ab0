// A worker that computes nothing: it says that it holds every expert of a model, notes the
// recipes and some of the rows that a backbone sends, and is too busy to answer. The backbone
// computes on as if it were alone. So the recipes are the graph's own and the rows are the
// model's own activations, and no architecture needs to be known here.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "gguf/moe_model.h"
#include "verify/experts.h"
#include "wire/messages.h"

namespace kvasir::verify {

inline constexpr std::uint32_t kRecordedRowsMax = 256;  // of one layer

class Recorder {
 public:
  // Listens on a port of 127.0.0.1.
  static Result<std::unique_ptr<Recorder>> start(const gguf::MoeModel& model);
  virtual ~Recorder() = default;

  virtual std::uint16_t port() const = 0;
  // Ends the connections and gives what was recorded, by layer id.
  virtual std::map<wire::LayerId, LayerRows> stop() = 0;
};

}  // namespace kvasir::verify
