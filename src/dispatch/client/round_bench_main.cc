// `kvasir bench dispatch` for those who work on the round: links a second sooner, and prints its lines of
// JSON. dispatch_round_bench [SPIN_US]
#include <cstdio>
#include <cstdlib>

#include "dispatch/client/round_bench.h"

int main(int argc, char** argv) {
  using namespace kvasir;
  for (const auto form : {dispatch::RoundForm::kExact, dispatch::RoundForm::kF16Sums})
    for (const bool tls : {false, true})
      for (const int gap_ms : {0, 5}) {
        const dispatch::RoundBench bench{.form = form,
                                         .tls = tls,
                                         .gap = std::chrono::milliseconds(gap_ms),
                                         .spin = std::chrono::microseconds(argc > 1 ? std::atoi(argv[1]) : 50),
                                         .rounds = gap_ms > 0 ? 400u : 4000u};
        const auto figures = dispatch::measure_round(bench);
        if (!figures) {
          std::fprintf(stderr, "%s\n", figures.error().message.c_str());
          return 1;
        }
        std::printf("%s\n", dispatch::to_json(bench, *figures).c_str());
        std::fflush(stdout);
      }
}
