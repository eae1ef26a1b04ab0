#include "verify/subject.h"

#include <map>
#include <vector>

#include "ffn/device.h"
#include "verify/expert_loader.h"

namespace kvasir::verify {
namespace {

class DeviceSubject final : public Subject {
 public:
  DeviceSubject(const gguf::MoeModel& model, std::string device, ggml_backend_buffer_type_t buffer_type, bool exact,
                std::unique_ptr<ffn::Engine> engine)
      : model_(model), device_(std::move(device)), buffer_type_(buffer_type), exact_(exact), engine_(std::move(engine)) {}

  const std::string& name() const override { return device_; }
  bool exact() const override { return exact_; }
  ExpertSet experts(const gguf::LayerExperts& layer, const wire::LayerId&) const override { return layer.held; }

  Status compute(const gguf::LayerExperts& layer, const wire::LayerId&, const wire::Recipe& recipe, ffn::RowsView rows,
                 std::span<const wire::Pair> pairs, float* out) override {
    std::vector<std::uint32_t> experts;
    std::map<std::uint32_t, std::uint32_t> local_of;
    std::vector<ffn::LocalPair> local;
    for (const wire::Pair& pair : pairs) {
      const auto [at, added] = local_of.try_emplace(pair.expert, static_cast<std::uint32_t>(experts.size()));
      if (added) experts.push_back(pair.expert);
      local.push_back({pair.row, at->second});
    }
    KVASIR_ASSIGN(const LoadedExperts loaded, load_experts(model_, layer, experts, buffer_type_));
    KVASIR_TRY(ffn::Engine::check(recipe, loaded.tensors));
    const Status status = engine_->compute(recipe, loaded.tensors, rows, local, out);
    engine_->forget_graphs();
    return status;
  }

 private:
  const gguf::MoeModel& model_;
  std::string device_;
  ggml_backend_buffer_type_t buffer_type_;
  bool exact_;
  std::unique_ptr<ffn::Engine> engine_;
};

}  // namespace

Result<std::unique_ptr<Subject>> make_device_subject(const gguf::MoeModel& model, const std::string& device, int n_threads) {
  ffn::load_backends();
  KVASIR_ASSIGN(ggml_backend_dev_t found, ffn::find_device(device));
  const bool exact = ffn::is_cpu(found);
  KVASIR_ASSIGN(std::unique_ptr<ffn::Engine> engine,
                ffn::Engine::create({.device = device, .n_threads = n_threads,
                                     .numerics = exact ? wire::Numerics::kExact : wire::Numerics::kFast}));
  return std::make_unique<DeviceSubject>(model, device, ggml_backend_dev_buffer_type(found), exact, std::move(engine));
}

}  // namespace kvasir::verify
