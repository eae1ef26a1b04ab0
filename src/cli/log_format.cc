#include "cli/log_format.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/stdout_color_sinks.h"
#include "spdlog/spdlog.h"

namespace kvasir::cli {
namespace {

// The message as a JSON text, quotes included.
class JsonText final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&, spdlog::memory_buf_t& out) override {
    const std::string text = nlohmann::json(std::string(message.payload.data(), message.payload.size()))
                                 .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<JsonText>(); }
};

}  // namespace

void add_log_options(CLI::App& command, LogOptions& options) {
  command.add_option("--log", options.format, "text, or json: one object a line")
      ->check(CLI::IsMember({"text", "json"}));
  command.add_flag("-q,--quiet", options.quiet, "only what is wrong");
}

void start_log(const std::string& name, const LogOptions& options, const std::string& pattern) {
  auto logger = spdlog::get(name);
  if (!logger) logger = spdlog::stderr_color_mt(name);
  spdlog::set_default_logger(logger);
  if (options.is_json()) {
    auto formatter = std::make_unique<spdlog::pattern_formatter>();
    formatter->add_flag<JsonText>('*').set_pattern(
        R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l","program":"%n","message":%*})");
    spdlog::set_formatter(std::move(formatter));
  } else {
    spdlog::set_pattern(pattern);
  }
  spdlog::set_level(options.quiet ? spdlog::level::warn : options.verbose ? spdlog::level::debug : spdlog::level::info);
}

}  // namespace kvasir::cli
