#include "discovery/multicast.h"

#include <avahi-common/alternative.h>
#include <avahi-common/error.h>
#include <avahi-common/malloc.h>
#include <avahi-common/simple-watch.h>
#include <avahi-common/strlst.h>
#include <avahi-core/core.h>
#include <avahi-core/log.h>
#include <avahi-core/lookup.h>
#include <avahi-core/publish.h>
#include <net/if.h>

#include <algorithm>
#include <array>
#include <format>
#include <memory>
#include <random>

namespace kvasir::discovery {
namespace {

constexpr int kIterateMs = 200;
constexpr Nanos kGoodbye = std::chrono::milliseconds(300);

template <auto Free>
struct Deleter {
  template <typename T>
  void operator()(T* p) const {
    Free(p);
  }
};
using Poll = std::unique_ptr<AvahiSimplePoll, Deleter<avahi_simple_poll_free>>;
using Server = std::unique_ptr<AvahiServer, Deleter<avahi_server_free>>;
using StringList = std::unique_ptr<AvahiStringList, Deleter<avahi_string_list_free>>;

std::unexpected<Error> avahi_error(int code) {
  return retry_later(std::format("the local network cannot be spoken to: {}.", avahi_strerror(code)));
}

// A stack of our own, beside the system's if there is one.
enum class Family { kIpv4, kBoth };

Result<Server> make_server(AvahiSimplePoll* poll, bool publishes, Family family, AvahiServerCallback callback,
                           void* data) {
  avahi_set_log_function([](AvahiLogLevel, const char*) {});
  AvahiServerConfig config;
  avahi_server_config_init(&config);
  // A name of our own: the machine's belongs to the system's stack.
  std::random_device random;
  avahi_free(config.host_name);
  config.host_name = avahi_strdup(std::format("kvasir-{:08x}", random()).c_str());
  config.publish_hinfo = config.publish_workstation = config.publish_domain = 0;
  config.publish_addresses = publishes ? 1 : 0;
  config.enable_wide_area = 0;
  config.use_ipv6 = family == Family::kBoth ? 1 : 0;
  // Who listens on IPv4 alone is not to be looked for at the machine's other addresses.
  config.publish_aaaa_on_ipv4 = config.use_ipv6;
  // What is said on loopback is an address of no use to others; this machine hears its own multicast anyway.
  config.deny_interfaces = avahi_string_list_add(config.deny_interfaces, "lo");
  int code = 0;
  Server out(avahi_server_new(avahi_simple_poll_get(poll), &config, callback, data, &code));
  avahi_server_config_free(&config);
  if (!out) return avahi_error(code);
  return out;
}

// --- announcing --------------------------------------------------------------------------

class Publisher {
 public:
  explicit Publisher(const Service& service) : service_(service), name_(service.name) {}
  // The group itself ends with the server.
  void withdraw() {
    if (group_ != nullptr) avahi_s_entry_group_reset(group_);
  }

  static void on_server(AvahiServer* server, AvahiServerState state, void* data) {
    auto& self = *static_cast<Publisher*>(data);
    if (state == AVAHI_SERVER_RUNNING) {
      self.publish(server);
    } else if (state == AVAHI_SERVER_COLLISION) {
      char* other = avahi_alternative_host_name(avahi_server_get_host_name(server));
      avahi_server_set_host_name(server, other);
      avahi_free(other);
    } else if (state == AVAHI_SERVER_FAILURE) {
      self.failed_ = avahi_server_errno(server);
    } else if (self.group_ != nullptr) {
      avahi_s_entry_group_reset(self.group_);
    }
  }
  int failed() const { return failed_; }

 private:
  void publish(AvahiServer* server) {
    if (group_ == nullptr) group_ = avahi_s_entry_group_new(server, on_group, this);
    if (group_ == nullptr) return fail(avahi_server_errno(server));
    avahi_s_entry_group_reset(group_);
    StringList text;
    for (const auto& [key, value] : service_.text)
      text.reset(avahi_string_list_add_pair(text.release(), key.c_str(), value.c_str()));
    const int code = avahi_server_add_service_strlst(
        server, group_, AVAHI_IF_UNSPEC, AVAHI_PROTO_UNSPEC, AvahiPublishFlags{}, name_.c_str(),
        std::string(type_of(service_.kind)).c_str(), nullptr, nullptr, service_.port, text.get());
    if (code == AVAHI_ERR_COLLISION) return rename(server);
    if (code < 0) return fail(code);
    if (const int committed = avahi_s_entry_group_commit(group_); committed < 0) fail(committed);
  }
  // Two on one machine, or one name on two: "… #2".
  void rename(AvahiServer* server) {
    char* other = avahi_alternative_service_name(name_.c_str());
    name_ = other;
    avahi_free(other);
    publish(server);
  }
  static void on_group(AvahiServer* server, AvahiSEntryGroup*, AvahiEntryGroupState state, void* data) {
    auto& self = *static_cast<Publisher*>(data);
    if (state == AVAHI_ENTRY_GROUP_COLLISION) self.rename(server);
    if (state == AVAHI_ENTRY_GROUP_FAILURE) self.fail(avahi_server_errno(server));
  }
  void fail(int code) { failed_ = code; }

  const Service& service_;
  std::string name_;
  AvahiSEntryGroup* group_ = nullptr;
  int failed_ = 0;
};

// --- finding -----------------------------------------------------------------------------

std::string address_text(const AvahiAddress& address, AvahiIfIndex interface) {
  std::array<char, AVAHI_ADDRESS_STR_MAX> text{};
  avahi_address_snprint(text.data(), text.size(), &address);
  std::string out = text.data();
  std::array<char, IF_NAMESIZE> name{};
  if (out.starts_with("fe80:") && ::if_indextoname(static_cast<unsigned>(interface), name.data()) != nullptr)
    out += std::string("%") + name.data();
  return out;
}

// The address that is best to have: IPv4, then a global one.
int rank(const std::string& host) { return host.starts_with("fe80:") ? 2 : host.contains(':') ? 1 : 0; }

class Seeker {
 public:
  // Browsers and resolvers end with the server.
  explicit Seeker(AvahiServer* server) : server_(server) {
    for (const Kind kind : {Kind::kHub, Kind::kWorker})
      avahi_s_service_browser_new(server, AVAHI_IF_UNSPEC, AVAHI_PROTO_UNSPEC, std::string(type_of(kind)).c_str(),
                                  nullptr, AvahiLookupFlags{}, on_browse, this);
  }
  std::vector<Service> take() { return std::move(found_); }

 private:
  static void on_browse(AvahiSServiceBrowser*, AvahiIfIndex interface, AvahiProtocol protocol,
                        AvahiBrowserEvent event, const char* name, const char* type, const char* domain,
                        AvahiLookupResultFlags, void* data) {
    auto& self = *static_cast<Seeker*>(data);
    if (event != AVAHI_BROWSER_NEW || self.asked_ >= 4 * kServicesMax) return;
    ++self.asked_;
    avahi_s_service_resolver_new(self.server_, interface, protocol, name, type, domain, AVAHI_PROTO_UNSPEC,
                                 AvahiLookupFlags{}, on_resolve, data);
  }

  static void on_resolve(AvahiSServiceResolver* resolver, AvahiIfIndex interface, AvahiProtocol,
                         AvahiResolverEvent event, const char* name, const char* type, const char*, const char*,
                         const AvahiAddress* address, std::uint16_t port, AvahiStringList* text, AvahiLookupResultFlags,
                         void* data) {
    auto& self = *static_cast<Seeker*>(data);
    if (event == AVAHI_RESOLVER_FOUND && address != nullptr) {
      Service service;
      service.kind = std::string_view(type) == type_of(Kind::kHub) ? Kind::kHub : Kind::kWorker;
      service.name = plain_text(name, kNameBytesMax);
      service.host = address_text(*address, interface);
      service.port = port;
      for (const std::string_view key : keys_of(service.kind)) {
        AvahiStringList* const entry = avahi_string_list_find(text, std::string(key).c_str());
        char *found_key = nullptr, *value = nullptr;
        std::size_t size = 0;
        if (entry == nullptr || avahi_string_list_get_pair(entry, &found_key, &value, &size) != 0) continue;
        if (value != nullptr) service.text[std::string(key)] = plain_text({value, size}, kValueBytesMax);
        avahi_free(found_key);
        avahi_free(value);
      }
      self.add(std::move(service));
    }
    avahi_s_service_resolver_free(resolver);
  }
  void add(Service service) {
    const auto same = std::ranges::find_if(found_, [&](const Service& known) {
      return known.kind == service.kind && known.name == service.name && known.port == service.port;
    });
    if (same == found_.end()) {
      if (found_.size() < kServicesMax) found_.push_back(std::move(service));
    } else if (rank(service.host) < rank(same->host)) {
      *same = std::move(service);
    }
  }

  AvahiServer* const server_;
  std::size_t asked_ = 0;
  std::vector<Service> found_;
};

}  // namespace

Status announce(const Service& service, const std::function<bool()>& go_on) {
  const Poll poll(avahi_simple_poll_new());
  if (!poll) return fatal("there is no memory.");
  Publisher publisher(service);
  const Family family = service.host.contains(':') ? Family::kBoth : Family::kIpv4;
  KVASIR_ASSIGN(Server server, make_server(poll.get(), true, family, Publisher::on_server, &publisher));
  while (go_on()) {
    if (avahi_simple_poll_iterate(poll.get(), kIterateMs) != 0) break;
    if (publisher.failed() < 0) return avahi_error(publisher.failed());
  }
  // Those who know it are told that it is gone.
  publisher.withdraw();
  for (const TimePoint end = monotonic_now() + kGoodbye; monotonic_now() < end;)
    if (avahi_simple_poll_iterate(poll.get(), kIterateMs) != 0) break;
  return {};
}

Result<std::vector<Service>> find(Nanos time) {
  const Poll poll(avahi_simple_poll_new());
  if (!poll) return fatal("there is no memory.");
  const auto ignore = [](AvahiServer*, AvahiServerState, void*) {};
  KVASIR_ASSIGN(const Server server, make_server(poll.get(), false, Family::kBoth, ignore, nullptr));
  Seeker seeker(server.get());
  for (const TimePoint end = monotonic_now() + time; monotonic_now() < end;)
    if (avahi_simple_poll_iterate(poll.get(), kIterateMs) != 0) break;
  std::vector<Service> out = seeker.take();
  std::ranges::sort(out, {}, [](const Service& s) { return std::pair(s.kind, s.name); });
  return out;
}

}  // namespace kvasir::discovery
