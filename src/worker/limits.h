// Every bound a worker keeps, in one place. A peer can make it hold at most
//   kConnectionsMax * wire::kFramePayloadBytesMax   frames being received
//   + kRequestBytesMax                              copies, decoded rows and answers
//   + what --memory leaves                          uploads
// and usually holds far less: frame buffers grow only as bytes arrive.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kvasir::worker {

inline constexpr std::uint32_t kConnectionsMax = 64;
inline constexpr std::uint32_t kRefusalsMax = 8;           // more than that at once are closed without a word
inline constexpr std::uint32_t kQueueDefault = 64;         // requests waiting for the engine, of all connections
inline constexpr std::uint32_t kQueueMax = 4096;
// Expected time before a newcomer. Past that a replica, or the backbone itself, is quicker for sure; well
// below the time for which a backbone without either goes on asking.
inline constexpr std::uint32_t kQueueMsDefault = 5000;
inline constexpr std::uint32_t kQueueMsMax = 600'000;
inline constexpr std::uint32_t kSpinUsDefault = 50;
inline constexpr std::uint32_t kSpinUsMax = 1'000'000;
inline constexpr std::uint64_t kRequestBytesMax = 2ull << 30;
inline constexpr std::size_t kScratchBytesKept = 4u << 20;  // larger buffers are given back after each request
inline constexpr std::uint32_t kPiecePairs = 256;           // of a long request computed before they are sent
inline constexpr std::uint32_t kMergedPairsMax = 256;       // of several requests computed as one
inline constexpr std::uint32_t kUploadsMax = 4;             // being received at once, of all connections
inline constexpr std::uint64_t kUploadSlackBytes = 64 << 10;  // by which loaded experts may be longer than their slice
inline constexpr std::chrono::milliseconds kEvictionMax{2000};  // users of an evicted layer have to let go of it
inline constexpr std::uint32_t kFramesPerTurn = 16;         // read before a waiting request is looked at again

// Times; tests shorten them.
struct Timeouts {
  std::chrono::milliseconds hello{10'000};   // connect -> HELLO complete
  std::chrono::milliseconds stall{30'000};   // a frame begun, an answer unread
  std::chrono::milliseconds drain{10'000};   // what runs may finish
  std::chrono::milliseconds linger{500};     // a refused or drained peer may read why
};
// On top of `stall`, for large frames: slower peers than this are dropped.
inline constexpr std::uint64_t kSlowestPeerBytesPerMs = 64;

}  // namespace kvasir::worker
