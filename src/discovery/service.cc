#include "discovery/service.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <format>
#include <nlohmann/json.hpp>

namespace kvasir::discovery {
namespace {

using nlohmann::json;

std::string with_port(const std::string& host, std::uint16_t port) {
  return host.contains(':') ? std::format("[{}]:{}", host, port) : std::format("{}:{}", host, port);
}

// What can stand in an address; a stranger may have written it.
bool is_host(const std::string& text) {
  constexpr std::string_view kPunctuation = "-.:";
  return !text.empty() && std::ranges::all_of(text, [&](char c) {
    return (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') || kPunctuation.contains(c);
  });
}

}  // namespace

bool is_enabled() {
  const char* const value = std::getenv("KVASIR_DISCOVERY");
  return value == nullptr || std::string_view(value) != "0";
}

std::string_view type_of(Kind kind) { return kind == Kind::kHub ? "_kvasir-hub._tcp" : "_kvasir-worker._tcp"; }

const std::vector<std::string_view>& keys_of(Kind kind) {
  static const std::vector<std::string_view> kHub = {"version", "name"}, kWorker = {"version", "fingerprint"};
  return kind == Kind::kHub ? kHub : kWorker;
}

std::string Service::value(std::string_view key) const {
  const auto found = text.find(std::string(key));
  return found == text.end() ? std::string() : found->second;
}

std::string Service::link() const {
  const std::string certified = value("name");
  if (kind == Kind::kHub) return "https://" + with_port(is_host(certified) ? certified : host, port);
  const std::string fingerprint = value("fingerprint");
  return with_port(host, port) + (fingerprint.empty() ? "" : "#" + fingerprint);
}

std::string plain_text(std::string_view text, std::size_t bytes_max) {
  std::string out;
  for (const char c : text.substr(0, bytes_max)) out += c > ' ' && c < 127 ? c : c == ' ' ? ' ' : '?';
  return out;
}

std::string default_name(Kind kind) {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  const std::string name = std::format("Kvasir {} on {}", kind == Kind::kHub ? "hub" : "worker", host.data());
  return plain_text(name, kNameBytesMax);
}

std::string to_line(const Service& service) {
  const json line = {{"kind", service.kind == Kind::kHub ? "hub" : "worker"},
                     {"name", service.name},
                     {"host", service.host},
                     {"port", service.port},
                     {"text", service.text}};
  return line.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

Result<Service> from_line(std::string_view line) {
  const json given = json::parse(line, nullptr, false);
  Service out;
  if (!given.is_object()) return fix_input("this is no service.");
  try {
    out.kind = given.at("kind") == "hub" ? Kind::kHub : Kind::kWorker;
    given.at("name").get_to(out.name);
    given.at("host").get_to(out.host);
    given.at("port").get_to(out.port);
    given.at("text").get_to(out.text);
  } catch (const json::exception&) {
    return fix_input("this is no service.");
  }
  return out;
}

}  // namespace kvasir::discovery
