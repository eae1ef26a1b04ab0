#include "cli/demo_fleet.h"

#include <cstdlib>
#include <format>
#include <system_error>
#include <utility>

#include "gguf/slice.h"

namespace kvasir::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kWorkers = 3;
constexpr std::uint32_t kOwners[] = {0, 1, 0, 2, 1, 0};  // a half, a third, a sixth
constexpr auto kWorkerStartTimeout = std::chrono::seconds(60);

}  // namespace

Result<TemporaryFolder> TemporaryFolder::make(const std::string& prefix) {
  std::error_code error;
  const fs::path base = fs::temp_directory_path(error);
  if (error) return fix_input("there is no folder for temporary files; set TMPDIR to one.");
  std::string path = (base / (prefix + "-XXXXXX")).string();
  if (mkdtemp(path.data()) == nullptr)
    return fix_input(std::format("cannot make a folder in '{}': {}; set TMPDIR to another one.", base.string(), errno_text(errno)));
  return TemporaryFolder(path);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

std::vector<gguf::SlicePlan> uneven_plans(const gguf::MoeModel& model) {
  std::vector<std::map<std::uint32_t, std::vector<std::uint32_t>>> ids(kWorkers);
  for (const gguf::LayerExperts& layer : model.layers()) {
    if (ids[0].contains(layer.layer)) continue;  // a second group follows the first (SlicePlan)
    for (auto& worker : ids) worker[layer.layer];
    for (std::uint32_t expert = 0; expert < layer.n_expert; ++expert)
      ids[kOwners[(expert + 5 * layer.layer + expert / 7) % std::size(kOwners)]][layer.layer].push_back(expert);
  }
  std::vector<gguf::SlicePlan> plans(kWorkers);
  for (std::size_t w = 0; w < kWorkers; ++w)
    for (auto& [layer, experts] : ids[w])
      if (!experts.empty()) plans[w].layers[layer] = ExpertSet::from_ids(std::move(experts));
  return plans;
}

Result<std::unique_ptr<DemoFleet>> DemoFleet::start(boost::asio::io_context& io, const gguf::MoeModel& model, const fs::path& folder) {
  KVASIR_TRY(model.require_expert_data());
  KVASIR_ASSIGN(const fs::path self, own_executable());
  auto fleet = std::make_unique<DemoFleet>();
  for (const gguf::SlicePlan& plan : uneven_plans(model)) {
    if (plan.layers.empty()) continue;  // fewer experts than workers
    const std::string name = std::format("worker{}", fleet->members_.size() + 1);
    const fs::path slice = folder / (name + ".gguf");
    KVASIR_ASSIGN(const gguf::SliceLayout layout, gguf::SliceLayout::make(model, plan));
    KVASIR_TRY(gguf::write_slice(layout, slice.string()));
    Member member;
    member.bytes = layout.total_bytes();
    for (const auto& [layer, experts] : plan.layers) member.n_experts += experts.size();
    fleet->members_.push_back(member);
    auto child = std::make_unique<ChildProcess>(io);
    KVASIR_TRY(child->start({.executable = self,
                             .args = {"worker", "--serve", "127.0.0.1:0", "--insecure", "--threads", "1", "--slice", slice.string()},
                             .environment = {},
                             .log = folder / (name + ".log")}));
    fleet->children_.push_back(std::move(child));
  }
  // All start at once; each prints its link when it serves.
  for (std::size_t i = 0; i < fleet->children_.size(); ++i) {
    KVASIR_ASSIGN(fleet->members_[i].link, fleet->children_[i]->read_line(kWorkerStartTimeout));
  }
  return fleet;
}

std::string DemoFleet::links() const {
  std::string out;
  for (const Member& member : members_) out += (out.empty() ? "" : ",") + member.link;
  return out;
}

void DemoFleet::kill_all() {
  for (const auto& child : children_) child->kill();
}

Result<fs::path> own_executable() {
  std::error_code error;
  fs::path path = fs::read_symlink("/proc/self/exe", error);
  if (error) return fatal(std::format("cannot find this executable: {}; is /proc mounted?", error.message()));
  return path;
}

Result<fs::path> find_plugin() {
  KVASIR_ASSIGN(const fs::path self, own_executable());
  const fs::path prefix = self.parent_path().parent_path();
  for (const char* place : {"lib/libggml-kvasir.so", "lib/kvasir/libggml-kvasir.so", KVASIR_INSTALL_LIBDIR "/kvasir/libggml-kvasir.so"})
    if (fs::exists(prefix / place)) return prefix / place;
  return fix_input(std::format("the plugin libggml-kvasir.so is not under '{}'; build or install it first.", (prefix / "lib").string()));
}

}  // namespace kvasir::cli
