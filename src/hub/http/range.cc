#include "hub/http/range.h"

#include <algorithm>
#include <format>

#include "hub/auth/secrets.h"

namespace kvasir::hub {
namespace {

std::string_view trim(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// Numbers past 64 bits are as good as the largest: they lie beyond any file.
std::optional<std::uint64_t> parse_position(std::string_view digits) {
  if (digits.empty()) return std::nullopt;
  std::uint64_t value = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9') return std::nullopt;
    const auto digit = static_cast<std::uint64_t>(c - '0');
    value = value > (UINT64_MAX - digit) / 10 ? UINT64_MAX : value * 10 + digit;
  }
  return value;
}

std::unexpected<Error> refuse(std::string_view why) {
  return fix_input(std::format("the Range header {}; ask for bytes=A-B, counted from 0, both ends included.", why));
}

}  // namespace

Result<std::optional<std::vector<ByteRange>>> parse_range(std::string_view header, std::uint64_t size) {
  const std::size_t equals = header.find('=');
  if (equals == std::string_view::npos || trim(header.substr(0, equals)) != "bytes") return std::nullopt;
  std::vector<ByteRange> out;
  std::size_t n_given = 0;
  std::string_view rest = header.substr(equals + 1);
  while (true) {
    const std::size_t comma = rest.find(',');
    const std::string_view spec = trim(rest.substr(0, comma));
    if (++n_given > kRangesInRequestMax) return refuse("has too many ranges");
    const std::size_t dash = spec.find('-');
    if (dash == std::string_view::npos) return refuse("is malformed");
    const auto first = parse_position(spec.substr(0, dash)), last = parse_position(spec.substr(dash + 1));
    if (dash == 0) {  // the last so many bytes
      if (!last) return refuse("is malformed");
      if (*last > 0 && size > 0) out.push_back({size - std::min(*last, size), size});
    } else {
      if (!first || (!last && dash + 1 < spec.size())) return refuse("is malformed");
      if (last && *last < *first) return refuse("ends before it begins");
      if (*first < size) out.push_back({*first, last ? std::min(*last, size - 1) + 1 : size});
    }
    if (comma == std::string_view::npos) break;
    rest = rest.substr(comma + 1);
  }
  if (out.empty()) return refuse(std::format("lies past the {} bytes that there are", size));
  std::vector<ByteRange> sorted = out;
  std::ranges::sort(sorted, {}, &ByteRange::begin);
  for (std::size_t i = 1; i < sorted.size(); ++i)
    if (sorted[i].begin < sorted[i - 1].end) return refuse("has ranges that overlap");
  return out;
}

Response answer_with_body(const Request& request, Body body, std::string_view etag, std::string_view content_type) {
  Response out;
  out.content_type = content_type;
  out.headers = {{"ETag", std::string(etag)}, {"Accept-Ranges", "bytes"}};
  if (!request.if_none_match.empty() &&
      (request.if_none_match == "*" || request.if_none_match.find(etag) != std::string::npos)) {
    out.status = 304;
    return out;
  }
  // If-Range holds a tag (a date would be weaker than what we have, and never matches).
  const bool ranged = !request.range.empty() && (request.if_range.empty() || request.if_range == etag);
  std::optional<std::vector<ByteRange>> ranges;
  if (ranged) {
    auto parsed = parse_range(request.range, body.size);
    if (!parsed) {
      Response refused = error_response(416, parsed.error().message);
      refused.headers.emplace_back("Content-Range", std::format("bytes */{}", body.size));
      return refused;
    }
    ranges = *std::move(parsed);
  }
  if (!ranges) {
    out.body = std::move(body);
    return out;
  }
  out.status = 206;
  Body part;
  part.owner = body.owner;
  part.check = body.check;
  const auto content_range = [&](const ByteRange& r) {
    return std::format("bytes {}-{}/{}", r.begin, r.end - 1, body.size);
  };
  if (ranges->size() == 1) {
    const ByteRange& r = ranges->front();
    out.headers.emplace_back("Content-Range", content_range(r));
    part.append_range(body, r.begin, r.end);
  } else {
    const std::string boundary = random_hex(16);
    const auto append_text = [&part](const std::string& text) {
      const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
      part.append_memory(std::make_shared<const Bytes>(bytes.begin(), bytes.end()));
    };
    for (const ByteRange& r : *ranges) {
      append_text(std::format("\r\n--{}\r\nContent-Type: {}\r\nContent-Range: {}\r\n\r\n", boundary, content_type,
                              content_range(r)));
      part.append_range(body, r.begin, r.end);
    }
    append_text(std::format("\r\n--{}--\r\n", boundary));
    out.content_type = std::format("multipart/byteranges; boundary={}", boundary);
  }
  out.body = std::move(part);
  return out;
}

}  // namespace kvasir::hub
