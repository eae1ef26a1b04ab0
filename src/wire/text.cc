#include "wire/text.h"

#include <algorithm>
#include <cstdint>

#include "wire/messages.h"

namespace kvasir::wire {
namespace {

// Bytes of the plain character at the front of `text`, 0 if there is none.
std::size_t plain_character(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = at(0);
  if (lead < 0x80) return lead >= 0x20 && lead != 0x7f ? 1 : 0;
  const std::size_t length = lead >= 0xc2 && lead < 0xe0 ? 2
                             : (lead & 0xf0) == 0xe0     ? 3
                             : (lead & 0xf8) == 0xf0     ? 4
                                                         : 0;
  if (length == 0 || text.size() < length) return 0;
  std::uint32_t code = lead & (0xffu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if ((at(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (at(i) & 0x3f);
  }
  constexpr std::uint32_t kSmallest[] = {0, 0, 0xa0, 0x800, 0x10000};  // 0x80..0x9f are C1 controls
  if (code < kSmallest[length] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return 0;
  return length;
}

}  // namespace

bool is_plain_text(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = plain_character(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

void put_text(ByteWriter& out, std::string_view text) {
  text = text.substr(0, kTextBytesMax);
  out.put(static_cast<std::uint16_t>(text.size()));
  while (!text.empty()) {
    const std::size_t length = plain_character(text);
    out.put_bytes(length == 0 ? std::string_view("?") : text.substr(0, length));
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
}

bool get_text(ByteCursor& in, std::string& out) {
  const std::size_t length = in.get<std::uint16_t>();
  if (length > kTextBytesMax) return false;
  const ByteSpan bytes = in.get_bytes(length);
  if (!in.ok()) return false;
  out.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return is_plain_text(out);
}

}  // namespace kvasir::wire
