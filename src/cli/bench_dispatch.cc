#include "cli/bench_dispatch.h"

#include <cstdio>

#include "cli/interrupt.h"
#include "dispatch/client/round_bench.h"

namespace kvasir::cli {
namespace {

constexpr std::uint32_t kRoundsBackToBack = 4000, kRoundsWithGap = 400;

void print(const dispatch::RoundBench& bench, const dispatch::RoundFigures& f, bool as_json) {
  if (as_json) std::printf("%s\n", dispatch::to_json(bench, f).c_str());
  else
    std::printf("%-9s %-6s %7.3g %9zu %9zu %10.1f %10.1f %10.1f %10.1f %10.1f\n",
                std::string(to_string(bench.form)).c_str(), bench.tls ? "tls" : "plain",
                std::chrono::duration<double, std::milli>(bench.gap).count(), f.bytes_out, f.bytes_back, f.round_p50_us,
                f.echo_p50_us, f.over_echo_us(), f.round_p99_us, f.echo_p99_us);
  std::fflush(stdout);
}

}  // namespace

Status bench_dispatch(const BenchDispatchOptions& options) {
  if (!options.json) {
    std::printf(
        "a round of one row through %u experts that compute nothing, n_embd %u, beside an echo of the same bytes; "
        "µs\n\n",
        options.top_k, options.n_embd);
    std::printf("%-9s %-6s %7s %9s %9s %10s %10s %10s %10s %10s\n", "form", "stream", "gap ms", "bytes out", "back",
                "round p50", "echo p50", "over", "round p99", "echo p99");
  }
  for (const auto form : {dispatch::RoundForm::kExact, dispatch::RoundForm::kF16Sums})
    for (const bool tls : {false, true})
      for (const double gap_ms : options.gaps_ms) {
        if (interrupted()) return fatal("interrupted.");
        const auto gap = std::chrono::duration_cast<Nanos>(std::chrono::duration<double, std::milli>(gap_ms));
        const dispatch::RoundBench bench{.form = form,
                                         .tls = tls,
                                         .gap = gap,
                                         .spin = std::chrono::microseconds(options.spin_us),
                                         .n_embd = options.n_embd,
                                         .top_k = options.top_k,
                                         .rounds = options.rounds > 0 ? options.rounds
                                                   : gap > Nanos(0)   ? kRoundsWithGap
                                                                      : kRoundsBackToBack};
        KVASIR_ASSIGN(const dispatch::RoundFigures figures, dispatch::measure_round(bench));
        print(bench, figures, options.json);
      }
  return {};
}

}  // namespace kvasir::cli
