// Any request to any endpoint of the hub, through its router: target, query, ranges and body.
// Nobody may be able to make a handler throw, answer nonsense or name bytes that are not there.

#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>

#include "base/check.h"
#include "gguf/synth.h"
#include "hub/http/hub.h"

namespace {

using namespace kvasir;
using namespace kvasir::hub;

// A small model, and no waiting for proofs of the files.
class World {
 public:
  World() {
    char folder[] = "/tmp/kvasir-fuzz-XXXXXX";
    KVASIR_CHECK(::mkdtemp(folder) != nullptr);
    top_ = folder;
    std::filesystem::create_directories(top_ / "models");
    std::filesystem::create_directories(top_ / "data");
    gguf::SynthOptions synth;
    KVASIR_CHECK(gguf::write_synthetic(synth, (top_ / "models" / "m.gguf").string()));
    HubOptions options;
    options.data_dir = top_ / "data";
    options.models_dir = top_ / "models";
    options.version = "fuzz";
    auto made = Hub::create(options, make_memory_store(), [](const std::string&) {});
    KVASIR_CHECK(made.has_value());
    hub_ = *std::move(made);
    for (int i = 0; i < 1000 && !(hub_->catalogue().find("m") && hub_->catalogue().find("m")->ready()); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ~World() {
    hub_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(top_, ignored);
  }
  const Router& router() const { return hub_->router(); }

 private:
  std::filesystem::path top_;
  std::unique_ptr<Hub> hub_;
};

std::string_view next_line(std::string_view& text) {
  const std::size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
  return line;
}

}  // namespace

// Lines: method and target, Range, If-Range, If-None-Match; the rest is the body. Everybody is
// an admin: what stands behind the tokens is what is tried here.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static auto world = std::make_unique<World>();
  // Tokens made and nodes named pile up as they would in a real hub; start over now and then.
  constexpr unsigned kInputsPerHub = 20'000;
  static unsigned inputs = 0;
  if (++inputs % kInputsPerHub == 0) world = std::make_unique<World>();

  std::string_view text(reinterpret_cast<const char*>(data), std::min<std::size_t>(size, kBodyBytesMax));
  const std::string_view start = next_line(text);
  Request request;
  request.method = start.substr(0, start.find(' '));
  const std::string_view target = start.size() > request.method.size() ? start.substr(request.method.size() + 1) : std::string_view{};
  if (!parse_target(target.substr(0, kTargetBytesMax), request)) return 0;
  for (const std::string& segment : request.path)
    KVASIR_CHECK(segment != ".." && segment != "." && !segment.contains('/') && !segment.contains('\0'));
  request.range = next_line(text);
  request.if_range = next_line(text);
  request.if_none_match = next_line(text);
  request.address = "192.0.2.1";
  request.principal = {.token_id = "fuzz", .scope = Scope::kAdmin};
  request.now = monotonic_now();
  request.last_chance = true;
  const Router::Match match = world->router().match(request);
  if (match.route == nullptr) return 0;
  request.body = std::string(text.substr(0, match.route->body_bytes_max()));

  const Response response = match.route->handler(request);
  KVASIR_CHECK(response.status >= 200 && response.status < 600);
  for (const auto& [name, value] : response.headers)
    KVASIR_CHECK(!name.contains('\n') && !value.contains('\n') && !value.contains('\r'));
  if (response.body) {
    std::uint64_t sum = 0;
    for (const BodyPiece& piece : response.body->pieces) {
      sum += piece.size;
      if (piece.kind == BodyPiece::Kind::kMemory)
        KVASIR_CHECK(piece.offset <= piece.bytes->size() && piece.size <= piece.bytes->size() - piece.offset);
      if (piece.kind == BodyPiece::Kind::kFile) KVASIR_CHECK(piece.fd >= 0);
    }
    KVASIR_CHECK(sum == response.body->size);
  } else if (response.content_type == "application/json" && !response.text.empty()) {
    KVASIR_CHECK(nlohmann::json::accept(response.text));
  }
  if (response.status >= 400) KVASIR_CHECK(response.text.contains("\"error\""));
  return 0;
}
