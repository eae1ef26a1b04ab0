// A worker inside this process, for a backbone on this machine. It notes the recipes and some of
// the rows that the backbone sends: the recipes are the graph's own and the rows the model's own
// activations, so that no architecture needs to be known here.
//
// With a subject it answers with the subject's rows, whatever that computes with: so a device,
// or a worker of another build, can be judged by the tokens it leads to. Without one it says
// that it holds everything and is always busy, and the backbone computes on as if alone.
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

class StandIn {
 public:
  // Listens on a port of 127.0.0.1. The subject is used by one thread at a time; it and the
  // model outlive this.
  static Result<std::unique_ptr<StandIn>> start(const gguf::MoeModel& model, Subject* subject = nullptr);
  virtual ~StandIn() = default;

  virtual std::uint16_t port() const = 0;
  // Ends the connections and gives what was recorded, by layer id; an error of the subject's, if
  // it had one.
  virtual Result<std::map<wire::LayerId, LayerRows>> stop() = 0;
};

}  // namespace kvasir::verify
