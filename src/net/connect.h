// Addresses, connecting and listening. Sockets come back non-blocking, close-on-exec and
// with the options every Kvasir connection has (no delay, keep-alive, a bound on how long
// sent bytes may stay unacknowledged), ready for make_plain_stream or a TLS stream.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "net/fd.h"

namespace kvasir::net {

struct HostPort {
  std::string host;  // name, IPv4 or IPv6 address without brackets
  std::uint16_t port = 0;
  friend bool operator==(const HostPort&, const HostPort&) = default;
};

// "host:port", "[v6]:port"; also "port" and ":port" where `default_host` is given.
Result<HostPort> parse_host_port(std::string_view text, std::string_view default_host = {});
std::string format_host_port(const HostPort& where);  // brackets an IPv6 address

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  std::string text;  // "127.0.0.1:9000", for people
};

// Blocks as long as the system's resolver does (numeric hosts: not at all): call it off the
// hot path and keep the answer.
Result<std::vector<Address>> resolve(const HostPort& where);

// Begins a connection and returns at once; the socket polls POLLOUT when it is decided.
Result<Fd> start_connect(const Address& address);
// After POLLOUT: whether the connection stands.
Status finish_connect(int fd, const Address& address);
// Tries the addresses in turn, each within its share of the time that is left.
Result<Fd> connect_any(const std::vector<Address>& addresses, Nanos timeout);
// A connection within this machine has no network to be careful of, but a system whose default is BBR
// paces it all the same, with a timer for every few packets. Does nothing to other connections.
void do_not_pace_loopback(int fd);
// resolve and connect_any.
Result<Fd> connect_to(const HostPort& where, Nanos timeout);

// The IPv4 address this machine has on the network its default route leads to; nullopt without one.
// Nothing is sent.
std::optional<std::string> own_address();

struct Listener {
  Fd fd;
  std::uint16_t port = 0;  // the actual one when 0 was asked for
};
// On the first address of the host ("0.0.0.0" or "::" for all). One sentence says what to do
// where the port is taken.
Result<Listener> listen_on(const HostPort& where);

struct Accepted {
  Fd fd;
  std::string peer;  // "127.0.0.1:51234"
};
// nullopt: nobody waits. kRetryLater: out of descriptors or memory; pause before the next call.
Result<std::optional<Accepted>> accept_from(const Listener& listener);

}  // namespace kvasir::net
