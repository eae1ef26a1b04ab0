#include "net/connect.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <format>
#include <memory>

namespace kvasir::net {
namespace {

constexpr int kListenBacklog = 128;
// A peer whose machine vanished is noticed within about 15 s, with and without data in flight.
constexpr int kKeepAliveIdle_s = 10;
constexpr int kKeepAliveInterval_s = 2;
constexpr int kKeepAliveProbes = 3;
constexpr int kUnacknowledgedMax_ms = 15'000;

void set_option(int fd, int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof value); }

// Tuning only: a socket that lacks one of them (a Unix socket in a test) works all the same.
void set_stream_options(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepAliveIdle_s);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepAliveInterval_s);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepAliveProbes);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kUnacknowledgedMax_ms);
}

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET)
    return (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  if (address.ss_family != AF_INET6) return false;
  const in6_addr& six = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&six) || (IN6_IS_ADDR_V4MAPPED(&six) && six.s6_addr[12] == IN_LOOPBACKNET);
}

std::string address_text(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  if (::getnameinfo(address, length, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "?";
  return std::string_view(host).contains(':') ? std::format("[{}]:{}", host, port) : std::format("{}:{}", host, port);
}

Result<std::vector<Address>> lookup(const HostPort& where, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(where.host.c_str(), std::to_string(where.port).c_str(), &hints, &list);
  if (error != 0)
    return retry_later(
        std::format("cannot find the host '{}' ({}); check its name.", where.host, ::gai_strerror(error)));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, ::freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_addrlen > sizeof(sockaddr_storage)) continue;
    Address& address = addresses.emplace_back();
    std::copy_n(reinterpret_cast<const std::byte*>(entry->ai_addr), entry->ai_addrlen,
                reinterpret_cast<std::byte*>(&address.storage));
    address.length = entry->ai_addrlen;
    address.text = address_text(entry->ai_addr, entry->ai_addrlen);
  }
  if (addresses.empty())
    return retry_later(std::format("the host '{}' has no usable address; check its name.", where.host));
  return addresses;
}

std::unexpected<Error> connect_error(const Address& address, int errnum) {
  return retry_elsewhere(std::format("cannot connect to {}: {}; check that it runs and can be reached.", address.text,
                                     errno_text(errnum)));
}

std::unexpected<Error> listen_error(const HostPort& where, int errnum) {
  const std::string place = format_host_port(where);
  if (errnum == EADDRINUSE)
    return fix_input(std::format(
        "port {} of {} is in use; stop the program that holds it or choose another port (0 picks a free one).",
        where.port, where.host));
  if (errnum == EACCES)
    return fix_input(std::format("no permission to listen on {}; choose a port of 1024 or above.", place));
  if (errnum == EADDRNOTAVAIL)
    return fix_input(
        std::format("this machine has no address {}; give one of its own addresses, or 0.0.0.0 for all.", where.host));
  return fatal(std::format("cannot listen on {}: {}.", place, errno_text(errnum)));
}

}  // namespace

Result<HostPort> parse_host_port(std::string_view text, std::string_view default_host) {
  const auto refuse = [&] {
    return fix_input(std::format("'{}' is not an address; write {}HOST:PORT, with brackets around an IPv6 host.", text,
                                 default_host.empty() ? "" : "PORT or "));
  };
  std::string_view host;
  std::string_view port = text;
  if (text.starts_with('[')) {
    const std::size_t close = text.find(']');
    if (close == std::string_view::npos || !text.substr(close + 1).starts_with(':')) return refuse();
    host = text.substr(1, close - 1);
    port = text.substr(close + 2);
    if (host.empty()) return refuse();
  } else if (const std::size_t colon = text.rfind(':'); colon != std::string_view::npos) {
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
    if (host.contains(':')) return refuse();
  }
  if (host.empty()) host = default_host;
  std::uint16_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  if (host.empty() || host.size() > 255 || port.empty() || error != std::errc{} || end != port.data() + port.size())
    return refuse();
  return HostPort{std::string(host), number};
}

std::string format_host_port(const HostPort& where) {
  return where.host.contains(':') ? std::format("[{}]:{}", where.host, where.port)
                                  : std::format("{}:{}", where.host, where.port);
}

void do_not_pace_loopback(int fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0 || !is_loopback(peer)) return;
  constexpr std::string_view kUnpaced = "reno";  // in every kernel, and allowed to everybody
  ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, kUnpaced.data(), kUnpaced.size());
}

Result<std::vector<Address>> resolve(const HostPort& where) { return lookup(where, 0); }

Result<Fd> start_connect(const Address& address) {
  Fd fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return retry_later("cannot make a socket: " + errno_text(errno) + "; close some connections.");
  set_stream_options(fd.get());
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) != 0 &&
      errno != EINPROGRESS && errno != EINTR)
    return connect_error(address, errno);
  return fd;
}

Status finish_connect(int fd, const Address& address) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  if (error != 0) return connect_error(address, error);
  do_not_pace_loopback(fd);
  return {};
}

Result<Fd> connect_any(const std::vector<Address>& addresses, Nanos timeout) {
  const TimePoint deadline = monotonic_now() + timeout;
  Result<Fd> outcome = fix_input("there is no address to connect to.");
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    const Address& address = addresses[i];
    outcome = start_connect(address);
    if (!outcome) continue;
    const TimePoint now = monotonic_now();
    const TimePoint until = now + std::max(Nanos(0), deadline - now) / static_cast<std::int64_t>(addresses.size() - i);
    while (true) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - monotonic_now()).count();
      pollfd entry{.fd = outcome->get(), .events = POLLOUT, .revents = 0};
      const int ready = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000)));
      if (ready < 0 && errno == EINTR) continue;
      if (ready == 0 && left > 0) continue;
      if (ready <= 0) {
        outcome = connect_error(address, ready < 0 ? errno : ETIMEDOUT);
      } else if (Status stands = finish_connect(outcome->get(), address); stands) {
        return outcome;
      } else {
        outcome = std::unexpected(std::move(stands).error());
      }
      break;
    }
  }
  return outcome;
}

Result<Fd> connect_to(const HostPort& where, Nanos timeout) {
  KVASIR_ASSIGN(const std::vector<Address> addresses, resolve(where));
  return connect_any(addresses, timeout);
}

std::optional<std::string> own_address() {
  // A datagram socket that is connected picks its source address by the routes. The far end lies
  // in a block that is kept for documentation.
  const Fd fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_in far{}, near{};
  far.sin_family = AF_INET;
  far.sin_port = htons(9);
  ::inet_pton(AF_INET, "192.0.2.1", &far.sin_addr);
  socklen_t length = sizeof near;
  if (!fd || ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&far), sizeof far) != 0 ||
      ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&near), &length) != 0)
    return std::nullopt;
  char text[INET_ADDRSTRLEN] = {};
  if (near.sin_addr.s_addr == 0 || ::inet_ntop(AF_INET, &near.sin_addr, text, sizeof text) == nullptr) return std::nullopt;
  return text;
}

Result<Listener> listen_on(const HostPort& where) {
  KVASIR_ASSIGN(const std::vector<Address> addresses, lookup(where, AI_PASSIVE));
  const Address& address = addresses.front();
  Listener listener{.fd = Fd(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0))};
  if (!listener.fd) return listen_error(where, errno);
  const int fd = listener.fd.get();
  set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.storage.ss_family == AF_INET6) set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);  // "::" means all
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&address.storage), address.length) != 0 ||
      ::listen(fd, kListenBacklog) != 0)
    return listen_error(where, errno);
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0) return listen_error(where, errno);
  listener.port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port
                                                    : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
  return listener;
}

Result<std::optional<Accepted>> accept_from(const Listener& listener) {
  while (true) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    Fd fd(::accept4(listener.fd.get(), reinterpret_cast<sockaddr*>(&peer), &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      set_stream_options(fd.get());
      do_not_pace_loopback(fd.get());
      return Accepted{std::move(fd), address_text(reinterpret_cast<const sockaddr*>(&peer), length)};
    }
    switch (errno) {
      case EINTR:
      case ECONNABORTED: continue;  // that one is gone; look at the next
      case EAGAIN: return std::nullopt;
      case EMFILE:
      case ENFILE:
      case ENOBUFS:
      case ENOMEM:
        return retry_later("cannot accept a connection: " + errno_text(errno) +
                           "; raise the limit of open files (ulimit -n).");
      default: return fatal("cannot accept connections: " + errno_text(errno) + ".");
    }
  }
}

}  // namespace kvasir::net
