#include "cli/confine_option.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "hub/store/private_folder.h"

namespace kvasir::cli {

namespace fs = std::filesystem;

void add_confine_option(CLI::App& command, bool& off) {
  command.add_flag("--no-confine", off, "keep the right to open any file and to make any system call, for debuggers");
}

void Confinement::reads(const std::string& path) {
  if (!path.empty()) needs_.read.emplace_back(path);
}

void Confinement::reads_model(const std::string& path) {
  const fs::path file = path;
  const bool split = file.filename().string().contains("-of-");
  needs_.read.push_back(split ? fs::absolute(file).parent_path() : file);
}

void Confinement::keeps(const std::string& folder) {
  if (folder.empty()) return;
  (void)hub::make_private_folder(folder);  // who needs it says why it cannot be made
  needs_.write.emplace_back(folder);
}

void Confinement::rewrites(const std::string& file) {
  if (!file.empty()) needs_.write.push_back(fs::absolute(file).parent_path());
}

void Confinement::computes_on(const std::string& device) { needs_.gpu = device != "CPU"; }

void Confinement::ends(pid_t child) { needs_.child = child; }

std::string Confinement::enforce(bool off) const {
  if (off) return "not confined (--no-confine): this process may do all that its user may";
  // Drivers keep what they compiled; in a folder that may be written, or not at all.
  if (needs_.gpu && !needs_.write.empty()) {
    ::setenv("MESA_SHADER_CACHE_DIR", needs_.write.front().c_str(), /*overwrite=*/0);
    ::setenv("CUDA_CACHE_PATH", needs_.write.front().c_str(), /*overwrite=*/0);
  }
  return confine::confine(needs_);
}

}  // namespace kvasir::cli
