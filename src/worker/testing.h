// For tests: a worker in this process on a loopback port, models made on the spot, and a
// client that waits.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "net/frame_io.h"
#include "worker/server.h"

namespace kvasir::worker::testing {

// A folder that goes with the test.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

struct ModelShape {
  std::uint32_t n_layer = 2, n_expert = 8, n_embd = 256, n_ff = 256;
  ggml_type type = GGML_TYPE_Q4_K;
  std::uint64_t seed = 1;
};
void make_model(const std::string& path, const ModelShape& shape);
void make_slice(const std::string& model, const std::string& layers, const std::string& experts,
                const std::string& path);

const wire::NumericsId& our_numerics_id();

class TestServer {
 public:
  // `engine`: in the place of an ordinary one.
  TestServer(const std::vector<std::string>& files, ServerOptions options = {}, std::unique_ptr<ffn::Engine> engine = nullptr);
  ~TestServer();
  std::uint16_t port() const { return server_->port(); }
  const WorkerStats& stats() const { return server_->stats(); }
  // True if every connection ended in time.
  bool stop();
  void begin_stop() { server_->request_stop(); }
  void adopt(std::unique_ptr<net::Stream> stream, std::string peer) { server_->adopt(std::move(stream), std::move(peer)); }

 private:
  std::unique_ptr<Server> server_;
  bool finished_in_time_ = false;
  std::thread thread_;
};

wire::Hello backbone_hello();

class TestClient {
 public:
  explicit TestClient(std::uint16_t port, const net::TlsContext* tls = nullptr, const net::Fingerprint* pin = nullptr);

  void send(ByteSpan bytes);
  template <typename Message>
  void send(wire::FrameType type, std::uint64_t request_id, const Message& message) {
    send(wire::encode_frame(type, request_id, message, true));
  }
  // HELLO both ways and HOLDINGS.
  wire::Holdings greet(const wire::Hello& hello = backbone_hello());
  void bind(std::uint32_t recipe_id, const wire::LayerId& layer_id, const wire::Recipe& recipe);
  void send_exec(std::uint64_t request_id, const wire::ExecHead& head, std::span<const wire::Pair> pairs,
                 std::span<const float> rows, std::span<const float> weights = {});

  // The next frame but PONG and DRAIN unless asked for; nullopt when the worker has closed.
  std::optional<wire::FrameHeader> next();
  ByteSpan payload() const { return reader_.frame().payload; }
  // All frames of one answer, decoded.
  std::vector<float> result(std::uint64_t request_id);
  wire::ErrorMessage error(std::uint64_t request_id);
  bool closed();  // the worker closes without another word
  void shut() { stream_.reset(); }
  net::Stream& stream() { return *stream_; }

 private:
  std::unique_ptr<net::Stream> stream_;
  net::FrameReader reader_;
  net::FrameWriter writer_;
};

// What the engine itself gives for the same layer and pairs (ids of the model).
std::vector<float> direct(const HeldLayer& layer, const wire::Recipe& recipe, std::span<const wire::Pair> pairs,
                          std::span<const float> rows);
SliceStore load(const std::vector<std::string>& files, StoreOptions options = {});
std::vector<float> random_rows(std::size_t n, std::uint32_t seed);

}  // namespace kvasir::worker::testing
