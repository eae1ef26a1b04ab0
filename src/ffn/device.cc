#include "ffn/device.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <format>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "ffn/brief_waits.h"

namespace kvasir::ffn {

void load_backends() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (ggml_backend_reg_count() == 0) ggml_backend_load_all();
  });
}

void wait_briefly() {
  if (std::getenv(kWaitPolicyVariable) || std::getenv(kSpinCountVariable)) return;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  std::error_code unknown;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", unknown);
  if (arguments.empty() || unknown) return;
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  ::setenv(kWaitPolicyVariable, kBriefWaitPolicy, 1);
  ::setenv(kSpinCountVariable, kBriefSpinCount, 1);
  ::execv(program.c_str(), argv.data());
}

void leave_gpu_drivers_out() { ::setenv("VK_LOADER_DRIVERS_DISABLE", "~all~", /*overwrite=*/0); }

Result<ggml_backend_dev_t> find_device(std::string_view name) {
  load_backends();
  std::string known;
  for (std::size_t i = 0; i < ggml_backend_dev_count(); ++i) {
    ggml_backend_dev_t device = ggml_backend_dev_get(i);
    if (name == ggml_backend_dev_name(device)) return device;
    known += std::format("{}{}", known.empty() ? "" : ", ", ggml_backend_dev_name(device));
  }
  if (known.empty()) return fatal("ggml found no backend library: install ggml's CPU backend (libggml0-backend-cpu).");
  return fix_input(std::format("There is no device '{}'; ggml offers {}.", name, known));
}

bool is_cpu(ggml_backend_dev_t device) { return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU; }

Result<ggml_backend_ptr> open_backend(ggml_backend_dev_t device, int n_threads) {
  if (n_threads < 1 || n_threads > kThreadsMax)
    return fix_input(std::format("The number of threads must be 1 to {}, not {}.", kThreadsMax, n_threads));
  ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
  if (!backend) return fatal(std::format("ggml could not start the device '{}'.", ggml_backend_dev_name(device)));
  set_threads(backend.get(), n_threads);
  return backend;
}

void set_threads(ggml_backend_t backend, int n_threads) {
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
  auto set = reinterpret_cast<ggml_backend_set_n_threads_t>(
      ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
  if (set) set(backend, std::clamp(n_threads, 1, kThreadsMax));
}

std::string describe_build(ggml_backend_dev_t device) {
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
  std::string text;
  if (is_cpu(device)) {
    auto get_features = reinterpret_cast<ggml_backend_get_features_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features"));
    if (get_features) {
      for (const ggml_backend_feature* f = get_features(reg); f->name; ++f)
        text += std::format("{}{}={}", text.empty() ? "" : " ", f->name, f->value);
    }
  }
  if (text.empty())
    text = std::format("{}: {}", ggml_backend_dev_name(device), ggml_backend_dev_description(device));
  return text;
}

}  // namespace kvasir::ffn
