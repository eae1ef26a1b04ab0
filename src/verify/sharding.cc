#include "verify/sharding.h"

#include <algorithm>
#include <cmath>
#include <format>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "ffn/oracle.h"
#include "gguf/slice.h"
#include "verify/expert_loader.h"
#include "verify/recipes.h"

namespace kvasir::verify {
namespace {

// One use of an expert by a token, in the router's order.
struct Use {
  std::uint32_t token = 0;
  std::uint32_t expert = 0;
  double weight = 0;
};

struct Batch {
  std::vector<float> rows;  // [n_tokens][n_embd]
  std::vector<Use> uses;    // n_used for each token, one token after the other
};

// Experts are dealt like cards, so that few tokens touch all of them.
Batch draw(const ExpertSet& experts, std::uint32_t n_embd, std::uint32_t n_used, std::uint32_t n_tokens, std::mt19937_64& rng) {
  Batch batch;
  std::normal_distribution<float> normal;
  batch.rows.resize(std::size_t{n_tokens} * n_embd);
  for (float& value : batch.rows) value = normal(rng);
  std::vector<std::uint32_t> deck;
  const std::vector<std::uint32_t> all = experts.ids();
  for (std::uint32_t token = 0; token < n_tokens; ++token) {
    if (deck.size() < n_used) {
      // What is left stays on top; a token never gets an expert twice.
      std::vector<std::uint32_t> fresh = all;
      std::erase_if(fresh, [&](std::uint32_t expert) { return std::ranges::contains(deck, expert); });
      std::ranges::shuffle(fresh, rng);
      deck.insert(deck.begin(), fresh.begin(), fresh.end());
    }
    std::vector<double> weights(n_used);
    for (double& weight : weights) weight = std::exp(normal(rng));
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (std::uint32_t slot = 0; slot < n_used; ++slot) {
      batch.uses.push_back({token, deck.back(), weights[slot] / sum});
      deck.pop_back();
    }
  }
  return batch;
}

// The rows of every use whose expert is in `experts`, computed from `model`; others stay.
Status compute_uses(const gguf::MoeModel& model, const gguf::LayerExperts& layer, const ExpertSet& experts, const Batch& batch,
                    std::vector<double>& rows) {
  KVASIR_ASSIGN(const wire::Recipe recipe, recipe_from_file(model, layer));
  KVASIR_ASSIGN(ggml_backend_buffer_type_t cpu, cpu_buffer_type());
  for (std::uint32_t expert : experts.ids()) {
    KVASIR_ASSIGN(const LoadedExperts loaded, load_experts(model, layer, std::span(&expert, 1), cpu));
    KVASIR_TRY(ffn::Engine::check(recipe, loaded.tensors));
    const ffn::ExpertOracle oracle(recipe, loaded.tensors, 0);
    for (std::size_t i = 0; i < batch.uses.size(); ++i)
      if (batch.uses[i].expert == expert)
        oracle.compute(std::span(batch.rows).subspan(std::size_t{batch.uses[i].token} * recipe.n_embd, recipe.n_embd),
                       std::span(rows).subspan(i * recipe.n_embd, recipe.n_embd));
  }
  return {};
}

// out[token] += weight * row, use by use in their order, for the uses that `mine` accepts.
template <typename Mine>
void combine(const Batch& batch, std::span<const double> rows, std::size_t n_embd, std::span<double> out, Mine mine) {
  for (std::size_t i = 0; i < batch.uses.size(); ++i) {
    if (!mine(i)) continue;
    for (std::size_t c = 0; c < n_embd; ++c) out[batch.uses[i].token * n_embd + c] += batch.uses[i].weight * rows[i * n_embd + c];
  }
}

Result<std::optional<ShardingLayer>> check_layer(const gguf::MoeModel& whole, const gguf::LayerExperts& layer,
                                                 std::span<const gguf::MoeModel> shards, const ShardingOptions& options) {
  // Each expert comes from the first shard that holds it.
  std::vector<ExpertSet> parts(shards.size());
  ExpertSet covered;
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const gguf::LayerExperts* held = shards[s].find(layer.layer, layer.group);
    if (!held) continue;
    for (std::uint32_t expert : held->held.ids())
      if (layer.held.contains(expert) && !covered.contains(expert)) {
        parts[s].add({expert, expert + 1});
        covered.add({expert, expert + 1});
      }
  }
  if (covered.empty()) return std::optional<ShardingLayer>();
  KVASIR_ASSIGN(const wire::Recipe recipe, recipe_from_file(whole, layer));
  const std::uint32_t n_embd = recipe.n_embd;
  const std::uint32_t wanted = options.n_used ? options.n_used : std::max(whole.n_expert_used(), 1u);
  const std::uint32_t n_used = std::min(wanted, covered.size());
  const std::uint32_t n_tokens = options.n_tokens ? options.n_tokens : std::max(kShardingTokensMin, (covered.size() + n_used - 1) / n_used);
  std::mt19937_64 rng(options.seed + (std::uint64_t{layer.layer} << 8) + static_cast<std::uint64_t>(layer.group));
  const Batch batch = draw(covered, n_embd, n_used, n_tokens, rng);
  ExpertSet touched;
  std::map<std::uint32_t, std::size_t> owner;
  for (const Use& use : batch.uses) touched.add({use.expert, use.expert + 1});

  std::vector<double> whole_rows(batch.uses.size() * n_embd), shard_rows(batch.uses.size() * n_embd);
  KVASIR_TRY(compute_uses(whole, layer, touched, batch, whole_rows));
  for (std::size_t s = 0; s < shards.size(); ++s) {
    ExpertSet mine;
    for (std::uint32_t expert : parts[s].ids()) {
      owner[expert] = s;
      if (touched.contains(expert)) mine.add({expert, expert + 1});
    }
    if (!mine.empty()) KVASIR_TRY(compute_uses(shards[s], *shards[s].find(layer.layer, layer.group), mine, batch, shard_rows));
  }

  const std::size_t n_out = std::size_t{n_tokens} * n_embd;
  std::vector<double> mono(n_out), per_pair(n_out), partial(n_out);
  const auto everyone = [](std::size_t) { return true; };
  combine(batch, whole_rows, n_embd, mono, everyone);
  combine(batch, shard_rows, n_embd, per_pair, everyone);
  for (std::size_t s = 0; s < shards.size(); ++s) {
    std::vector<double> sum(n_out);
    combine(batch, shard_rows, n_embd, sum, [&](std::size_t i) { return owner.at(batch.uses[i].expert) == s; });
    for (std::size_t i = 0; i < n_out; ++i) partial[i] += sum[i];
  }
  ShardingLayer result{.layer = layer.layer, .group = layer.group, .n_expert = layer.n_expert, .n_touched = touched.size(),
                       .n_tokens = n_tokens, .per_pair = {}, .partial = {}};
  result.per_pair.add(mono, per_pair);
  result.partial.add(mono, partial);
  return std::optional(result);
}

}  // namespace

Result<Shards> cut_shards(const gguf::MoeModel& whole, std::uint32_t n_shards) {
  KVASIR_TRY(whole.require_expert_data());
  std::vector<gguf::SlicePlan> plans(n_shards);
  std::set<std::uint32_t> planned;
  for (const gguf::LayerExperts& layer : whole.layers()) {
    if (!planned.insert(layer.layer).second) continue;  // a second group follows the first (SlicePlan)
    std::vector<std::vector<std::uint32_t>> ids(n_shards);
    // The first shard has about twice its share; runs of seven shift the pattern.
    for (std::uint32_t expert : layer.held.ids()) {
      const std::uint32_t turn = (expert + 5 * layer.layer + expert / 7) % (n_shards + 1);
      ids[turn % n_shards].push_back(expert);
    }
    for (std::uint32_t s = 0; s < n_shards; ++s)
      if (!ids[s].empty()) plans[s].layers[layer.layer] = ExpertSet::from_ids(std::move(ids[s]));
  }
  Shards shards;
  for (std::uint32_t s = 0; s < n_shards; ++s) {
    if (plans[s].layers.empty()) continue;
    KVASIR_ASSIGN(gguf::SliceLayout made, gguf::SliceLayout::make(whole, plans[s]));
    const auto layout = std::make_shared<const gguf::SliceLayout>(std::move(made));
    // Nobody checks these shards' hashes: they are read back from where they were cut.
    const std::vector<gguf::Hash> no_hashes(layout->slab_count());
    KVASIR_ASSIGN(gguf::ModelFiles files,
                  gguf::ModelFiles::from_source(gguf::make_slice_source(*layout, no_hashes, std::format("shard {}", s + 1))));
    KVASIR_ASSIGN(gguf::MoeModel model, gguf::MoeModel::from_files(std::move(files)));
    shards.models.push_back(std::move(model));
    shards.keep.push_back(layout);
  }
  return shards;
}

Result<std::vector<ShardingLayer>> check_sharding(const gguf::MoeModel& whole, std::span<const gguf::MoeModel> shards,
                                                  const ShardingOptions& options) {
  KVASIR_TRY(whole.require_expert_data());
  std::vector<ShardingLayer> results;
  std::uint64_t done = 0;
  for (const gguf::LayerExperts& layer : whole.layers()) {
    if (options.progress) options.progress(done++, whole.layers().size());
    if (options.layers && !options.layers->contains(layer.layer)) continue;
    KVASIR_ASSIGN(const std::optional<ShardingLayer> result, check_layer(whole, layer, shards, options));
    if (result) results.push_back(*result);
  }
  if (results.empty()) return fix_input("no layer is left to check: the files and the layers asked for have no expert in common.");
  return results;
}

}  // namespace kvasir::verify
