// A bug on purpose, four comparisons deep: ./dev fuzz fails if this is not found, and so does the
// replay of its corpus if it passes.

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 4 && data[0] == 'b' && data[1] == 'i' && data[2] == 'r' && data[3] == 'd') __builtin_trap();
  return 0;
}
