// CHECK: for bugs in Kvasir only, never for a peer, a file or a user. Stays on in release.
#pragma once

namespace kvasir {
[[noreturn]] void check_failed(const char* file, int line, const char* condition);
}

#define KVASIR_CHECK(condition) \
  ((condition) ? static_cast<void>(0) : ::kvasir::check_failed(__FILE__, __LINE__, #condition))
