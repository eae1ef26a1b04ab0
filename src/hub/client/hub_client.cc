#include "hub/client/hub_client.h"

#include <arpa/inet.h>
#include <curl/curl.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <format>
#include <string_view>

namespace kvasir::hub {
namespace {

constexpr long kConnectTimeoutMs = 15'000;
constexpr long kCallTimeoutMs = 45'000;  // the hub's long polls last 30 s
constexpr int kPollMs = 1000;
constexpr long kStallBytesPerS = 512;
constexpr long kStallTimeS = 30;
// A hub that has given the stream up meanwhile answers the system's probes with a reset.
constexpr long kProbeAfterS = 5, kProbeEveryS = 5;
constexpr long kSilenceTimeS = 60;  // of a stream; the hub sends a few bytes every 15 s
constexpr std::size_t kReplyBytesMax = 64u << 20;

struct CurlFree {
  void operator()(CURL* handle) const { curl_easy_cleanup(handle); }
};
struct MultiFree {
  void operator()(CURLM* handle) const { curl_multi_cleanup(handle); }
};
struct ListFree {
  void operator()(curl_slist* list) const { curl_slist_free_all(list); }
};

// "localhost:80", "127.0.0.1", "[::1]:80", and no name that only begins like these.
bool is_loopback_host(std::string_view host) {
  if (host.starts_with('[')) return host.substr(0, host.find(']') + 1) == "[::1]";
  const std::string name(host.substr(0, host.find(':')));
  in_addr address{};
  return name == "localhost" ||
         (::inet_pton(AF_INET, name.c_str(), &address) == 1 && ntohl(address.s_addr) >> 24 == 127);
}

// What one transfer receives.
struct Receiver {
  CURL* handle = nullptr;
  HubClient::Piece piece;
  std::string text;  // of a small reply, or of an error
  const std::function<bool(const HubClient::Piece&)>* begin = nullptr;
  const std::function<bool(const char*, std::size_t)>* data = nullptr;
  bool begun = false, stopped = false;

  static std::size_t on_header(char* bytes, std::size_t, std::size_t n, void* self) {
    auto& receiver = *static_cast<Receiver*>(self);
    const std::string_view line(bytes, n);
    const auto value_of = [&](std::string_view name) -> std::optional<std::string_view> {
      if (line.size() <= name.size() || line[name.size()] != ':') return std::nullopt;
      if (!std::ranges::equal(line.substr(0, name.size()), name,
                              [](char a, char b) { return (a | 0x20) == (b | 0x20); }))
        return std::nullopt;
      std::string_view value = line.substr(name.size() + 1);
      while (!value.empty() && (value.front() == ' ' || value.front() == '\t')) value.remove_prefix(1);
      while (!value.empty() && (value.back() == '\r' || value.back() == '\n' || value.back() == ' '))
        value.remove_suffix(1);
      return value;
    };
    const auto number = [](std::string_view text) {
      std::uint64_t value = 0;
      std::from_chars(text.data(), text.data() + text.size(), value);
      return value;
    };
    if (line.starts_with("HTTP/")) receiver.piece = {};  // of an interim answer before
    if (const auto etag = value_of("etag")) receiver.piece.etag = *etag;
    if (const auto length = value_of("content-length"); length && receiver.piece.total == 0)
      receiver.piece.total = number(*length);
    if (const auto range = value_of("content-range"))
      if (const std::size_t slash = range->rfind('/'); slash != std::string_view::npos)
        receiver.piece.total = number(range->substr(slash + 1));
    if (const auto wait = value_of("retry-after"))
      receiver.piece.retry_after = std::chrono::seconds(std::min<std::uint64_t>(number(*wait), 3600));
    return n;
  }

  static std::size_t on_data(char* bytes, std::size_t, std::size_t n, void* self) {
    auto& receiver = *static_cast<Receiver*>(self);
    if (!receiver.begun) {
      receiver.begun = true;
      curl_easy_getinfo(receiver.handle, CURLINFO_RESPONSE_CODE, &receiver.piece.status);
      if (receiver.begin != nullptr && receiver.is_file() && !(*receiver.begin)(receiver.piece))
        receiver.stopped = true;
    }
    if (receiver.stopped) return 0;
    if (receiver.data != nullptr && receiver.is_file()) {
      if ((*receiver.data)(bytes, n)) return n;
      receiver.stopped = true;
      return 0;
    }
    if (receiver.text.size() + n > kReplyBytesMax) return 0;
    receiver.text.append(bytes, n);
    return n;
  }
  bool is_file() const { return piece.status == 200 || piece.status == 206; }
};

class CurlClient final : public HubClient {
 public:
  explicit CurlClient(HubAddress address)
      : address_(std::move(address)), multi_(curl_multi_init()), handle_(curl_easy_init()) {}
  bool ok() const { return handle_ != nullptr && multi_ != nullptr; }

  Result<HubReply> get(const std::string& path) override { return call(path, nullptr); }
  void cancel() override {
    cancelled_.store(true);
    curl_multi_wakeup(multi_.get());
  }
  Result<HubReply> post(const std::string& path, const nlohmann::json& body) override {
    const std::string text = body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    return call(path, &text);
  }

  Result<Piece> download(const std::string& path, std::uint64_t from, const std::string& etag,
                         std::uint64_t bytes_per_s_max, const std::function<bool(const Piece&)>& begin,
                         const std::function<bool(const char*, std::size_t)>& data) override {
    Receiver receiver;
    receiver.begin = &begin;
    receiver.data = &data;
    std::vector<std::string> headers;
    if (from > 0 && !etag.empty()) {
      headers.push_back(std::format("Range: bytes={}-", from));
      headers.push_back("If-Range: " + etag);
    }
    prepare(path, receiver, headers);
    set(CURLOPT_TIMEOUT_MS, 0L);
    set(CURLOPT_LOW_SPEED_LIMIT, kStallBytesPerS);
    set(CURLOPT_LOW_SPEED_TIME, kStallTimeS);
    set(CURLOPT_MAX_RECV_SPEED_LARGE, static_cast<curl_off_t>(bytes_per_s_max));
    const CURLcode code = perform();
    curl_easy_getinfo(handle_.get(), CURLINFO_RESPONSE_CODE, &receiver.piece.status);
    if (receiver.piece.status == 0) return unreachable(code);
    receiver.piece.complete = code == CURLE_OK && receiver.is_file();
    if (!receiver.is_file()) receiver.piece.error = HubReply{receiver.piece.status, receiver.text, {}, {}}.error();
    return receiver.piece;
  }

  Result<Piece> stream(const std::string& path, const std::function<bool(const char*, std::size_t)>& data) override {
    Receiver receiver;
    receiver.data = &data;
    prepare(path, receiver, {});
    set(CURLOPT_TIMEOUT_MS, 0L);
    set(CURLOPT_LOW_SPEED_LIMIT, 1L);
    set(CURLOPT_LOW_SPEED_TIME, kSilenceTimeS);
    set(CURLOPT_TCP_KEEPALIVE, 1L);
    set(CURLOPT_TCP_KEEPIDLE, kProbeAfterS);
    set(CURLOPT_TCP_KEEPINTVL, kProbeEveryS);
    const CURLcode code = perform();
    curl_easy_getinfo(handle_.get(), CURLINFO_RESPONSE_CODE, &receiver.piece.status);
    if (receiver.piece.status == 0) return unreachable(code);
    if (!receiver.is_file()) receiver.piece.error = HubReply{receiver.piece.status, receiver.text, {}, {}}.error();
    return receiver.piece;
  }

 private:
  template <typename T>
  void set(CURLoption option, T value) {
    curl_easy_setopt(handle_.get(), option, value);
  }

  void prepare(const std::string& path, Receiver& receiver, const std::vector<std::string>& more_headers) {
    curl_easy_reset(handle_.get());  // keeps the connection
    receiver.handle = handle_.get();
    headers_.reset();
    const auto add = [this](const std::string& line) {
      headers_.reset(curl_slist_append(headers_.release(), line.c_str()));
    };
    add("Authorization: Bearer " + address_.token);
    add("Expect:");
    for (const std::string& line : more_headers) add(line);
    set(CURLOPT_URL, (address_.url + path).c_str());
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_FOLLOWLOCATION, 0L);  // a token goes to the hub that was named, and nowhere else
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_CONNECTTIMEOUT_MS, kConnectTimeoutMs);
    set(CURLOPT_TIMEOUT_MS, kCallTimeoutMs);
    set(CURLOPT_USERAGENT, "kvasir");
    if (!address_.ca_file.empty()) set(CURLOPT_CAINFO, address_.ca_file.c_str());
    set(CURLOPT_HTTPHEADER, headers_.get());
    set(CURLOPT_HEADERFUNCTION, &Receiver::on_header);
    set(CURLOPT_HEADERDATA, &receiver);
    set(CURLOPT_WRITEFUNCTION, &Receiver::on_data);
    set(CURLOPT_WRITEDATA, &receiver);
  }

  // As curl_easy_perform, but a transfer that waits for its answer can be cancelled.
  CURLcode perform() {
    if (curl_multi_add_handle(multi_.get(), handle_.get()) != CURLM_OK) return CURLE_FAILED_INIT;
    CURLcode result = CURLE_ABORTED_BY_CALLBACK;
    for (int running = 1; running > 0 && !cancelled_.load();) {
      if (curl_multi_perform(multi_.get(), &running) != CURLM_OK) break;
      int left = 0;
      while (const CURLMsg* message = curl_multi_info_read(multi_.get(), &left))
        if (message->msg == CURLMSG_DONE) result = message->data.result;
      if (running > 0) curl_multi_poll(multi_.get(), nullptr, 0, kPollMs, nullptr);
    }
    curl_multi_remove_handle(multi_.get(), handle_.get());
    return result;
  }

  Result<HubReply> call(const std::string& path, const std::string* body) {
    Receiver receiver;
    std::vector<std::string> headers;
    if (body != nullptr) headers.push_back("Content-Type: application/json");
    prepare(path, receiver, headers);
    if (body != nullptr) {
      set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body->size()));
      set(CURLOPT_POSTFIELDS, body->c_str());
    }
    const CURLcode code = perform();
    if (code != CURLE_OK) return unreachable(code);
    HubReply reply;
    curl_easy_getinfo(handle_.get(), CURLINFO_RESPONSE_CODE, &reply.status);
    char* ip = nullptr;
    if (curl_easy_getinfo(handle_.get(), CURLINFO_LOCAL_IP, &ip) == CURLE_OK && ip != nullptr) reply.local_ip = ip;
    reply.body = std::move(receiver.text);
    reply.retry_after = receiver.piece.retry_after;
    return reply;
  }

  std::unexpected<Error> unreachable(CURLcode code) const {
    const std::string why = curl_easy_strerror(code);
    // Trying again does not help against a certificate.
    if (code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE)
      return fix_input(std::format(
          "the hub '{}' shows a certificate that cannot be verified; give --ca-file if it is its own.", address_.url));
    if (code == CURLE_URL_MALFORMAT || code == CURLE_UNSUPPORTED_PROTOCOL)
      return fix_input(std::format("'{}' is not the address of a hub.", address_.url));
    return retry_later(std::format("the hub '{}' does not answer ({}).", address_.url, why));
  }

  HubAddress address_;
  std::unique_ptr<CURLM, MultiFree> multi_;  // keeps the connection from call to call
  std::unique_ptr<CURL, CurlFree> handle_;
  std::atomic<bool> cancelled_{false};
  std::unique_ptr<curl_slist, ListFree> headers_;
};

}  // namespace

Result<HubAddress> check_address(HubAddress address) {
  while (address.url.ends_with('/')) address.url.pop_back();
  const std::size_t scheme_end = address.url.find("://");
  if (scheme_end == std::string::npos)
    return fix_input(std::format("'{}' is not the address of a hub; write https://HOST.", address.url));
  const std::string_view scheme = std::string_view(address.url).substr(0, scheme_end),
                         host = std::string_view(address.url).substr(scheme_end + 3);
  if (host.empty() || host.find_first_of("/?#@ ") != std::string_view::npos)
    return fix_input(std::format("'{}' is not the address of a hub; write https://HOST without a path.", address.url));
  if (scheme != "https" && scheme != "http")
    return fix_input("a hub's address begins with https:// (or http:// on this machine).");
  if (scheme == "http" && !is_loopback_host(host))
    return fix_input("over http:// the token would cross the network in the clear; use https://.");
  if (address.token.empty()) return fix_input("the hub asks for a token: --token-file FILE, or KVASIR_TOKEN.");
  if (address.token.find_first_of(" \r\n\t") != std::string::npos)
    return fix_input("the token has spaces or line breaks in it.");
  return address;
}

std::string percent_encode(std::string_view text) {
  std::string out;
  for (const unsigned char c : text) {
    const bool plain =
        (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') || c == '-' || c == '.' || c == '_';
    if (plain)
      out += static_cast<char>(c);
    else
      out += std::format("%{:02X}", c);
  }
  return out;
}

nlohmann::json HubReply::json() const {
  auto value = nlohmann::json::parse(body, nullptr, false);
  return value.is_object() ? value : nlohmann::json::object();
}

std::string HubReply::error() const {
  const auto value = json();
  if (const auto found = value.find("error"); found != value.end() && found->is_string())
    return found->get<std::string>();
  return std::format("the hub answered with status {}.", status);
}

Result<std::unique_ptr<HubClient>> HubClient::create(const HubAddress& address) {
  static const CURLcode initialised = curl_global_init(CURL_GLOBAL_DEFAULT);
  auto client = std::make_unique<CurlClient>(address);
  if (initialised != CURLE_OK || !client->ok()) return fatal("libcurl cannot be used.");
  return client;
}

}  // namespace kvasir::hub
