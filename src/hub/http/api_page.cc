// The dashboard: a handful of files, built from web/src into web/dist, that are part of the
// program. They hold no data; the page fetches it with the token it is given.

#include <array>
#include <format>
#include <string_view>

#include "hub/http/hub.h"

#if defined(__clang__)
#pragma clang diagnostic ignored "-Wc23-extensions"
#endif

namespace kvasir::hub {
namespace {

constexpr unsigned char kIndex[] = {
#embed "../../../web/dist/index.html"
};
constexpr unsigned char kScript[] = {
#embed "../../../web/dist/app.js"
};
constexpr unsigned char kStyle[] = {
#embed "../../../web/dist/app.css"
};
constexpr unsigned char kIcon[] = {
#embed "../../../web/dist/icon.svg"
};
constexpr unsigned char kScriptGzip[] = {
#embed "../../../web/dist/app.js.gz"
};

// Scripts and requests of this hub only; no frame of another site around it.
constexpr std::string_view kPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
// Of all files together; CMake counts it.
constexpr std::string_view kTag = "\"" KVASIR_WEB_HASH "\"";

struct Asset {
  std::string_view pattern, content_type;
  std::span<const unsigned char> bytes, gzip;
};

std::string text_of(std::span<const unsigned char> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Response serve(const Asset& asset, const Request& request) {
  Response out;
  out.content_type = asset.content_type;
  out.headers = {{"Cache-Control", "no-cache"},  // keep it, and ask whether it is still the same
                 {"ETag", std::string(kTag)},
                 {"Content-Security-Policy", std::string(kPolicy)},
                 {"Referrer-Policy", "no-referrer"},
                 {"Vary", "Accept-Encoding"}};
  if (request.if_none_match.find(kTag) != std::string::npos) {
    out.status = 304;
    return out;
  }
  if (!asset.gzip.empty() && request.accept_encoding.find("gzip") != std::string::npos) {
    out.headers.emplace_back("Content-Encoding", "gzip");
    out.text = text_of(asset.gzip);
  } else {
    out.text = text_of(asset.bytes);
  }
  return out;
}

}  // namespace

void add_page_routes(Router& router) {
  static constexpr std::array<Asset, 4> kAssets = {{{"/", "text/html; charset=utf-8", kIndex, {}},
                                                    {"/app.js", "text/javascript; charset=utf-8", kScript, kScriptGzip},
                                                    {"/app.css", "text/css; charset=utf-8", kStyle, {}},
                                                    {"/icon.svg", "image/svg+xml", kIcon, {}}}};
  for (const Asset& asset : kAssets)
    router.add({.method = "GET",
                .pattern = std::string(asset.pattern),
                .summary = "A file of the dashboard",
                .scopes = {},
                .query = {},
                .body_example = {},
                .answer_example = {},
                .handler = [&asset](const Request& request) { return serve(asset, request); }});
}

}  // namespace kvasir::hub
