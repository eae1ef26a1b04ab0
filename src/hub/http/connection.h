// One connection: reads requests, asks the handlers, writes answers. Inside the server only.
#pragma once

#include <netinet/tcp.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/ssl.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <cerrno>
#include <charconv>
#include <format>
#include <memory>

#include "hub/http/relay_upgrade.h"
#include "hub/http/shared.h"

namespace kvasir::hub {

namespace beast = boost::beast;
namespace http = beast::http;
using Tcp = asio::ip::tcp;

inline constexpr auto kQuiet = asio::as_tuple(asio::use_awaitable);
inline constexpr std::uint64_t kSendFileBytesMax = 1u << 20;  // by one call
inline constexpr std::size_t kFirstReadBytes = 512;
inline constexpr std::size_t kCopyBytes = 64 * 1024;          // through memory (TLS)
inline constexpr std::size_t kDrainBytesMax = 4u << 20;        // read and dropped after a refusal
inline constexpr Nanos kDrainTimeout = std::chrono::seconds(2);
inline constexpr std::size_t kUnaskedBytesMax = 64 * 1024;    // from a client that should only listen
inline constexpr double kFailedAuthCost = 10;                 // in requests of the address

template <typename Stream>
inline constexpr bool kIsTls = !std::is_same_v<Stream, Tcp::socket>;

template <typename Stream>
class Connection final : public Watched, public std::enable_shared_from_this<Connection<Stream>> {
 public:
  Connection(Stream stream, std::shared_ptr<Shared> shared) : stream_(std::move(stream)), shared_(std::move(shared)) {}

  void abort() override {
    // Not closed: a reader's thread may be in sendfile, and the number of a closed socket can be
    // another connection's a moment later. Shut down, every operation fails, and run() ends.
    asio::post(stream_.get_executor(), [self = this->shared_from_this()] {
      boost::system::error_code ignored;
      self->socket().shutdown(Tcp::socket::shutdown_both, ignored);
      self->socket().cancel(ignored);
    });
  }

  auto executor() { return stream_.get_executor(); }

  asio::awaitable<void> run() {
    set_deadline(shared_->options.handshake_timeout);
    bool open = true;
    if constexpr (kIsTls<Stream>) {
      const auto [error] = co_await stream_.async_handshake(asio::ssl::stream_base::server, kQuiet);
      open = !error;
    }
    while (open && !shared_->draining) open = co_await one_request();
    close();
    shared_->leave(*this);
  }

  // For a connection that finds the house full.
  asio::awaitable<void> refuse() {
    set_deadline(kDrainTimeout);
    if constexpr (!kIsTls<Stream>)
      co_await write_text(error_response(503, "the hub has too many connections; try again in a moment."), false,
                          false);
    close();
  }

 private:
  Tcp::socket& socket() {
    if constexpr (kIsTls<Stream>) {
      return stream_.next_layer();
    } else {
      return stream_;
    }
  }
  void close() {
    boost::system::error_code ignored;
    socket().close(ignored);
  }

  static bool is_malformed(const boost::system::error_code& error) {
    return error.category() == http::make_error_code(http::error::bad_method).category() &&
           error != http::error::end_of_stream && error != http::error::partial_message;
  }

  // Whether the connection can take another request.
  asio::awaitable<bool> one_request() {
    const ServerOptions& options = shared_->options;
    if (buffer_.size() == 0) {
      // A fresh buffer: a connection that idles holds next to nothing.
      buffer_ = beast::flat_buffer(options.header_bytes_max + kBodyBytesMax);
      set_deadline(options.idle_timeout);
      set_idle(true);
      const auto [error, n] = co_await stream_.async_read_some(buffer_.prepare(kFirstReadBytes), kQuiet);
      if (error) co_return false;
      buffer_.commit(n);
      set_idle(false);
    }
    set_deadline(options.header_timeout);
    http::request_parser<http::string_body> parser;
    parser.header_limit(static_cast<std::uint32_t>(options.header_bytes_max));
    parser.body_limit(boost::none);  // set when the route is known
    const auto [error, n_read] = co_await http::async_read_header(stream_, buffer_, parser, kQuiet);
    if (error) {
      if (error == http::error::header_limit || error == http::error::buffer_overflow)
        co_return co_await refuse_request(error_response(431, "the request's header is too long."), false);
      if (is_malformed(error))
        co_return co_await refuse_request(error_response(400, "this is not an HTTP/1.1 request."), false);
      co_return false;  // gone
    }
    ++shared_->requests;
    const bool head = parser.get().method() == http::verb::head;
    const bool keep_alive = parser.get().keep_alive();

    Request request;
    request.now = monotonic_now();
    request.address = client_address(parser.get());
    if (const Nanos wait = shared_->take_address(request.address); wait > Nanos::zero())
      co_return co_await refuse_request(too_many(wait, "this address asks too often"), head);
    const http::request<http::string_body>& message = parser.get();
    const std::string_view target = message.target();
    if (target.size() > kTargetBytesMax)
      co_return co_await refuse_request(error_response(414, "the address is too long."), head);
    if (const Status parsed = parse_target(target, request); !parsed)
      co_return co_await refuse_request(error_response(parsed.error()), head);
    request.method = head ? "GET" : std::string(message.method_string());
    const Router::Match match = shared_->router.match(request);
    if (match.route == nullptr) co_return co_await refuse_request(no_route(match), head);
    const Route& route = *match.route;

    if (!route.is_public()) {
      Response refusal;
      if (!co_await authenticate(message, route, request, refusal))
        co_return co_await refuse_request(std::move(refusal), head);
    }
    // Bytes behind the header belong to no WebSocket yet: such a client gets the handler's answer.
    if (route.websocket && is_websocket_upgrade(message) && buffer_.size() == 0) {
      set_deadline(options.wait_max);
      auto refusal = co_await hand_to_relay(stream_, message, request, shared_);
      if (refusal) co_return co_await refuse_request(*std::move(refusal), false);
      co_return false;
    }
    // The length that is announced is refused before a byte of it is read.
    const auto length = parser.content_length();
    if (length && *length > route.body_bytes_max())
      co_return co_await refuse_request(
          error_response(413, std::format("the body is too long; {} bytes are allowed here.", route.body_bytes_max())),
          head);
    if (!parser.is_done()) {
      if (beast::iequals(message[http::field::expect], "100-continue")) {
        http::response<http::empty_body> go_on(http::status::continue_, 11);
        if (const auto [failed, n] = co_await http::async_write(stream_, go_on, kQuiet); failed) co_return false;
      }
      set_deadline(options.body_timeout);
      parser.body_limit(route.body_bytes_max());
      const auto [failed, n] = co_await http::async_read(stream_, buffer_, parser, kQuiet);
      if (failed == http::error::body_limit || failed == http::error::buffer_overflow)
        co_return co_await refuse_request(
            error_response(413,
                           std::format("the body is too long; {} bytes are allowed here.", route.body_bytes_max())),
            head);
      if (is_malformed(failed))
        co_return co_await refuse_request(error_response(400, "the request's body is malformed."), head);
      if (failed) co_return false;
    }
    request.range = message[http::field::range];
    request.if_range = message[http::field::if_range];
    request.if_none_match = message[http::field::if_none_match];
    request.accept_encoding = message[http::field::accept_encoding];
    request.body = std::move(parser.get().body());

    Response response = co_await ask(route, request);
    co_return co_await write(std::move(response), head, keep_alive);
  }

  template <typename Message>
  std::string client_address(const Message& message) const {
    if (!shared_->options.trust_proxy || !(address == "127.0.0.1" || address == "::1")) return address;
    // The proxy on this machine appends the address it saw: the last one is the one to believe.
    const std::string_view forwarded = message["X-Forwarded-For"];
    if (forwarded.empty()) return address;
    std::string_view last = forwarded.substr(forwarded.rfind(',') + 1);  // npos + 1 is 0
    while (!last.empty() && last.front() == ' ') last.remove_prefix(1);
    return std::string(last.substr(0, 64));
  }

  static Response too_many(Nanos wait, std::string_view what) {
    const auto seconds = std::chrono::ceil<std::chrono::seconds>(wait).count();
    Response out = error_response(429, std::format("{}; wait {} s.", what, seconds));
    out.headers.emplace_back("Retry-After", std::to_string(seconds));
    return out;
  }

  static Response no_route(const Router::Match& match) {
    if (match.allowed.empty()) return error_response(404, "there is nothing at this address; see /api/openapi.json.");
    Response out = error_response(405, "this address does not take that method.");
    std::string allowed;
    for (const std::string& method : match.allowed)
      allowed += (allowed.empty() ? "" : ", ") + method + (method == "GET" ? ", HEAD" : "");
    out.headers.emplace_back("Allow", allowed);
    return out;
  }

  asio::awaitable<bool> authenticate(const http::request<http::string_body>& message, const Route& route,
                                     Request& request, Response& refusal) {
    constexpr std::string_view kBearer = "bearer ";
    const std::string_view header = message[http::field::authorization];
    const auto deny = [&refusal](std::string_view sentence) {
      refusal = error_response(401, sentence);
      refusal.headers.emplace_back("WWW-Authenticate", "Bearer");
      return false;
    };
    const auto in_target = route.websocket ? request.query.find("token") : request.query.end();
    if (header.empty() && in_target == request.query.end())
      co_return deny("this needs a node token: Authorization: Bearer TOKEN.");
    if (!header.empty() && !beast::iequals(header.substr(0, kBearer.size()), kBearer))
      co_return deny("the Authorization header must be: Bearer TOKEN.");
    const std::string token(header.empty() ? in_target->second : header.substr(kBearer.size()));
    auto checked = co_await run_on(shared_->handlers, [shared = shared_, token] {
      return shared->authenticator.check(token, unix_now(), monotonic_now());
    });
    if (!checked) {
      if (checked.error().action != ErrorAction::kFixInput) {
        shared_->log(checked.error().message);
        refusal = error_response(503, "the hub cannot check tokens just now; try again in a moment.");
        co_return false;
      }
      shared_->take_address(request.address, kFailedAuthCost);
      co_return deny(checked.error().message);
    }
    request.principal = *std::move(checked);
    if (!route.permits(request.principal.scope)) {
      refusal = error_response(
          403, std::format("a token of scope '{}' may not do this.", to_string(request.principal.scope)));
      co_return false;
    }
    if (const Nanos wait = shared_->take_token(request.principal.token_id); wait > Nanos::zero()) {
      refusal = too_many(wait, "this token is used too often");
      co_return false;
    }
    co_return true;
  }

  asio::awaitable<Response> ask(const Route& route, Request& request) {
    const TimePoint give_up = monotonic_now() + shared_->options.wait_max;
    while (true) {
      if (shared_->jobs.fetch_add(1) >= shared_->options.jobs_max) {
        --shared_->jobs;
        Response busy = error_response(503, "the hub is busy; try again in a moment.");
        busy.headers.emplace_back("Retry-After", "2");
        co_return busy;
      }
      set_deadline(shared_->options.wait_max + shared_->options.stall_timeout);
      Response response = co_await run_on(shared_->handlers, [&route, &request, shared = shared_] {
        Response out;
        try {
          out = route.handler(request);
        } catch (const std::exception& thrown) {  // a library's: the hub's own code has none
          shared->log(std::format("{} {}: {}", route.method, route.pattern, thrown.what()));
          out = error_response(500, "the hub met an error it did not expect; its log has the details.");
        }
        --shared->jobs;
        return out;
      });
      if (!response.ask_again) co_return response;
      request.now = monotonic_now();
      request.last_chance = shared_->draining || request.now + *response.ask_again >= give_up;
      asio::steady_timer timer(stream_.get_executor(), *response.ask_again);
      if (const auto [error] = co_await timer.async_wait(kQuiet); error) co_return response;
    }
  }

  template <typename Message>
  static void fill_header(Message& message, const Response& response, bool keep_alive) {
    message.result(response.status);
    message.version(11);
    message.set(http::field::content_type, response.content_type);
    message.set(http::field::cache_control, response.body ? "private, no-transform" : "no-store");
    message.set("X-Content-Type-Options", "nosniff");
    for (const auto& [name, value] : response.headers) message.set(name, value);
    message.keep_alive(keep_alive);
  }

  asio::awaitable<bool> write_text(Response response, bool head, bool keep_alive) {
    set_deadline(shared_->options.stall_timeout);
    http::response<http::string_body> message;
    fill_header(message, response, keep_alive);
    message.content_length(response.text.size());
    if (!head) message.body() = std::move(response.text);
    http::response_serializer<http::string_body> serializer(message);
    if (head || response.status == 304) {
      const auto [error, n] = co_await http::async_write_header(stream_, serializer, kQuiet);
      co_return !error && keep_alive;
    }
    const auto [error, n] = co_await http::async_write(stream_, serializer, kQuiet);
    co_return !error && keep_alive;
  }

  // After a refusal the rest of the request may still be on its way. It is read and dropped,
  // within bounds: closing at once would take the answer away from a client that still writes.
  asio::awaitable<bool> refuse_request(Response response, bool head) {
    if (!co_await write_text(std::move(response), head, true)) co_return false;
    boost::system::error_code ignored;
    if constexpr (!kIsTls<Stream>) socket().shutdown(Tcp::socket::shutdown_send, ignored);
    set_deadline(kDrainTimeout);
    std::array<char, 4096> scrap;
    for (std::size_t dropped = 0; dropped < kDrainBytesMax;) {
      const auto [error, n] = co_await stream_.async_read_some(asio::buffer(scrap), kQuiet);
      if (error) break;
      dropped += n;
    }
    co_return false;
  }

  asio::awaitable<bool> write(Response response, bool head, bool keep_alive) {
    if (response.stream && !head) co_return co_await write_stream(std::move(response));
    if (!response.body) co_return co_await write_text(std::move(response), head, keep_alive);
    if (!head && shared_->downloads.fetch_add(1) >= shared_->options.downloads_max) {
      --shared_->downloads;
      Response busy = error_response(503, "too many downloads are under way; try again in a moment.");
      busy.headers.emplace_back("Retry-After", "5");
      co_return co_await write_text(std::move(busy), false, keep_alive);
    }
    set_deadline(shared_->options.stall_timeout);
    http::response<http::empty_body> message;
    fill_header(message, response, keep_alive);
    message.content_length(response.body->size);
    http::response_serializer<http::empty_body> serializer(message);
    const auto [error, n] = co_await http::async_write_header(stream_, serializer, kQuiet);
    if (head) co_return !error && keep_alive;
    const bool sent = !error && co_await send_body(*response.body);
    --shared_->downloads;
    co_return sent&& keep_alive;
  }

  // Has the system find out whether the other machine is still there. Best effort: heartbeats
  // that stay away say the same later.
  void probe_peer() {
    const auto set = [fd = socket().native_handle()](int level, int option, auto value) {
      const int number = static_cast<int>(value.count());
      ::setsockopt(fd, level, option, &number, sizeof number);
    };
    set(SOL_SOCKET, SO_KEEPALIVE, std::chrono::seconds(1));
    set(IPPROTO_TCP, TCP_KEEPIDLE, kProbeAfter);
    set(IPPROTO_TCP, TCP_KEEPINTVL, kProbeInterval);
    set(IPPROTO_TCP, TCP_KEEPCNT, (kVanishedMax - kProbeAfter) / kProbeInterval.count());
    // Bytes under way that nobody confirms are waited for no longer.
    set(IPPROTO_TCP, TCP_USER_TIMEOUT, std::chrono::milliseconds(kVanishedMax));
  }

  // Until the client is gone or the hub stops. Always the last of its connection.
  asio::awaitable<bool> write_stream(Response response) {
    std::shared_ptr<EventStream> stream = std::move(response.stream);
    if (response.watched) probe_peer();
    set_deadline(shared_->options.stall_timeout);
    http::response<http::empty_body> message;
    fill_header(message, response, false);
    message.chunked(true);
    http::response_serializer<http::empty_body> serializer(message);
    if (const auto [error, n] = co_await http::async_write_header(stream_, serializer, kQuiet); error) co_return false;

    auto pace = std::make_shared<Pace>(stream_.get_executor());
    stream->on_more([executor = stream_.get_executor(), weak = std::weak_ptr(pace)] {
      asio::post(executor, [weak] {
        if (const auto awake = weak.lock()) awake->wake();
      });
    });
    // Reading is how a client that leaves is noticed.
    asio::co_spawn(stream_.get_executor(), listen_for_end(this->shared_from_this(), pace), asio::detached);
    set_endless();
    static const auto kComment = std::make_shared<const std::string>(": \n\n");
    while (!pace->ended && !shared_->draining) {
      pace->more = false;
      std::shared_ptr<const std::string> text = stream->next();
      if (text == nullptr) {
        set_deadline(kKeepAliveInterval + shared_->options.stall_timeout);
        pace->timer.expires_after(kKeepAliveInterval);
        if (!pace->more) co_await pace->timer.async_wait(kQuiet);
        if (pace->ended || pace->more) continue;
        text = kComment;
      }
      set_deadline(shared_->options.stall_timeout);
      const auto [error, n] = co_await asio::async_write(stream_, http::make_chunk(asio::buffer(*text)), kQuiet);
      if (error) break;
      shared_->bytes_sent += text->size();
    }
    co_return false;
  }

  // What wakes a stream's writer; used on the connection's strand only.
  struct Pace {
    explicit Pace(const asio::any_io_executor& executor) : timer(executor) {}
    void wake() {
      more = true;
      timer.cancel();
    }
    asio::steady_timer timer;
    bool more = false, ended = false;
  };

  static asio::awaitable<void> listen_for_end(std::shared_ptr<Connection> self, std::shared_ptr<Pace> pace) {
    std::array<char, 1024> scrap;
    for (std::size_t dropped = 0; dropped < kUnaskedBytesMax;) {
      const auto [error, n] = co_await self->stream_.async_read_some(asio::buffer(scrap), kQuiet);
      if (error) break;
      dropped += n;
    }
    pace->ended = true;
    pace->timer.cancel();
  }

  // false: the client is gone, or the files changed; the connection ends short of the length
  // that was promised, which no client can take for the whole.
  asio::awaitable<bool> send_body(const Body& body) {
    static const std::array<std::byte, kCopyBytes> kZeros{};
    for (const BodyPiece& piece : body.pieces) {
      for (std::uint64_t done = 0; done < piece.size;) {
        set_deadline(shared_->options.stall_timeout);
        const std::uint64_t left = piece.size - done;
        std::uint64_t sent = 0;
        if (piece.kind == BodyPiece::Kind::kFile) {
          if (const Status unchanged = body.check(); !unchanged) {
            shared_->log(unchanged.error().message);
            co_return false;
          }
          const auto moved = co_await send_file(piece.fd, piece.offset + done, left);
          if (!moved) co_return false;
          sent = *moved;
        } else {
          const bool memory = piece.kind == BodyPiece::Kind::kMemory;
          const std::size_t n =
              static_cast<std::size_t>(std::min<std::uint64_t>(left, memory ? kSendFileBytesMax : kZeros.size()));
          const auto* from = memory ? piece.bytes->data() + piece.offset + done : kZeros.data();
          const auto [error, written] = co_await asio::async_write(stream_, asio::buffer(from, n), kQuiet);
          if (error) co_return false;
          sent = written;
        }
        done += sent;
        shared_->bytes_sent += sent;
      }
    }
    co_return true;
  }

  // Sends some of the range, from 0 bytes up.
  asio::awaitable<std::optional<std::uint64_t>> send_file(int fd, std::uint64_t offset, std::uint64_t size) {
    if constexpr (kIsTls<Stream>) {
      if (copy_.empty()) copy_.resize(kCopyBytes);
      const std::size_t wanted = static_cast<std::size_t>(std::min<std::uint64_t>(size, copy_.size()));
      const ssize_t n = co_await run_on(shared_->readers, [this, fd, offset, wanted] {
        return ::pread(fd, copy_.data(), wanted, static_cast<off_t>(offset));
      });
      if (n <= 0) co_return std::nullopt;
      const auto [error, written] =
          co_await asio::async_write(stream_, asio::buffer(copy_.data(), static_cast<std::size_t>(n)), kQuiet);
      if (error) co_return std::nullopt;
      co_return written;
    } else {
      const auto [error] = co_await stream_.async_wait(Tcp::socket::wait_write, kQuiet);
      if (error) co_return std::nullopt;
      // The disk may have to be waited for, so not on a thread that drives sockets; the socket
      // itself never blocks. It stays open meanwhile: only run() closes it.
      const int to = stream_.native_handle();
      const std::size_t wanted = static_cast<std::size_t>(std::min(size, kSendFileBytesMax));
      const auto [n, code] = co_await run_on(shared_->readers, [fd, to, offset, wanted] {
        off_t from = static_cast<off_t>(offset);
        const ssize_t moved = ::sendfile(to, fd, &from, wanted);
        return std::pair(moved, moved < 0 ? errno : 0);
      });
      if (n > 0) co_return static_cast<std::uint64_t>(n);
      if (n < 0 && (code == EAGAIN || code == EINTR)) co_return 0;
      co_return std::nullopt;
    }
  }

  Stream stream_;
  std::shared_ptr<Shared> shared_;
  beast::flat_buffer buffer_;
  std::vector<std::byte> copy_;
};

}  // namespace kvasir::hub
