#include <algorithm>
#include <cmath>
#include <format>
#include <fstream>

#include "cli/bench_worker.h"

namespace kvasir::cli {
namespace {

constexpr double kWidth = 720, kHeight = 420, kLeft = 70, kRight = 20, kTop = 50, kBottom = 60;

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') out += "&amp;";
    else if (c == '<') out += "&lt;";
    else out += c;
  }
  return out;
}

}  // namespace

Status write_plot(const std::string& file, const std::string& title, const std::vector<BenchRow>& rows) {
  if (rows.empty()) return fix_input("There is nothing to plot: name at least one batch.");
  double low = rows[0].tok_s, high = low;
  for (const BenchRow& row : rows) {
    low = std::min({low, row.tok_s, row.naive_tok_s});
    high = std::max({high, row.tok_s, row.naive_tok_s});
  }
  low *= 0.9;
  high *= 1.1;
  const double first = std::log2(rows.front().batch), last = std::max(std::log2(rows.back().batch), first + 1);
  const auto x = [&](double batch) { return kLeft + (std::log2(batch) - first) / (last - first) * (kWidth - kLeft - kRight); };
  const auto y = [&](double speed) { return kHeight - kBottom - std::log(speed / low) / std::log(high / low) * (kHeight - kTop - kBottom); };

  std::string svg = std::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n<text x=\"{2}\" y=\"22\" font-size=\"13\">{3}</text>\n"
      "<text x=\"{2}\" y=\"{4}\">tokens in a batch</text>\n<text x=\"8\" y=\"{5}\">tokens/s</text>\n",
      kWidth, kHeight, kLeft, escaped(title), kHeight - 14, kTop - 8);
  for (const BenchRow& row : rows)
    svg += std::format("<text x=\"{0:.1f}\" y=\"{1}\" text-anchor=\"middle\">{2}</text>\n"
                       "<text x=\"{0:.1f}\" y=\"{3}\" text-anchor=\"middle\" fill=\"#777\">{4:.2f}×</text>\n",
                       x(row.batch), kHeight - kBottom + 16, row.batch, kHeight - kBottom + 31, row.ratio);
  // Lines at 1, 2 and 5 of each decade.
  for (int decade = static_cast<int>(std::floor(std::log10(low))); decade <= static_cast<int>(std::log10(high)); ++decade)
    for (const double digit : {1.0, 2.0, 5.0}) {
      const double speed = digit * std::pow(10, decade);
      if (speed < low || speed > high) continue;
      svg += std::format("<line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" stroke=\"#ddd\"/>\n"
                         "<text x=\"{3}\" y=\"{4:.1f}\" text-anchor=\"end\">{5}</text>\n",
                         kLeft, kWidth - kRight, y(speed), kLeft - 6, y(speed) + 4, speed);
    }
  struct Line {
    const char *name, *color;
    double BenchRow::* speed;
  };
  double legend = kTop + 8;
  for (const Line& line : {Line{"Kvasir", "#1565c0", &BenchRow::tok_s}, Line{"naive ggml", "#c62828", &BenchRow::naive_tok_s}}) {
    std::string points;
    for (const BenchRow& row : rows) points += std::format("{:.1f},{:.1f} ", x(row.batch), y(row.*line.speed));
    svg += std::format("<polyline fill=\"none\" stroke=\"{0}\" stroke-width=\"2\" points=\"{1}\"/>\n"
                       "<text x=\"{2}\" y=\"{3}\" fill=\"{0}\">{4}</text>\n",
                       line.color, points, kLeft + 12, legend, line.name);
    legend += 16;
  }
  svg += "</svg>\n";
  std::ofstream out(file, std::ios::trunc);
  out << svg;
  if (!out.flush()) return fix_input(std::format("Cannot write the plot to '{}'.", file));
  return {};
}

}  // namespace kvasir::cli
