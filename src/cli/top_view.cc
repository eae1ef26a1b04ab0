#include "cli/top_view.h"

#include <algorithm>
#include <cmath>
#include <format>
#include <vector>

#include "cli/console.h"

namespace kvasir::cli {
namespace {

using namespace ftxui;

constexpr int kGutter = 8;  // "4096-98 "
constexpr int kWorkersShownMax = 12;
constexpr int kChartRows = 4;

struct Look {
  const char* glyph;
  Color colour;
};
// Readable without its colour, too.
Look look_of(Cover cover) {
  switch (cover) {
    case Cover::kFull:
      return {"█", Color::Green};
    case Cover::kPart:
      return {"▄", Color::Yellow};
    case Cover::kScarce:
      return {"▂", Color::RGB(230, 120, 40)};
    case Cover::kNone:
      break;
  }
  return {"×", Color::Red};
}

std::string digits(double value) {
  if (value == 0) return "0";
  if (value >= 10'000) return std::format("{:.1f}k", value / 1000);
  return value >= 100 ? std::format("{:.0f}", value) : std::format("{:.3g}", value);
}

std::string per_second(double bytes) { return format_bytes(static_cast<std::uint64_t>(bytes)) + "/s"; }

Element figure(const std::string& name, const std::string& value) {
  return hbox({text(name + " ") | dim, text(value) | bold, text("   ")});
}

// Where cells or layers are more than fit, one character stands for several: for the worst.
Element draw_map(const TopState& state, int columns, int rows) {
  const int n_layer = static_cast<int>(state.cells.size());
  std::size_t most = 0;
  for (const auto& layer : state.cells) most = std::max(most, layer.size());
  const int width = std::max(8, columns - kGutter);
  const int cells_each = std::max(1, (static_cast<int>(most) + width - 1) / width);
  const int layers_each = std::max(1, (n_layer + std::max(1, rows) - 1) / std::max(1, rows));
  Elements lines;
  for (int first = 0; first < n_layer; first += layers_each) {
    const int end = std::min(n_layer, first + layers_each);
    const std::string label =
        end - first == 1 ? std::format("{:>6}  ", first) : std::format("{:>7} ", std::format("{}-{}", first, end - 1));
    Elements line = {text(label) | dim};
    std::string glyphs;
    Color colour = Color::Default;
    const auto flush = [&] {
      if (!glyphs.empty()) line.push_back(text(glyphs) | color(colour));
      glyphs.clear();
    };
    for (std::size_t e = 0; e < most; e += static_cast<std::size_t>(cells_each)) {
      Cover worst = Cover::kFull;
      bool any = false;
      for (int l = first; l < end; ++l) {
        const auto& layer = state.cells[static_cast<std::size_t>(l)];
        for (std::size_t i = e; i < std::min(layer.size(), e + static_cast<std::size_t>(cells_each)); ++i) {
          worst = std::min(worst, layer[i]);
          any = true;
        }
      }
      const Look look = any ? look_of(worst) : Look{" ", Color::Default};
      if (look.colour != colour) flush();
      colour = look.colour;
      glyphs += look.glyph;
    }
    flush();
    lines.push_back(hbox(std::move(line)));
  }
  std::string scale;
  if (cells_each > 1) scale += std::format("  one column is {} experts, the worst of them", cells_each);
  Elements legend = {text(std::string(kGutter, ' '))};
  for (const auto& [cover, what] : {std::pair(Cover::kFull, "at target "), std::pair(Cover::kPart, "half or more "),
                                    std::pair(Cover::kScarce, "less "), std::pair(Cover::kNone, "nobody ")}) {
    const Look look = look_of(cover);
    legend.push_back(text(look.glyph) | color(look.colour));
    legend.push_back(text(std::string(" ") + what) | dim);
  }
  legend.push_back(text(scale) | dim);
  lines.push_back(hbox(std::move(legend)));
  return vbox(std::move(lines));
}

Element draw_workers(const TopState& state, int rows) {
  std::vector<const TopWorker*> sorted;
  for (const TopWorker& worker : state.workers) sorted.push_back(&worker);
  // What needs attention first.
  std::ranges::sort(sorted, {}, [](const TopWorker* w) { return std::pair(w->state == "serving", w->id); });
  const std::size_t shown = std::min(sorted.size(), static_cast<std::size_t>(std::clamp(rows, 1, kWorkersShownMax)));
  std::vector<Elements> columns(7);
  const auto row = [&columns](std::initializer_list<std::string> cells, Decorator style) {
    std::size_t i = 0;
    for (const std::string& cell : cells) columns[i++].push_back(text(cell + "  ") | style);
  };
  row({"worker", "state", "experts", "memory", "speed", "latency", "path"}, dim);
  for (std::size_t i = 0; i < shown; ++i) {
    const TopWorker& w = *sorted[i];
    const bool lost = w.state == "lost" || w.state == "late" || w.state == "silent";
    row({w.id, w.state == "silent" ? "not answering" : w.state, std::to_string(w.experts),
         w.memory_bytes ? format_bytes(w.memory_bytes) : "-",
         w.speed_rows_per_s > 0 ? digits(w.speed_rows_per_s) + " rows/s" : "-",
         w.latency_us ? std::format("{:.1f} ms", *w.latency_us / 1000) : "-",
         w.url.empty() ? w.path : w.path + " " + w.url},
        lost ? Decorator(color(Color::Red)) : Decorator(nothing));
  }
  Elements boxes;
  for (Elements& column : columns) boxes.push_back(vbox(std::move(column)));
  Elements lines = {hbox(std::move(boxes))};
  if (state.workers_total > shown)
    lines.push_back(text(std::format("… and {} more", state.workers_total - shown)) | dim);
  return vbox(std::move(lines));
}

Element draw_rounds(const TopState& state) {
  const std::deque<double>& samples = state.rounds;
  return graph([&samples](int width, int height) {
           // Two points a character.
           std::vector<int> out(static_cast<std::size_t>(width), 0);
           const double most = std::max(1e-9, samples.empty() ? 0 : std::ranges::max(samples));
           for (int x = 0; x < width; ++x) {
             const auto back = static_cast<std::size_t>(width - 1 - x);
             if (back < samples.size())
               out[static_cast<std::size_t>(x)] =
                   static_cast<int>(std::lround(samples[samples.size() - 1 - back] / most * height));
           }
           return out;
         }) |
         color(Color::Green) | size(HEIGHT, EQUAL, kChartRows);
}

}  // namespace

Element draw_top(const TopState& state, const std::string& hub, const std::string& link, int columns, int rows) {
  Elements page;
  page.push_back(hbox({text("kvasir top ") | bold, text(hub + "  ") | dim,
                       text(state.model.empty() ? "no model" : state.model) | bold, filler(), text(link) | dim}));
  if (!state.complete()) {
    page.push_back(text(link));
    return vbox(std::move(page));
  }
  const TopState::Sum sum = state.sum();
  const double share = sum.experts > 0 ? 100.0 * static_cast<double>(sum.full) / static_cast<double>(sum.experts) : 0;
  page.push_back(
      hflow({figure("experts at target",
                    sum.experts ? std::format("{:.{}f} %", share, share > 99.9 && share < 100 ? 2 : 1) : "-"),
             figure("held by nobody", std::to_string(sum.none)),
             figure("replicas missing", std::to_string(state.replicas_missing)),
             figure("workers", std::to_string(state.workers_total)),
             figure("backbones", std::to_string(state.traffic.backbones))}));
  const TopTraffic& t = state.traffic;
  page.push_back(
      hflow({figure("tokens/s", t.tokens ? digits(*t.tokens) : "-"), figure("rounds/s", digits(t.rounds)),
             figure("round", digits(t.round_ms) + " ms"), figure("out", per_second(t.sent)),
             figure("in", per_second(t.received)), figure("local", std::format("{:.1f} %", 100 * t.local_share)),
             figure("hedges/s", digits(t.hedges))}));
  if (state.slowest_layer)
    page.push_back(text(std::format("slowest layer {:.0f}: {:.1f} ms on average, 99 of 100 rounds below {:.1f} ms",
                                    (*state.slowest_layer)[0], (*state.slowest_layer)[1] / 1000,
                                    (*state.slowest_layer)[2] / 1000)) |
                   dim);
  page.push_back(separator());
  const bool moves = std::ranges::any_of(state.rounds, [](double r) { return r > 0; });
  const int worker_rows = std::min<int>(kWorkersShownMax, static_cast<int>(state.workers.size())) + 2;
  const int map_rows = std::max(4, rows - worker_rows - (moves ? kChartRows + 2 : 1) - 7);
  if (state.cells.empty())
    page.push_back(paragraph("This hub has no model: put a GGUF file into its folder of models."));
  else
    page.push_back(draw_map(state, columns, map_rows));
  page.push_back(separator());
  if (state.workers.empty())
    page.push_back(paragraph(std::format(
        "No worker yet. On a machine with memory to spare: kvasir join {} --token-file TOKEN --memory 4G", hub)));
  else
    page.push_back(draw_workers(state, std::max(3, rows - map_rows - 12)));
  page.push_back(separator());
  if (moves) {
    page.push_back(text("rounds a second, the last minutes") | dim);
    page.push_back(draw_rounds(state));
  } else {
    page.push_back(
        paragraph(std::format("No backbone reports. To chat: kvasir run MODEL --hub {} --token-file TOKEN", hub)) |
        dim);
  }
  return vbox(std::move(page));
}

}  // namespace kvasir::cli
