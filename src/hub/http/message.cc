#include "hub/http/message.h"

#include <algorithm>
#include <format>
#include <nlohmann/json.hpp>

#include "base/hex.h"

namespace kvasir::hub {
namespace {

Result<std::string> decode(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == '%') {
      const auto byte = from_hex(text.substr(i + 1, 2));
      if (!byte || byte->size() != 1)
        return fix_input("the address has a '%' that is not followed by two hexadecimal digits.");
      c = static_cast<char>((*byte)[0]);
      i += 2;
    }
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      return fix_input("the address has a control character in it.");
    out += c;
  }
  return out;
}

}  // namespace

Response error_response(unsigned status, std::string_view sentence) {
  Response out;
  out.status = status;
  out.text = nlohmann::json{{"error", sentence}}.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return out;
}

unsigned status_of(ErrorAction action) {
  switch (action) {
    case ErrorAction::kFixInput: return 400;
    case ErrorAction::kRetryLater: return 503;
    case ErrorAction::kRetryElsewhere: return 502;
    case ErrorAction::kFatal: break;
  }
  return 500;
}

Response error_response(const Error& error) {
  Response out = error_response(status_of(error.action), error.message);
  if (error.action == ErrorAction::kRetryLater) out.headers.emplace_back("Retry-After", "2");
  return out;
}

Status parse_target(std::string_view target, Request& request) {
  if (target.empty() || target[0] != '/') return fix_input("the address must begin with '/'.");
  const std::size_t mark = target.find('?');
  std::string_view path = target.substr(1, mark == std::string_view::npos ? mark : mark - 1);
  while (true) {
    const std::size_t slash = path.find('/');
    KVASIR_ASSIGN(std::string segment, decode(path.substr(0, slash)));
    if (segment == "." || segment == ".." || segment.find('/') != std::string::npos ||
        segment.find('\\') != std::string::npos)
      return fix_input("the address has a path in it that leads elsewhere.");
    request.path.push_back(std::move(segment));
    if (slash == std::string_view::npos) break;
    path = path.substr(slash + 1);
  }
  if (mark == std::string_view::npos) return {};
  std::string_view query = target.substr(mark + 1);
  while (!query.empty()) {
    const std::size_t end = query.find('&');
    const std::string_view pair = query.substr(0, end);
    query = end == std::string_view::npos ? std::string_view() : query.substr(end + 1);
    if (pair.empty()) continue;
    const std::size_t equals = pair.find('=');
    KVASIR_ASSIGN(std::string name, decode(pair.substr(0, equals)));
    KVASIR_ASSIGN(std::string value,
                  decode(equals == std::string_view::npos ? std::string_view() : pair.substr(equals + 1)));
    if (request.query.size() >= kQueryParametersMax) return fix_input("the address has too many parameters.");
    if (!request.query.emplace(name, std::move(value)).second)
      return fix_input(std::format("the parameter '{}' is given twice.", name));
  }
  return {};
}

}  // namespace kvasir::hub
