// An answer without an end: server-sent events, or a line that only stays open.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"

namespace kvasir::hub {

// A proxy between may close what is silent for a minute.
inline constexpr Nanos kKeepAliveInterval = std::chrono::seconds(15);
// The system's own probes begin after kProbeAfter of silence, one each kProbeInterval; a lossy
// wireless line may lose two in a row.
inline constexpr std::chrono::seconds kProbeAfter{2}, kProbeInterval{1}, kVanishedMax{5};

// Thread contract: every member may be called from any thread and returns at once. The server
// destroys the object when the client is gone, within milliseconds where its machine says so.
class EventStream {
 public:
  virtual ~EventStream() = default;
  // What to send now; null: nothing new. Several streams may share one text.
  virtual std::shared_ptr<const std::string> next() = 0;
  // `wake` is called when next() may have more; it may be called too often.
  virtual void on_more(std::function<void()> wake) = 0;
};

}  // namespace kvasir::hub
