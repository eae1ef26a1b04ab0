// Range requests (RFC 9110, section 14): which bytes of a body are wanted.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "hub/http/message.h"

namespace kvasir::hub {

inline constexpr std::size_t kRangesInRequestMax = 64;

struct ByteRange {  // [begin, end)
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  friend bool operator==(const ByteRange&, const ByteRange&) = default;
};

// nullopt: no ranges of bytes are asked for (another unit), send everything. The error: these
// cannot be sent (malformed, outside, overlapping, too many). Ranges that only end too late
// are cut; those that begin past the end are left out while others remain.
Result<std::optional<std::vector<ByteRange>>> parse_range(std::string_view header, std::uint64_t size);

// Answers with the whole body, or with what Range and If-Range ask for (200, 206, 304, 416).
Response answer_with_body(const Request& request, Body body, std::string_view etag, std::string_view content_type);

}  // namespace kvasir::hub
