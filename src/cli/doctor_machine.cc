#include <sys/sysinfo.h>

#include <cstdlib>
#include <format>
#include <fstream>
#include <thread>

#include "cli/console.h"
#include "cli/doctor.h"
#include "ffn/engine.h"

namespace kvasir::cli {
namespace {

constexpr std::uint64_t kMemoryLowBytes = 1ull << 30;

std::uint64_t available_bytes() {
  std::ifstream in("/proc/meminfo");
  std::string name;
  std::uint64_t kib = 0;
  while (in >> name >> kib) {
    if (name == "MemAvailable:") return kib * 1024;
    in.ignore(256, '\n');
  }
  return 0;
}

void examine_memory(Findings& findings) {
  const std::uint64_t bytes = available_bytes();
  if (bytes == 0) return;
  if (bytes < kMemoryLowBytes)
    findings.push_back({Grade::kNote, "memory",
                        std::format("only {} are free: a worker here can hold little, and what is swapped out is slow; "
                                    "close other programs, or give --memory less.",
                                    format_bytes(bytes))});
  else
    findings.push_back({Grade::kGood, "memory",
                        std::format("{} are free: kvasir join --memory {}M leaves a quarter of them to others.",
                                    format_bytes(bytes), bytes / 4 * 3 >> 20)});
}

void examine_huge_pages(Findings& findings) {
  std::ifstream in("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  if (!std::getline(in, line)) {
    findings.push_back({Grade::kNote, "huge pages", "this kernel has no transparent huge pages: weights are read with small "
                                                    "ones, up to 1.5 times slower; nothing to do about it here."});
  } else if (line.contains("[never]")) {
    findings.push_back({Grade::kNote, "huge pages",
                        "are off, which makes reading weights up to 1.5 times slower; as root: echo madvise > "
                        "/sys/kernel/mm/transparent_hugepage/enabled"});
  } else {
    findings.push_back({Grade::kGood, "huge pages", "can be used."});
  }
}

void examine_load(Findings& findings) {
  double load = 0;
  if (::getloadavg(&load, 1) != 1) return;
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const bool busy = load > cores;
  findings.push_back({busy ? Grade::kNote : Grade::kGood, "processor",
                      busy ? std::format("{} cores have {:.1f} programs' work at once: answers come late; end some, or give "
                                         "kvasir join --pause-when-busy 1.",
                                         cores, load)
                           : std::format("{} cores, load {:.1f}.", cores, load)});
}

}  // namespace

void examine_machine(Findings& findings) {
  examine_load(findings);
  examine_memory(findings);
  examine_huge_pages(findings);
  const Result<wire::NumericsId> id = ffn::numerics_id();
  if (!id)
    findings.push_back({Grade::kBad, "ggml", id.error().message});
  else
    findings.push_back({Grade::kGood, "ggml",
                        std::format("version {}, computing with {}. Workers with the same two give the same bits.",
                                    id->ggml_version, id->cpu_variant)});
}

}  // namespace kvasir::cli
