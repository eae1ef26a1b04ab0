// Bytes as lower-case hexadecimal text and back.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/bytes.h"

namespace kvasir {

std::string to_hex(ByteSpan bytes);
// nullopt unless `text` is an even number of hexadecimal digits.
std::optional<Bytes> from_hex(std::string_view text);

}  // namespace kvasir
