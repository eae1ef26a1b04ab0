// Metrics in Prometheus' text form (version 0.0.4): a family's help and type, then its
// samples. Names follow Prometheus' rules: base units, `_total` for what only grows.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace kvasir {

inline constexpr std::string_view kMetricsContentType = "text/plain; version=0.0.4; charset=utf-8";

class MetricsText {
 public:
  using Labels = std::initializer_list<std::pair<std::string_view, std::string_view>>;

  enum class Type { kCounter, kGauge };
  // Begins a family; its samples follow before the next begins.
  void family(std::string_view name, Type type, std::string_view help);
  void sample(double value, Labels labels = {});

  // A family of one sample.
  void counter(std::string_view name, std::string_view help, double value, Labels labels = {});
  void gauge(std::string_view name, std::string_view help, double value, Labels labels = {});

  // Memory, processor time, open files and start of this process, under the usual names.
  void process();

  const std::string& text() const { return text_; }

 private:
  std::string text_, name_;
};

// Writes beside the file and renames, so that a reader never sees half of it; false: it
// could not be written.
bool replace_file(const std::string& path, std::string_view text);

}  // namespace kvasir
