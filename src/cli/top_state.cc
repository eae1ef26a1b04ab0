#include "cli/top_state.h"

#include <algorithm>

namespace kvasir::cli {
namespace {

using nlohmann::json;

constexpr std::size_t kLayersMax = 4096, kExpertsMax = 65'536;

Cover cover_of(std::uint64_t held, std::uint64_t target) {
  if (held == 0 && target > 0) return Cover::kNone;
  if (held >= target) return Cover::kFull;
  return held * 2 >= target ? Cover::kPart : Cover::kScarce;
}

double number(const json& data, const char* name) {
  const auto found = data.find(name);
  return found != data.end() && found->is_number() ? found->get<double>() : 0;
}

std::string text(const json& data, const char* name) {
  const auto found = data.find(name);
  if (found == data.end() || !found->is_string()) return {};
  // Names come from strangers: nothing in them may steer the terminal.
  std::string out = found->get<std::string>();
  std::erase_if(out, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  return out;
}

}  // namespace

bool TopState::feed(const char* bytes, std::size_t n) {
  text_.append(bytes, n);
  for (std::size_t end; (end = text_.find("\n\n")) != std::string::npos;) {
    const std::string_view block = std::string_view(text_).substr(0, end);
    constexpr std::string_view kEvent = "event: ", kData = "\ndata: ";
    const std::size_t data = block.find(kData);
    if (block.starts_with(kEvent) && data != std::string_view::npos) {
      const json value = json::parse(block.substr(data + kData.size()), nullptr, false);
      if (!value.is_object()) return false;
      apply(block.substr(kEvent.size(), data - kEvent.size()), value);
    }
    text_.erase(0, end + 2);
  }
  return text_.size() <= kEventBytesMax;
}

void TopState::hello(const json& data) {
  const std::string before = model;
  hub_version = text(data, "version");
  model = text(data, "model");
  known = data.value("known", false);
  models.clear();
  if (const auto list = data.find("models"); list != data.end() && list->is_array())
    for (const json& each : *list)
      if (each.is_object()) models.push_back(text(each, "name"));
  std::vector<std::size_t> n_expert;
  if (const auto list = data.find("n_expert"); list != data.end() && list->is_array() && list->size() <= kLayersMax)
    for (const json& n : *list)
      n_expert.push_back(n.is_number_unsigned() ? std::min(n.get<std::size_t>(), kExpertsMax) : 0);
  if (model == before && std::ranges::equal(n_expert, cells, {}, {}, &std::vector<Cover>::size)) return;
  cells.clear();
  for (const std::size_t n : n_expert) cells.emplace_back(n, Cover::kNone);
  missing_.assign(cells.size(), 0);
  replicas_missing = 0;
  rounds.clear();
  workers.clear();
  slowest_layer.reset();
}

void TopState::apply(std::string_view event, const json& data) {
  const auto list = [&data](const char* name) -> const json& {
    static const json kEmpty = json::array();
    const auto found = data.find(name);
    return found != data.end() && found->is_array() ? *found : kEmpty;
  };
  if (event == "hello") {
    hello(data);
  } else if (event == "coverage") {
    for (const json& layer : list("layers")) {
      if (!layer.is_array() || layer.size() != 2 || !layer[0].is_number_unsigned() || !layer[1].is_array()) continue;
      const auto l = layer[0].get<std::size_t>();
      if (l >= cells.size()) continue;
      missing_[l] = 0;
      for (const json& run : layer[1]) {
        if (!run.is_array() || run.size() < 5 ||
            !std::ranges::all_of(run.begin(), run.begin() + 5, [](const json& n) { return n.is_number_unsigned(); }))
          continue;
        const auto held = run[2].get<std::uint64_t>(), target = run[4].get<std::uint64_t>();
        const std::size_t end = std::min(run[1].get<std::size_t>(), cells[l].size());
        for (auto e = run[0].get<std::size_t>(); e < end; ++e) {
          cells[l][e] = cover_of(held, target);
          missing_[l] += target > held ? target - held : 0;
        }
      }
    }
    replicas_missing = 0;
    for (const std::uint64_t n : missing_) replicas_missing += n;
  } else if (event == "workers") {
    seen_workers_ = true;
    workers_total = static_cast<std::uint64_t>(number(data, "total"));
    workers.clear();
    for (const json& each : list("workers")) {
      if (!each.is_object()) continue;
      TopWorker worker{.id = text(each, "id"),
                       .state = text(each, "state"),
                       .device = text(each, "device"),
                       .path = text(each, "path"),
                       .url = text(each, "url"),
                       .memory_bytes = static_cast<std::uint64_t>(number(each, "memory")),
                       .experts = static_cast<std::uint64_t>(number(each, "experts")),
                       .speed_rows_per_s = number(each, "speed"),
                       .latency_us = {}};
      if (each.contains("latency_us")) worker.latency_us = number(each, "latency_us");
      workers.push_back(std::move(worker));
    }
  } else if (event == "traffic") {
    traffic = {.rounds = number(data, "rounds"),
               .local_share = number(data, "local"),
               .sent = number(data, "sent"),
               .received = number(data, "received"),
               .hedges = number(data, "hedges"),
               .round_ms = number(data, "round_ms"),
               .tokens = data.contains("tokens") ? std::optional(number(data, "tokens")) : std::nullopt,
               .backbones = static_cast<std::uint64_t>(number(data, "backbones"))};
  } else if (event == "samples") {
    for (const json& sample : list("samples"))
      if (sample.is_object()) rounds.push_back(number(sample, "rounds"));
    while (rounds.size() > kSamplesMax) rounds.pop_front();
  } else if (event == "latency") {
    slowest_layer.reset();
    for (const json& layer : list("layers")) {
      if (!layer.is_array() || layer.size() != 4 ||
          !std::ranges::all_of(layer, [](const json& n) { return n.is_number(); }))
        continue;
      if (!slowest_layer || layer[2].get<double>() > (*slowest_layer)[1])
        slowest_layer = {layer[0].get<double>(), layer[2].get<double>(), layer[3].get<double>()};
    }
  }
}

TopState::Sum TopState::sum() const {
  Sum out;
  for (const auto& layer : cells) {
    out.experts += layer.size();
    out.full += static_cast<std::uint64_t>(std::ranges::count(layer, Cover::kFull));
    out.none += static_cast<std::uint64_t>(std::ranges::count(layer, Cover::kNone));
  }
  return out;
}

}  // namespace kvasir::cli
