// A request and its answer as the handlers see them; no sockets here.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "hub/auth/tokens.h"
#include "hub/http/event_stream.h"
#include "hub/models/body.h"

namespace kvasir::hub {

struct Request {
  std::string method;  // "GET" also for HEAD: the server leaves the body out
  std::vector<std::string> path;  // decoded segments
  std::map<std::string, std::string, std::less<>> query;
  std::map<std::string, std::string, std::less<>> parameters;  // from the route's {names}
  std::string body;
  std::string range, if_range, if_none_match, accept_encoding;
  std::string address;  // of the client, without its port
  Principal principal;  // of routes that need a token
  TimePoint now{};
  bool last_chance = false;  // a waiting handler must answer now
};

struct Response {
  unsigned status = 200;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
  std::string text;
  std::optional<Body> body;  // instead of `text`
  std::shared_ptr<EventStream> stream;  // instead of both
  bool watched = false;  // of a stream: a peer that vanishes without a word is missed within kVanishedMax
  // Nothing to say yet: the server asks the handler again after this long, until the
  // request's patience (its wait_s) is over.
  std::optional<Nanos> ask_again;
};

// {"error": sentence}
Response error_response(unsigned status, std::string_view sentence);
// 400, 503 or 500 by what the caller should do.
Response error_response(const Error& error);
unsigned status_of(ErrorAction action);

// Splits "/api/x%20y?layers=0:2" into decoded path segments and parameters. The error says
// what is malformed: an escape, a control character, "." or "..", a parameter given twice.
Status parse_target(std::string_view target, Request& request);

inline constexpr std::size_t kTargetBytesMax = 4096;
inline constexpr std::size_t kQueryParametersMax = 32;

}  // namespace kvasir::hub
