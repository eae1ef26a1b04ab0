// A stock llama-server as a child process, listening on a unix socket in a folder of ours (no
// port that could be taken), and the little of its HTTP API that Kvasir's commands use.
#pragma once

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "cli/child_process.h"

namespace kvasir::cli {

struct LlamaServerOptions {
  std::filesystem::path model;
  std::filesystem::path folder;  // for the socket and the log; short, a socket's path has 107 bytes
  std::string name;              // of both
  std::map<std::string, std::string> environment;
  int n_threads = 1;
  bool repack = false;  // llama.cpp's own default is true
};

struct Completion {
  std::vector<int> tokens;
  int n_prompt = 0;            // tokens of the prompt
  std::uint64_t n_evaluated = 0;  // tokens that went through the model for it
  double decode_per_s = 0.0;   // tokens a second, as the server measured it
  std::vector<double> gap_ms;  // before each token, as seen by the client
};

class LlamaServer {
 public:
  // Returns when the server answers.
  static Result<std::unique_ptr<LlamaServer>> start(boost::asio::io_context& io, const LlamaServerOptions& options);

  // Greedy decoding of exactly n_tokens; `on_text` gets the text as it comes.
  Result<Completion> complete(const std::string& prompt, int n_tokens, const std::function<void(std::string_view)>& on_text);
  // The log-probability of every token of the vocabulary after `prompt`, by token id.
  Result<std::vector<float>> next_token(const std::string& prompt);
  // Ends it in order, so that the plugin writes its last counters.
  void stop();
  pid_t pid() { return child_.pid(); }

 private:
  explicit LlamaServer(boost::asio::io_context& io) : child_(io) {}
  Status wait_until_ready();
  Result<Completion> stream(const std::string& prompt, int n_tokens, const std::function<void(std::string_view)>& on_text);
  Result<std::vector<int>> tokens_of(const std::string& prompt, int n_tokens);

  ChildProcess child_;
  std::string socket_;
};

}  // namespace kvasir::cli
