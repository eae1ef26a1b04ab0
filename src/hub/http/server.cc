#include "hub/http/server.h"

#include <signal.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>

#include "hub/http/connection.h"

namespace kvasir::hub {
namespace {

constexpr unsigned kLoopsMin = 2;
constexpr unsigned kLoopsMax = 8;
constexpr int kBacklog = 4096;
constexpr auto kWatchInterval = std::chrono::milliseconds(250);
constexpr auto kAcceptPause = std::chrono::milliseconds(50);  // when descriptors run out

// Sockets' threads, each with a loop of its own: connections that share one need no lock, and what
// happens on one wakes no other.
class Loops {
 public:
  Loops() {
    const unsigned n = std::clamp(std::thread::hardware_concurrency(), kLoopsMin, kLoopsMax);
    for (unsigned i = 0; i < n; ++i) loops_.push_back(std::make_unique<Loop>());
  }
  // What one of them still holds may be another's: no loop goes before all have let go.
  ~Loops() {
    stop();
    for (const auto& loop : loops_) loop->shutdown();
  }

  void start() {
    for (const auto& loop : loops_)
      threads_.emplace_back([&loop = *loop] {
        // splice() has no flag against it, and a peer may be gone at any moment.
        sigset_t pipe;
        sigemptyset(&pipe);
        sigaddset(&pipe, SIGPIPE);
        pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
        const auto stay = asio::make_work_guard(loop);  // without connections, too
        loop.run();
      });
  }
  bool running() const { return !threads_.empty(); }
  void stop() {
    for (const auto& loop : loops_) loop->stop();
    threads_.clear();  // joins
  }

  asio::io_context& first() { return *loops_.front(); }
  asio::io_context& next() { return *loops_[next_++ % loops_.size()]; }

 private:
  struct Loop : asio::io_context {
    Loop() : asio::io_context(1) {}
    using asio::io_context::shutdown;
  };
  std::vector<std::unique_ptr<Loop>> loops_;
  std::size_t next_ = 0;
  std::vector<std::jthread> threads_;
};

bool is_loopback(const Tcp::endpoint& endpoint) { return endpoint.address().is_loopback(); }

class HttpServer final : public Server {
 public:
  HttpServer(ServerOptions options, const Router& router, Authenticator& authenticator, RelayHost& relay_host,
             std::function<void(const std::string&)> log)
      : shared_(std::make_shared<Shared>(std::move(options), router, authenticator, std::move(log))),
        relay_host_(relay_host),
        acceptor_(loops_.first()) {}

  ~HttpServer() override { stop(Nanos::zero()); }

  Status open() {
    const ServerOptions& options = shared_->options;
    KVASIR_ASSIGN(net::Listener listener, net::listen_on(options.listen));
    sockaddr_storage bound{};
    socklen_t length = sizeof bound;
    if (::getsockname(listener.fd.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0)
      return fatal(std::format("cannot listen: {}.", errno_text(errno)));
    boost::system::error_code error;
    acceptor_.assign(bound.ss_family == AF_INET6 ? Tcp::v6() : Tcp::v4(), ::dup(listener.fd.get()), error);
    // A longer queue than workers need: many nodes come at once after a hub's restart.
    if (!error) acceptor_.listen(kBacklog, error);
    if (error) return fatal(std::format("cannot listen: {}.", error.message()));
    if (!options.certificate_file.empty()) {
      KVASIR_TRY(load_certificate());
    } else if (!is_loopback(acceptor_.local_endpoint())) {
      return fix_input(
          std::format("plain HTTP is for loopback only, and {} is not; give --cert and --key, or listen on 127.0.0.1 "
                      "behind a proxy.",
                      net::format_host_port(options.listen)));
    }
    return {};
  }

  void start() {
    shared_->relay = Relay::create(shared_->options.relay, relay_host_, loops_.first().get_executor(), shared_->handlers,
                                   shared_->log);
    asio::co_spawn(loops_.first(), accept(), asio::detached);
    asio::co_spawn(loops_.first(), watch(), asio::detached);
    loops_.start();
  }

  std::uint16_t port() const override { return acceptor_.local_endpoint().port(); }

  ServerStats stats() const override {
    return {shared_->connection_count(), shared_->downloads, shared_->requests, shared_->bytes_sent,
            shared_->relay->stats()};
  }

  void stop(Nanos patience) override {
    if (!loops_.running()) return;
    shared_->draining = true;
    asio::post(loops_.first(), [this] {
      boost::system::error_code ignored;
      acceptor_.close(ignored);
    });
    const TimePoint give_up = monotonic_now() + patience;
    while (shared_->connection_count() > 0) {
      const bool late = monotonic_now() >= give_up;
      shared_->watch(true, late);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (late && monotonic_now() >= give_up + kLastWait) break;
    }
    shared_->relay->stop();
    loops_.stop();
    shared_->handlers.join();
    shared_->readers.join();
    shared_->relay->forget_sockets();
  }

 private:
  static constexpr Nanos kLastWait = std::chrono::seconds(2);

  Status load_certificate() {
    const ServerOptions& options = shared_->options;
    tls_.emplace(asio::ssl::context::tls_server);
    boost::system::error_code error;
    tls_->set_options(
        asio::ssl::context::default_workarounds | asio::ssl::context::no_tlsv1 | asio::ssl::context::no_tlsv1_1, error);
    // A relayed connection idles for hours: its record buffers are given back meanwhile.
    SSL_CTX_set_mode(tls_->native_handle(), SSL_MODE_RELEASE_BUFFERS);
    tls_->use_certificate_chain_file(options.certificate_file, error);
    if (error)
      return fix_input(
          std::format("the certificate '{}' cannot be used: {}.", options.certificate_file, error.message()));
    tls_->use_private_key_file(options.key_file, asio::ssl::context::pem, error);
    if (error)
      return fix_input(
          std::format("the key '{}' cannot be used with that certificate: {}.", options.key_file, error.message()));
    return {};
  }

  asio::awaitable<void> accept() {
    while (acceptor_.is_open()) {
      Tcp::socket socket(loops_.next());
      Tcp::endpoint peer;
      const auto [error] = co_await acceptor_.async_accept(socket, peer, kQuiet);
      if (error) {
        if (!acceptor_.is_open()) co_return;
        asio::steady_timer pause(loops_.first(), kAcceptPause);
        co_await pause.async_wait(kQuiet);
        continue;
      }
      boost::system::error_code ignored;
      socket.set_option(Tcp::no_delay(true), ignored);
      socket.native_non_blocking(true, ignored);
      net::do_not_pace_loopback(socket.native_handle());
      const std::string address = peer.address().to_string();
      if (tls_) {
        launch(std::make_shared<Connection<asio::ssl::stream<Tcp::socket>>>(
                   asio::ssl::stream<Tcp::socket>(std::move(socket), *tls_), shared_),
               address);
      } else {
        launch(std::make_shared<Connection<Tcp::socket>>(std::move(socket), shared_), address);
      }
    }
  }

  template <typename C>
  void launch(std::shared_ptr<C> connection, std::string address) {
    connection->address = std::move(address);
    connection->set_idle(true);  // until its first byte it may have to make room
    const bool welcome = shared_->enter(connection);
    const auto on_end = [connection, shared = shared_](const std::exception_ptr& thrown) {
      shared->leave(*connection);
      if (!thrown) return;
      try {
        std::rethrow_exception(thrown);
      } catch (const std::exception& error) {
        shared->log(std::format("a connection ended by an error: {}", error.what()));
      }
    };
    asio::co_spawn(connection->executor(), welcome ? connection->run() : connection->refuse(), on_end);
  }

  asio::awaitable<void> watch() {
    asio::steady_timer timer(loops_.first());
    while (true) {
      timer.expires_after(kWatchInterval);
      if (const auto [error] = co_await timer.async_wait(kQuiet); error) co_return;
      shared_->watch(false, false);
    }
  }

  std::shared_ptr<Shared> shared_;
  RelayHost& relay_host_;
  std::optional<asio::ssl::context> tls_;
  Loops loops_;
  Tcp::acceptor acceptor_;  // of the first loop
};

}  // namespace

Result<std::unique_ptr<Server>> Server::start(ServerOptions options, const Router& router, Authenticator& authenticator,
                                              RelayHost& relay_host, std::function<void(const std::string&)> log) {
  auto server = std::make_unique<HttpServer>(std::move(options), router, authenticator, relay_host, std::move(log));
  KVASIR_TRY(server->open());
  server->start();
  return server;
}

}  // namespace kvasir::hub
