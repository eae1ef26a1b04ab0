// The headerless framing, from pieces of any size: what is accepted lies inside the slice.

#include <algorithm>
#include <cstdint>
#include <span>

#include "base/check.h"
#include "wire/raw_framing.h"

// First bytes: row width, experts held, piece size.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvasir;
  if (size < 3) return 0;
  const std::uint32_t n_embd = 1u + data[0];
  const std::uint32_t n_held = data[1];
  const std::size_t step = 1u + data[2];
  ByteSpan rest = std::as_bytes(std::span(data, size)).subspan(3);
  wire::detect_framing(rest);
  wire::RawParser parser(n_embd, n_held);
  while (!rest.empty()) {
    const auto taken = parser.feed(rest.first(std::min(step, rest.size())));
    if (!taken) return 0;
    KVASIR_CHECK(*taken > 0 && *taken <= std::min(step, rest.size()));
    rest = rest.subspan(*taken);
    if (!parser.complete()) continue;
    const wire::RawRequest& request = parser.request();
    KVASIR_CHECK(request.cur.size() == std::size_t{request.n_tokens} * n_embd);
    KVASIR_CHECK(request.sel.size() == request.answer_rows());
    for (const std::int32_t id : request.sel) KVASIR_CHECK(id >= 0 && static_cast<std::uint32_t>(id) < n_held);
  }
  return 0;
}
