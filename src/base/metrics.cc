#include "base/metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <format>
#include <fstream>
#include <sstream>

#include "base/check.h"

namespace kvasir {
namespace {

bool is_name(std::string_view name) {
  return !name.empty() && !(name[0] >= '0' && name[0] <= '9') && std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == ':';
  });
}

void append_escaped(std::string& out, std::string_view text, bool quotes) {
  for (const char c : text) {
    if (c == '\\')
      out += "\\\\";
    else if (c == '\n')
      out += "\\n";
    else if (c == '"' && quotes)
      out += "\\\"";
    else
      out += c;
  }
}

// Field `index` of /proc/self/stat after the name, which may hold spaces; 0 where it is missing.
double stat_field(int index) {
  std::ifstream in("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(in)), {});
  const std::size_t end = text.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(text.substr(end + 1));
  std::string field;
  for (int i = 0; i <= index; ++i)
    if (!(fields >> field)) return 0;
  return std::strtod(field.c_str(), nullptr);
}

double boot_time() {
  std::ifstream in("/proc/stat");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("btime ")) return std::strtod(line.c_str() + 6, nullptr);
  return 0;
}

}  // namespace

void MetricsText::family(std::string_view name, Type type, std::string_view help) {
  KVASIR_CHECK(is_name(name));
  name_ = name;
  text_.append("# HELP ").append(name).append(" ");
  append_escaped(text_, help, false);
  text_.append("\n# TYPE ").append(name).append(type == Type::kCounter ? " counter\n" : " gauge\n");
}

void MetricsText::sample(double value, Labels labels) {
  text_ += name_;
  char before = '{';
  for (const auto& [name, text] : labels) {
    KVASIR_CHECK(is_name(name));
    text_ += std::exchange(before, ',');
    text_.append(name).append("=\"");
    append_escaped(text_, text, true);
    text_ += '"';
  }
  if (before == ',') text_ += '}';
  if (std::isnan(value))
    text_ += " NaN\n";
  else if (std::isinf(value))
    text_ += value > 0 ? " +Inf\n" : " -Inf\n";
  else
    text_ += std::format(" {}\n", value);
}

void MetricsText::counter(std::string_view name, std::string_view help, double value, Labels labels) {
  KVASIR_CHECK(name.ends_with("_total"));
  family(name, Type::kCounter, help);
  sample(value, labels);
}

void MetricsText::gauge(std::string_view name, std::string_view help, double value, Labels labels) {
  family(name, Type::kGauge, help);
  sample(value, labels);
}

void MetricsText::process() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  counter("process_cpu_seconds_total", "Processor time used, by user and system.",
          seconds(usage.ru_utime) + seconds(usage.ru_stime));
  // Fields of proc(5), counted from the state: 21 is rss, 19 is starttime.
  gauge("process_resident_memory_bytes", "Resident memory.",
        stat_field(21) * static_cast<double>(::sysconf(_SC_PAGESIZE)));
  gauge("process_start_time_seconds", "When the process started, since 1970.",
        boot_time() + stat_field(19) / static_cast<double>(::sysconf(_SC_CLK_TCK)));
  std::error_code ignored;
  double n_open = 0;
  for (std::filesystem::directory_iterator it("/proc/self/fd", ignored), end; !ignored && it != end;
       it.increment(ignored))
    ++n_open;
  gauge("process_open_fds", "Open file descriptors.", n_open);
}

bool replace_file(const std::string& path, std::string_view text) {
  const std::string aside = path + ".new";
  {
    std::ofstream out(aside, std::ios::trunc | std::ios::binary);
    out << text;
    if (!out.flush()) return false;
  }
  return std::rename(aside.c_str(), path.c_str()) == 0;
}

}  // namespace kvasir
