// The WebSocket by Beast, its TLS by Asio. Both want an event loop; here each stream has one of
// its own that nobody runs: whoever reads or writes turns it until nothing more can be done
// without waiting, and polls the socket like that of any other stream.

#include "net/websocket.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <poll.h>
#include <sys/socket.h>

#include <boost/asio.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/websocket.hpp>
#include <boost/beast/websocket/ssl.hpp>
#include <cstring>
#include <format>

#include "base/bytes.h"

namespace kvasir::net {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
namespace websocket = beast::websocket;
using Tcp = asio::ip::tcp;
using SystemError = boost::system::error_code;

namespace {

constexpr std::size_t kInBytes = 64 << 10;         // read at once
constexpr std::size_t kOutBytes = 128 << 10;       // taken from a writer at once
constexpr std::size_t kProxyAnswerBytesMax = 8192;
constexpr std::size_t kSentenceBytesMax = 300;     // of a hub's refusal that is repeated
constexpr auto kQuiet = asio::as_tuple(asio::use_awaitable);

std::string base64(std::string_view text) {
  std::string out(4 * ((text.size() + 2) / 3) + 1, '\0');
  const int n = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(out.data()),
                                reinterpret_cast<const unsigned char*>(text.data()), static_cast<int>(text.size()));
  out.resize(static_cast<std::size_t>(n));
  return out;
}

// Everything but letters, digits and -._~ as %XX.
std::string url_encoded(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
                       c == '.' || c == '_' || c == '~';
    if (plain) out += c;
    else out += std::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return out;
}

// The hub's sentence in {"error":"…"}, or nothing.
std::string sentence_of(const std::string& body) {
  constexpr std::string_view kBefore = R"("error":")";
  const std::size_t at = body.find(kBefore);
  if (at == std::string::npos) return {};
  const std::size_t begin = at + kBefore.size(), end = body.find('"', begin);
  std::string out = body.substr(begin, std::min(end - begin, kSentenceBytesMax));
  const bool plain = std::ranges::all_of(out, [](unsigned char c) { return c >= 0x20 && c != 0x7f && c != '\\'; });
  return plain ? out : std::string();
}

Error refused_by(unsigned status, const std::string& body) {
  const bool ours = status == 400 || status == 401 || status == 403;
  std::string sentence = sentence_of(body);
  if (sentence.empty()) sentence = std::format("it answered with status {}; is it a hub of this version?", status);
  return {ours ? ErrorAction::kFixInput : ErrorAction::kRetryLater, "the relay refuses: " + sentence};
}

}  // namespace

struct RelayDialer::Plan {
  RelayUrl url;
  std::optional<HttpProxy> proxy;
  std::string token;
  std::shared_ptr<asio::ssl::context> tls;  // of https
};

template <typename Layer>
class BeastStream final : public WebSocketStream {
  static constexpr bool kTls = !std::is_same_v<Layer, Tcp::socket>;
  using Plan = RelayDialer::Plan;

 public:
  BeastStream(Fd fd, std::shared_ptr<const Plan> plan, std::string_view session)
      : WebSocketStream(Fd()),
        plan_(std::move(plan)),
        target_("/api/expert-relay?session=" + url_encoded(session)),
        socket_(make_layer(adopt(std::move(fd), io_), *plan_)) {
    socket_.set_option(
        websocket::stream_base::timeout{websocket::stream_base::none(), websocket::stream_base::none(), false});
    socket_.set_option(websocket::stream_base::decorator([this](websocket::request_type& request) {
      request.set(http::field::authorization, "Bearer " + plan_->token);
      request.set(http::field::user_agent, "kvasir");
    }));
    socket_.auto_fragment(false);
    socket_.read_message_max(0);  // a stream of bytes: messages are never gathered
    socket_.write_buffer_bytes(kOutBytes);
    socket_.binary(true);
    asio::co_spawn(io_, open(), asio::detached);
  }

  Result<bool> is_open() override {
    turn();
    if (error_) return std::unexpected(*error_);
    return open_;
  }

  Result<bool> has_input() override {
    turn();
    if (in_at_ < in_end_) return true;
    if (error_) return std::unexpected(*error_);
    if (ended_) return retry_later("the relay has closed the connection.");
    return false;
  }

  Result<IoResult> read_some(std::span<std::byte> into) override {
    if (in_at_ == in_end_) turn();
    std::size_t total = 0;
    while (in_at_ < in_end_ && total < into.size()) {
      const std::size_t n = std::min(in_end_ - in_at_, into.size() - total);
      std::memcpy(into.data() + total, in_.get() + in_at_, n);
      in_at_ += n;
      total += n;
      if (in_at_ < in_end_) break;
      start_read();
      turn();  // now either more is in the buffer, or poll will see it
    }
    if (total > 0) return IoResult{IoState::kDone, total};
    if (error_) return std::unexpected(*error_);
    return IoResult{ended_ ? IoState::kEnd : IoState::kWouldBlock, 0};
  }

  Result<IoResult> write_some(std::span<const iovec> parts) override {
    if (writing_ || !open_) turn();
    if (error_) return std::unexpected(*error_);
    if (ended_) return retry_elsewhere("the relay has closed the connection.");
    if (writing_ || !open_) return IoResult{IoState::kWouldBlock, 0};
    out_.clear();
    for (const iovec& part : parts) {
      const std::size_t n = std::min(part.iov_len, kOutBytes - out_.size());
      const auto* bytes = static_cast<const std::byte*>(part.iov_base);
      out_.insert(out_.end(), bytes, bytes + n);
    }
    if (out_.empty()) return IoResult{IoState::kDone, 0};
    writing_ = true;
    socket_.async_write(asio::buffer(out_), [this](const SystemError& error, std::size_t) {
      writing_ = false;
      if (error) fail(error);
    });
    turn();
    if (error_) return std::unexpected(*error_);
    return IoResult{IoState::kDone, out_.size()};
  }

  short wants(bool) const override {
    // While a read is under way it is waited for whatever the caller does: pings want answers.
    return static_cast<short>((in_at_ == in_end_ ? POLLIN : 0) | (writing_ ? POLLOUT : 0));
  }
  bool buffered_input() const override { return in_at_ < in_end_; }
  bool buffered_output() const override { return writing_; }
  bool encrypted() const override { return kTls; }
  int fd() const override { return const_cast<BeastStream*>(this)->tcp().native_handle(); }

  void shutdown() override {
    if (!open_ || error_ || ended_ || closing_) return;
    closing_ = true;
    socket_.async_close(websocket::close_code::normal, [](const SystemError&) {});
    turn();
  }

 private:
  static Tcp::socket adopt(Fd fd, asio::io_context& io) {
    sockaddr_storage local{};
    socklen_t length = sizeof local;
    ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&local), &length);
    Tcp::socket socket(io);
    SystemError ignored;
    const int duplicate = ::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0);  // assign() takes it only if it works
    socket.assign(local.ss_family == AF_INET6 ? Tcp::v6() : Tcp::v4(), duplicate, ignored);
    if (ignored && duplicate >= 0) ::close(duplicate);
    if (!ignored) socket.native_non_blocking(true, ignored);
    return socket;
  }

  static Layer make_layer(Tcp::socket socket, [[maybe_unused]] const Plan& plan) {
    if constexpr (kTls) return Layer(std::move(socket), *plan.tls);
    else return socket;
  }

  Tcp::socket& tcp() { return beast::get_lowest_layer(socket_); }

  // Everything that can be done without waiting.
  void turn() {
    io_.restart();
    try {
      io_.poll();
    } catch (const std::exception& thrown) {
      if (!error_) error_ = Error{ErrorAction::kRetryElsewhere, std::format("the relay's connection broke: {}.", thrown.what())};
    }
  }

  void fail(const SystemError& error) {
    if (error_ || ended_) return;
    if (error == websocket::error::closed || (closing_ && open_)) {
      const websocket::close_reason& reason = socket_.reason();
      if (closing_ || reason.code == websocket::close_code::normal || reason.code == websocket::close_code::none) {
        ended_ = true;
        return;
      }
      error_ = Error{ErrorAction::kRetryElsewhere,
                     std::format("the relay has closed the connection: {}.", std::string_view(reason.reason))};
      return;
    }
    error_ = Error{ErrorAction::kRetryElsewhere, std::format("the connection to the relay was lost: {}.", error.message())};
  }

  void start_read() {
    in_at_ = in_end_ = 0;
    if (!in_) in_ = std::make_unique_for_overwrite<std::byte[]>(kInBytes);
    socket_.async_read_some(asio::buffer(in_.get(), kInBytes), [this](const SystemError& error, std::size_t n) {
      in_end_ = n;
      if (error) fail(error);
      else if (n == 0) start_read();  // the end of a message
    });
  }

  asio::awaitable<void> open() {
    if (!tcp().is_open()) {
      error_ = Error{ErrorAction::kRetryLater, "no descriptor is left for a connection to the relay; raise ulimit -n."};
      co_return;
    }
    if (plan_->proxy && !co_await connect_through_proxy()) co_return;
    const std::string host = plan_->url.where.host;
    if constexpr (kTls) {
      auto& tls = socket_.next_layer();
      SystemError refused;
      tls.set_verify_mode(asio::ssl::verify_peer, refused);
      tls.set_verify_callback(asio::ssl::host_name_verification(host), refused);
      asio::ip::make_address(host, refused);
      // What OpenSSL's macro of that purpose does; a name, no address.
      std::string name = host;
      if (refused) SSL_ctrl(tls.native_handle(), SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name, name.data());
      const auto [error] = co_await tls.async_handshake(asio::ssl::stream_base::client, kQuiet);
      if (error) {
        const long verdict = SSL_get_verify_result(tls.native_handle());
        error_ = verdict != X509_V_OK
                     ? Error{ErrorAction::kFixInput,
                             std::format("the relay '{}' shows a certificate that cannot be verified ({}); give its "
                                         "authority's certificate if it is its own.",
                                         host, X509_verify_cert_error_string(verdict))}
                     : Error{ErrorAction::kRetryElsewhere,
                             std::format("TLS with the relay '{}' failed: {}.", host, error.message())};
        co_return;
      }
    }
    websocket::response_type response;
    const std::string authority = format_host_port(plan_->url.where);
    const auto [error] = co_await socket_.async_handshake(response, authority, target_, kQuiet);
    if (error == websocket::error::upgrade_declined) {
      error_ = refused_by(response.result_int(), response.body());
    } else if (error) {
      error_ = Error{ErrorAction::kRetryElsewhere, std::format("the relay '{}' did not open the connection: {}.", host,
                                                               error.message())};
    } else {
      open_ = true;
      start_read();
    }
  }

  // false: error_ is set.
  asio::awaitable<bool> connect_through_proxy() {
    const HttpProxy& proxy = *plan_->proxy;
    const std::string authority = format_host_port(plan_->url.where);
    http::request<http::empty_body> request(http::verb::connect, authority, 11);
    request.set(http::field::host, authority);
    request.set(http::field::user_agent, "kvasir");
    if (!proxy.credentials.empty())
      request.set(http::field::proxy_authorization, "Basic " + base64(proxy.credentials));
    const auto [sent, n_sent] = co_await http::async_write(tcp(), request, kQuiet);
    beast::flat_buffer buffer(kProxyAnswerBytesMax);
    http::response_parser<http::empty_body> answer;
    answer.skip(true);  // an answer to CONNECT has no body
    answer.header_limit(kProxyAnswerBytesMax);
    SystemError failed = sent;
    if (!failed) {
      const auto [read, n_read] = co_await http::async_read_header(tcp(), buffer, answer, kQuiet);
      failed = read;
    }
    const std::string name = format_host_port(proxy.where);
    if (failed) {
      error_ = Error{ErrorAction::kRetryElsewhere, std::format("the proxy {} broke off: {}.", name, failed.message())};
      co_return false;
    }
    const unsigned status = answer.get().result_int();
    if (status != 200) {
      error_ = Error{status == 407 ? ErrorAction::kFixInput : ErrorAction::kRetryLater,
                     std::format("the proxy {} refuses to connect to {}: status {}.", name, authority, status)};
      co_return false;
    }
    co_return true;
  }

  // Nobody but the caller of a stream turns its loop: no locks inside.
  asio::io_context io_{BOOST_ASIO_CONCURRENCY_HINT_UNSAFE};
  const std::shared_ptr<const Plan> plan_;
  const std::string target_;
  websocket::stream<Layer, /*deflate*/ false> socket_;
  std::unique_ptr<std::byte[]> in_;
  std::size_t in_at_ = 0, in_end_ = 0;  // unread bytes; none: a read is under way
  Bytes out_;                           // being written
  bool writing_ = false, open_ = false, closing_ = false, ended_ = false;
  std::optional<Error> error_;
};

Result<RelayDialer> RelayDialer::create(const RelayOptions& options) {
  auto plan = std::make_shared<Plan>();
  KVASIR_ASSIGN(plan->url, parse_relay_url(options.url));
  if (options.token.empty()) return fix_input("a relay wants a node token of its hub; set KVASIR_TOKEN.");
  if (options.token.find_first_of(" \r\n\t") != std::string::npos)
    return fix_input("the token has spaces or line breaks in it.");
  plan->token = options.token;
  if (plan->url.encrypted) {
    KVASIR_ASSIGN(plan->proxy, proxy_from_environment(plan->url.where.host));
    plan->tls = std::make_shared<asio::ssl::context>(asio::ssl::context::tls_client);
    SystemError error;
    plan->tls->set_options(asio::ssl::context::default_workarounds | asio::ssl::context::no_tlsv1 |
                               asio::ssl::context::no_tlsv1_1,
                           error);
    if (options.ca_file.empty()) plan->tls->set_default_verify_paths(error);
    else plan->tls->load_verify_file(options.ca_file, error);
    if (error)
      return fix_input(std::format("the certificates in '{}' cannot be read: {}.",
                                   options.ca_file.empty() ? "the system's store" : options.ca_file, error.message()));
  }
  return RelayDialer(std::move(plan));
}

const HostPort& RelayDialer::dial_address() const { return plan_->proxy ? plan_->proxy->where : plan_->url.where; }

bool RelayDialer::through_proxy() const { return plan_->proxy.has_value(); }

Result<std::unique_ptr<WebSocketStream>> RelayDialer::open(Fd fd, std::string_view session) const {
  try {
    if (plan_->tls)
      return std::make_unique<BeastStream<asio::ssl::stream<Tcp::socket>>>(std::move(fd), plan_, session);
    return std::make_unique<BeastStream<Tcp::socket>>(std::move(fd), plan_, session);
  } catch (const std::exception& thrown) {  // of Asio: no descriptors, no memory
    return retry_later(std::format("a connection to the relay cannot be made: {}.", thrown.what()));
  }
}

}  // namespace kvasir::net
