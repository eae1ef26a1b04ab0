// One variant of the demo: llama-server, with or without the plugin, over some prompts.
#pragma once

#include <array>
#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "cli/llama_server.h"

namespace kvasir::cli {

// What the shipped model was trained to go on from.
inline constexpr std::array<const char*, 6> kDemoPrompts{
    "In the beginning",    "And the LORD said unto Moses,", "It is a truth universally acknowledged,",
    "The whale",           "She had been a friend",         "And it came to pass in those days, that"};

struct DemoRunOptions {
  std::vector<std::string> prompts;
  int n_tokens = 64;
  int n_threads = 1;
};

struct DemoCounters {  // the plugin's, at exit
  std::uint64_t pairs_remote = 0;
  std::uint64_t pairs_local = 0;
  std::uint64_t bytes = 0;  // both ways
  std::uint64_t rounds = 0;
};

struct DemoRun {
  std::vector<Completion> completions;  // by prompt
  std::optional<DemoCounters> counters;  // with the plugin

  double decode_per_s() const;          // over all prompts
  std::uint64_t n_evaluated() const;    // tokens that went through the model, prompts included
};

using Environment = std::map<std::string, std::string>;
using TextSink = std::function<void(std::size_t prompt, std::string_view text)>;  // may be empty

Result<DemoRun> run_stock(boost::asio::io_context& io, const std::filesystem::path& model, const std::filesystem::path& folder,
                          const DemoRunOptions& options, bool repack, const Environment& extra);
Result<DemoRun> run_with_plugin(boost::asio::io_context& io, const std::filesystem::path& model, const std::filesystem::path& folder,
                                const std::string& workers, const DemoRunOptions& options, const Environment& extra,
                                const TextSink& on_text);

// What the plugin wrote as it ended.
Result<DemoCounters> read_counters(const std::filesystem::path& stats_file);

// How many tokens agree before the first that does not.
std::size_t same_tokens(const std::vector<int>& a, const std::vector<int>& b);

// The environment that brings the plugin into llama.cpp.
Result<Environment> plugin_environment(const std::string& workers, const std::filesystem::path& stats_file);

}  // namespace kvasir::cli
