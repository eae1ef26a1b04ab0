// What is announced on a local network, by DNS-SD (RFC 6763): that there is a hub or a worker,
// where, and what anybody may know of it. No secret has a place here.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace kvasir::discovery {

enum class Kind { kHub, kWorker };

inline constexpr std::size_t kServicesMax = 256;
inline constexpr std::size_t kNameBytesMax = 63;   // of DNS
inline constexpr std::size_t kValueBytesMax = 200;

struct Service {
  Kind kind = Kind::kHub;
  std::string name;  // for people: "Kvasir hub on attic"
  std::string host;  // an address
  std::uint16_t port = 0;
  // A hub's: version; name, under which its certificate can be verified. A worker's: version;
  // fingerprint of its certificate.
  std::map<std::string, std::string> text;

  std::string value(std::string_view key) const;
  // What to give to kvasir join and run, or to paste as a worker.
  std::string link() const;
  friend bool operator==(const Service&, const Service&) = default;
};

// Unless KVASIR_DISCOVERY=0 says that nothing is to be said or asked on the local network.
bool is_enabled();

std::string_view type_of(Kind kind);  // "_kvasir-hub._tcp"
// The keys that are announced, and believed, of such a service; whatever else a stranger says is
// left out.
const std::vector<std::string_view>& keys_of(Kind kind);
// Makes what a stranger said fit to show: printable, and no longer than it may be.
std::string plain_text(std::string_view text, std::size_t bytes_max);
// "Kvasir hub on HOSTNAME"
std::string default_name(Kind kind);

// One line each, between a process and the child that speaks to the network for it.
std::string to_line(const Service& service);
Result<Service> from_line(std::string_view line);

}  // namespace kvasir::discovery
