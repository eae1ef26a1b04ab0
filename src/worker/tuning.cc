#include "worker/tuning.h"

#include <cstdio>
#include <filesystem>
#include <format>
#include <fstream>
#include <sstream>

#include "ffn/device.h"
#include "ggml.h"

namespace kvasir::worker {
namespace {

constexpr std::size_t kCacheLinesMax = 256;  // the oldest go

// A recipe that uses every tensor held. Its activation may be another than the model's, which
// is a small part of the time.
wire::Recipe timing_recipe(const HeldLayer& layer) {
  const ffn::ExpertTensors& t = layer.tensors;
  wire::Recipe recipe;
  recipe.group = layer.group;
  recipe.gate_layout = t.gate_up ? wire::GateLayout::kMerged : t.gate ? wire::GateLayout::kSplit : wire::GateLayout::kNone;
  if (recipe.gate_layout == wire::GateLayout::kNone) recipe.activation = wire::Activation::kSilu;
  recipe.gate_bias = t.gate_bias != nullptr;
  recipe.up_bias = (t.gate_up ? t.gate_up_bias : t.up_bias) != nullptr;
  recipe.down_bias = t.down_bias != nullptr;
  recipe.n_embd = layer.n_embd;
  recipe.n_ff = static_cast<std::uint32_t>(t.down->ne[0]);
  recipe.n_expert = layer.n_expert;
  return recipe;
}

// All that the choice depends on, in one line.
std::string cache_key(const HeldLayer& layer, ggml_backend_dev_t device, const TuneOptions& options) {
  std::string key = std::format("2|{}|ggml {}|{} threads{}|{}x{}x{}", ggml_backend_dev_description(device), ggml_version(),
                                options.n_threads, options.fast ? "" : ", exact alone", layer.n_embd, layer.tensors.down->ne[0], layer.tensors.n_local);
  for (const ffn::ExpertTensors& copy : layer.copies) {
    key += '|';
    for (const ggml_tensor* t : {copy.gate, copy.up, copy.gate_up, copy.down})
      if (t) key += std::format(" {} {}", ggml_type_name(t->type), ggml_backend_buft_name(ggml_backend_buffer_get_type(t->buffer)));
  }
  for (char& c : key)
    if (c == '\t' || c == '\n') c = ' ';
  return key;
}

std::string to_text(const ffn::Tuning& tuning) {
  std::string text;
  for (std::uint32_t c = 0; c < ffn::kRowClasses; ++c) {
    const ffn::FastPlan& plan = tuning.plans[c];
    text += std::format("{} {} {} {} {:.1f} {:.1f} ", plan.copy, plan.per_expert ? 1 : 0, plan.rows_max, plan.n_threads,
                        tuning.fast[c], tuning.exact[c]);
  }
  return text;
}

// nullopt for a line that is not whole: the file is anyone's to edit.
std::optional<ffn::Tuning> from_text(const std::string& text, std::size_t n_copies) {
  std::istringstream in(text);
  ffn::Tuning tuning;
  for (std::uint32_t c = 0; c < ffn::kRowClasses; ++c) {
    ffn::FastPlan plan;
    int per_expert = 0;
    if (!(in >> plan.copy >> per_expert >> plan.rows_max >> plan.n_threads >> tuning.fast[c] >> tuning.exact[c])) return std::nullopt;
    if (plan.copy >= n_copies || plan.n_threads < 0 || plan.n_threads > ffn::kThreadsMax) return std::nullopt;
    plan.per_expert = per_expert != 0;
    tuning.plans[c] = plan;
  }
  return tuning;
}

std::vector<std::string> read_lines(const std::string& file) {
  std::vector<std::string> lines;
  std::ifstream in(file);
  for (std::string line; lines.size() < kCacheLinesMax && std::getline(in, line);) lines.push_back(std::move(line));
  return lines;
}

// Written aside and renamed: another worker may be reading.
void remember(const std::string& file, const std::string& key, const ffn::Tuning& tuning) {
  std::vector<std::string> lines = read_lines(file);
  std::erase_if(lines, [&](const std::string& line) { return line.starts_with(key + '\t'); });
  if (lines.size() >= kCacheLinesMax) lines.erase(lines.begin());
  lines.push_back(key + '\t' + to_text(tuning));
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(file).parent_path(), ignored);
  const std::string aside = file + ".new";
  {
    std::ofstream out(aside, std::ios::trunc);
    for (const std::string& line : lines) out << line << '\n';
    if (!out.flush()) return;
  }
  std::rename(aside.c_str(), file.c_str());
}

// Classes with the same plan share a line.
std::vector<std::string> describe(const ffn::Tuning& tuning, const HeldLayer& layer, bool fast) {
  std::vector<std::string> lines;
  if (!fast) {
    std::string line = "class exact, 1 2 4 … rows an expert:";
    for (const double speed : tuning.exact) line += std::format(" {:.0f}", speed);
    lines.push_back(line + " pairs/s");
    return lines;
  }
  for (std::uint32_t c = 0; c < ffn::kRowClasses;) {
    std::uint32_t end = c + 1;
    while (end < ffn::kRowClasses && tuning.plans[end] == tuning.plans[c]) ++end;
    std::string line = std::format("{}{} rows an expert: {}, ", 1u << c,
                                   end == ffn::kRowClasses ? " and more" : end > c + 1 ? std::format(" to {}", (1u << end) - 1) : "",
                                   ffn::describe(tuning.plans[c], layer.copies));
    for (std::uint32_t i = c; i < end; ++i) {
      line += std::format("{}{:.0f}", i > c ? " " : "", tuning.fast[i]);
      if (tuning.exact[i] > 0) line += std::format(" (exact {:.0f})", tuning.exact[i]);
    }
    lines.push_back(line + " pairs/s");
    c = end;
  }
  return lines;
}

}  // namespace

Result<std::optional<WorkerTuning>> tune_store(const SliceStore& store, ffn::Engine& engine, const TuneOptions& options) {
  if (store.layers().empty()) return std::nullopt;
  const HeldLayer& layer = *store.layers().front();
  const wire::Recipe recipe = timing_recipe(layer);
  if (!ffn::Engine::check(recipe, layer.tensors)) return std::nullopt;  // a layer that no recipe fits
  if (!options.fast && !layer.plain) return std::nullopt;
  KVASIR_ASSIGN(ggml_backend_dev_t device, ffn::find_device(options.device));
  const std::string key = cache_key(layer, device, options);
  WorkerTuning result;
  std::optional<ffn::Tuning> known;
  if (!options.cache_file.empty()) {
    for (const std::string& line : read_lines(options.cache_file))
      if (line.starts_with(key + '\t')) known = from_text(line.substr(key.size() + 1), layer.copies.size());
  }
  if (known) {
    result.tuning = *known;
    result.cached = true;
    if (options.fast) engine.set_fast_plans(result.tuning.plans);
  } else {
    KVASIR_ASSIGN(result.tuning, ffn::tune(engine, recipe, layer.copies,
                                           {.device = device, .n_threads = options.n_threads, .plain = layer.plain, .fast = options.fast, .budget = options.budget}));
    if (!options.cache_file.empty()) remember(options.cache_file, key, result.tuning);
  }
  result.lines = describe(result.tuning, layer, options.fast);
  return result;
}

}  // namespace kvasir::worker
