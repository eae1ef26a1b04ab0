// One connection to a worker after its HELLO. Used by one thread at a time: the background
// thread makes it and may hand it to a driver, for good.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "net/frame_io.h"
#include "net/stream.h"

namespace kvasir::dispatch {

struct Link {
  // The worker hears that this end has closed in order, and no cut it should wonder about.
  ~Link() {
    if (stream) stream->shutdown();
  }
  std::unique_ptr<net::Stream> stream;
  net::FrameReader reader;
  net::FrameWriter writer;
  std::vector<bool> recipes_bound;  // by recipe id
  // Our frames carry a checksum where TLS does not protect them.
  bool checksum() const { return !stream->encrypted(); }
};

// After an error of `link.reader`: did the bytes break the protocol (a damaged frame, a bad
// header), rather than the connection fail? The reader's errors look alike; a stream that
// still reads shows which it was.
bool protocol_was_broken(Link& link);

}  // namespace kvasir::dispatch
