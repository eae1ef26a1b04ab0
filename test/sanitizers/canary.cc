// Has the bug that its argument names: each sanitizer must find its own, and the tests must hear of it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>

int main(int argc, char** argv) {
  const std::string_view bug = argc > 1 ? argv[1] : "";
  if (bug == "overrun") {
    void* const bytes = std::malloc(8);
    volatile std::size_t n = 9;  // which the compiler would see
    std::memset(bytes, 1, n);
    std::printf("%d\n", *static_cast<char*>(bytes));
    std::free(bytes);
  } else if (bug == "leak") {
    for (int i = 0; i < 100; ++i) std::printf("%p\n", std::malloc(8));
  } else if (bug == "shift") {
    std::printf("%d\n", 1 << (30 + argc));
  } else if (bug == "race") {
    int both = 0;
    std::thread other([&] { both += argc; });
    both += argc;
    other.join();
    std::printf("%d\n", both);
  }
  return 0;
}
