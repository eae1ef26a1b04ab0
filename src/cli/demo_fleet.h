// The demo's workers: a model cut three ways and three `kvasir worker` processes on loopback.
#pragma once

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "cli/child_process.h"
#include "gguf/moe_model.h"
#include "gguf/slice_plan.h"

namespace kvasir::cli {

// A folder under TMPDIR that goes with its owner.
class TemporaryFolder {
 public:
  static Result<TemporaryFolder> make(const std::string& prefix);
  ~TemporaryFolder();
  TemporaryFolder(TemporaryFolder&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  explicit TemporaryFolder(std::filesystem::path path) : path_(std::move(path)) {}
  std::filesystem::path path_;
};

// Shares all experts out over three workers: unequally, with gaps, and differently in every
// layer, so that nothing about the sets is a special case.
std::vector<gguf::SlicePlan> uneven_plans(const gguf::MoeModel& model);

class DemoFleet {
 public:
  struct Member {
    std::string link;  // for KVASIR_WORKERS
    std::uint64_t n_experts = 0;
    std::uint64_t bytes = 0;  // of its slice
  };

  // Cuts the slices into `folder` and waits until every worker serves.
  static Result<std::unique_ptr<DemoFleet>> start(boost::asio::io_context& io, const gguf::MoeModel& model,
                                                  const std::filesystem::path& folder);

  const std::vector<Member>& members() const { return members_; }
  std::string links() const;  // of all, as KVASIR_WORKERS wants them
  void kill_all();            // at once, as a power cut would

 private:
  std::vector<Member> members_;
  std::vector<std::unique_ptr<ChildProcess>> children_;
};

// This executable, and the plugin that was built or installed with it.
Result<std::filesystem::path> own_executable();
Result<std::filesystem::path> find_plugin();

}  // namespace kvasir::cli
