// What is said before a WebSocket is open: requests to a proxy and a hub, and what their answers
// mean. Texts only.
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"

namespace kvasir::net::websocket {

std::string connect_request(const std::string& authority, const std::string& credentials);

std::string make_key();  // 16 random bytes as text
std::string upgrade_request(const std::string& target, const std::string& authority, const std::string& key,
                            const std::string& token);
// What a server makes of that key, to show that it speaks WebSocket (RFC 6455, 4.2.2).
std::string accept_of(const std::string& key);

// Everything but letters, digits and -._~ as %XX.
std::string url_encoded(std::string_view text);

// The hub's sentence in {"error":"…"}, or nothing.
std::string sentence_of(const std::string& body);
// An answer that is not the 101: kFixInput where the fault is ours.
Error refused_by(unsigned status, const std::string& body);

}  // namespace kvasir::net::websocket
