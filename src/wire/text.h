// Strings inside messages: u16 length, then that many bytes of UTF-8 without control
// characters, so that a peer's text can go to a terminal, a log or JSON as it is.
#pragma once

#include <string>
#include <string_view>

#include "base/bytes.h"

namespace kvasir::wire {

// Valid UTF-8 (no overlong forms, no surrogates), no C0, DEL or C1 control characters.
bool is_plain_text(std::string_view text);

// Writes at most kTextBytesMax bytes; what is not plain text is replaced by '?' byte by byte.
void put_text(ByteWriter& out, std::string_view text);

// false if the cursor is short, or the text is too long or not plain.
bool get_text(ByteCursor& in, std::string& out);

}  // namespace kvasir::wire
