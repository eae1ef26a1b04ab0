// The gate's first half: does a backbone with its workers say what llama.cpp alone says? Greedy
// tokens, and the whole distribution of the next token at fixed places of a prompt set.
#pragma once

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "cli/demo_run.h"
#include "verify/stand_in.h"

namespace kvasir::cli {

struct GatePlan {
  std::filesystem::path model;
  std::filesystem::path folder;  // for sockets and logs
  std::vector<std::string> prompts;
  int n_tokens = 32;  // to generate after each prompt
  int n_threads = 1;
};

// One prompt a line; at most n_max of them, 0: all. An empty path: the file that ships.
Result<std::vector<std::string>> read_prompts(const std::filesystem::path& path, std::size_t n_max);

struct Answers {
  std::vector<std::vector<int>> tokens;  // greedy, by prompt
  // Log-probabilities of the next token after the whole and after the first half of each prompt.
  std::vector<std::vector<float>> next;
  DemoCounters counters;  // the plugin's
};
Result<Answers> ask_stock(boost::asio::io_context& io, const GatePlan& plan);
struct PluginRun {
  std::string workers;  // as KVASIR_WORKERS wants them
  std::string token;
  bool may_compute_here = false;  // what no worker holds or answers in time
  std::string numerics, wire;     // KVASIR_NUMERICS, KVASIR_WIRE; empty: as they are by default
};
Result<Answers> ask_with_plugin(boost::asio::io_context& io, const GatePlan& plan, const PluginRun& run);

// The layers' recipes and some of the model's own activations, read off one short run.
Result<std::map<wire::LayerId, verify::LayerRows>> record_rows(boost::asio::io_context& io, const GatePlan& plan, const gguf::MoeModel& model);

struct GateFigures {
  std::uint64_t tokens = 0, tokens_same = 0;      // of each prompt up to the first that differs
  std::uint64_t places = 0, argmax_same = 0;
  double cosine_min = 1;   // of the logits less their mean, which log-probabilities keep
  double max_abs = 0;      // of log-probabilities
  bool same_argmax() const { return argmax_same == places; }
  bool identical() const { return tokens_same == tokens && argmax_same == places; }
  bool same_bits() const { return identical() && max_abs == 0; }
};
Result<GateFigures> compare_answers(const Answers& stock, const Answers& other);

}  // namespace kvasir::cli
