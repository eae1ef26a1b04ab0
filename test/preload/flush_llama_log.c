// For LD_PRELOAD in tests: llama.cpp's tools write through a logger with a thread of its own and do
// not wait for it at their end, so that one run in ten loses its last lines. This waits.
#define _GNU_SOURCE
#include <dlfcn.h>

__attribute__((destructor)) static void flush_llama_log(void) {
  void* (*log_main)(void) = (void* (*)(void))dlsym(RTLD_DEFAULT, "_Z15common_log_mainv");
  void (*log_flush)(void*) = (void (*)(void*))dlsym(RTLD_DEFAULT, "_Z16common_log_flushP10common_log");
  if (log_main && log_flush) log_flush(log_main());
}
