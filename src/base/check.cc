#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace kvasir {

void check_failed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "kvasir: bug: CHECK(%s) failed at %s:%d; please report this line.\n", condition, file, line);
  std::abort();
}

}  // namespace kvasir
