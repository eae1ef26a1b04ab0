#include "cli/demo_measure.h"

#include <algorithm>
#include <cstdio>

#include "cli/demo_fleet.h"
#include "cli/page_eviction.h"
#include "gguf/moe_model.h"

namespace kvasir::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kEvictAfterTokens = 12;
constexpr std::size_t kKillAfterTokens = 16;
constexpr std::size_t kFallbackWithinTokens = 4;  // the kill is seen at one of the next tokens

std::vector<FilePart> expert_parts(const gguf::MoeModel& model) {
  std::vector<FilePart> parts;
  for (const gguf::LayerExperts& layer : model.layers())
    for (const gguf::ExpertTensor& tensor : layer.tensors)
      if (tensor.file == 0) parts.push_back({tensor.offset, tensor.nbytes});
  return parts;
}

struct Fallback {
  double first_ms = 0;     // the slowest token just after the kill
  double before_ms = 0;    // median while the workers were there
  double after_ms = 0;     // median of the later tokens
  double resident = 1;     // share of the replica in memory at the kill
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::nth_element(values, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  return values[values.size() / 2];
}

// Generates, and takes all workers away in the middle.
Result<Fallback> first_fallback(boost::asio::io_context& io, const gguf::MoeModel& model, const fs::path& path, const fs::path& folder,
                                const DemoRunOptions& options, const char* replica, bool cold) {
  KVASIR_ASSIGN(const auto fleet, DemoFleet::start(io, model, folder));
  KVASIR_ASSIGN(Environment environment, plugin_environment(fleet->links(), folder / "stats.json"));
  environment["KVASIR_REPLICA"] = replica;
  KVASIR_ASSIGN(const auto server, LlamaServer::start(io, {.model = path, .folder = folder, .name = "fallback", .environment = environment,
                                                           .n_threads = options.n_threads, .repack = false}));
  Fallback out;
  Status evicted;
  std::size_t n_texts = 0;
  KVASIR_ASSIGN(const Completion completion, server->complete(options.prompts[0], std::max(options.n_tokens, 32), [&](std::string_view) {
    ++n_texts;
    if (n_texts == kEvictAfterTokens && cold) {
      if (const auto resident = evict(server->pid(), path, expert_parts(model))) out.resident = *resident;
      else evicted = std::unexpected(resident.error());
    }
    if (n_texts == kKillAfterTokens) fleet->kill_all();
  }));
  KVASIR_TRY(evicted);
  const std::vector<double>& gaps = completion.gap_ms;
  const auto at = [&](std::size_t i) { return gaps.begin() + static_cast<std::ptrdiff_t>(std::min(i, gaps.size())); };
  out.before_ms = median({at(1), at(kEvictAfterTokens - 1)});
  out.first_ms = *std::max_element(at(kKillAfterTokens - 1), at(kKillAfterTokens + kFallbackWithinTokens));
  out.after_ms = median({at(kKillAfterTokens + kFallbackWithinTokens), gaps.end()});
  return out;
}

}  // namespace

Status measure(boost::asio::io_context& io, const fs::path& path, const fs::path& folder, const DemoRunOptions& options) {
  KVASIR_ASSIGN(const gguf::MoeModel model, gguf::MoeModel::open(path.string()));
  std::printf("\nDecode, tok/s, llama.cpp with --threads %d:\n  %-24s %10s %10s\n", options.n_threads, "OMP_WAIT_POLICY", "active", "passive");
  double speed[2][2] = {};
  const char* policies[2] = {"active", "passive"};
  {
    KVASIR_ASSIGN(const auto fleet, DemoFleet::start(io, model, folder));
    for (int i = 0; i < 2; ++i) {
      const Environment policy{{"OMP_WAIT_POLICY", policies[i]}};
      KVASIR_ASSIGN(const DemoRun kvasir, run_with_plugin(io, path, folder, fleet->links(), options, policy, {}));
      KVASIR_ASSIGN(const DemoRun stock, run_stock(io, path, folder, options, /*repack=*/false, policy));
      speed[0][i] = kvasir.decode_per_s();
      speed[1][i] = stock.decode_per_s();
    }
  }
  std::printf("  %-24s %10.1f %10.1f\n", "Kvasir, three workers", speed[0][0], speed[0][1]);
  std::printf("  %-24s %10.1f %10.1f\n", "llama.cpp --no-repack", speed[1][0], speed[1][1]);

  std::printf("\nAll workers killed in mid-generation; ms a token:\n  %-24s %10s %10s %10s   %s\n", "KVASIR_REPLICA", "before", "first",
              "after", "replica in memory at the kill");
  const struct {
    const char* label;
    const char* replica;
    bool cold;
  } cases[] = {{"mmap, cold", "mmap", true}, {"mmap, warm", "mmap", false}, {"ram", "ram", false}};
  for (const auto& c : cases) {
    KVASIR_ASSIGN(const Fallback f, first_fallback(io, model, path, folder, options, c.replica, c.cold));
    std::printf("  %-24s %10.2f %10.2f %10.2f   %.0f %%\n", c.label, f.before_ms, f.first_ms, f.after_ms, 100 * f.resident);
  }
  return {};
}

}  // namespace kvasir::cli
