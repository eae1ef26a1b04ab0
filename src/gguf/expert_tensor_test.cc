#include "gguf/expert_tensor.h"

#include <gtest/gtest.h>

namespace kvasir::gguf {
namespace {

TEST(ExpertTensor, EveryNameRoundTrips) {
  for (std::uint32_t layer : {0u, 7u, 10u, kMaxLayers - 1})
    for (ExpertGroup group : {ExpertGroup::kExps, ExpertGroup::kChexps})
      for (ExpertRole role : {ExpertRole::kGate, ExpertRole::kUp, ExpertRole::kGateUp, ExpertRole::kDown})
        for (ExpertPart part : {ExpertPart::kWeight, ExpertPart::kBias, ExpertPart::kScale, ExpertPart::kInputScale}) {
          const ExpertTensorName name{layer, group, role, part};
          EXPECT_EQ(parse_expert_tensor(format_expert_tensor(name)), name) << format_expert_tensor(name);
        }
  EXPECT_EQ(format_expert_tensor({3, ExpertGroup::kChexps, ExpertRole::kGateUp, ExpertPart::kInputScale}),
            "blk.3.ffn_gate_up_chexps.input_scale");
}

TEST(ExpertTensor, LeavesOtherNamesAlone) {
  for (const char* name :
       {"", "blk.", "blk.0", "blk.0.", "blk.0.attn_v_exps.weight", "blk.0.ffn_norm_exps.weight",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_gate_shexp.weight", "blk.0.ffn_gate_exps", "blk.0.ffn_gate_exps.", "blk.0.ffn_gate_exps.weights",
        "blk.0.ffn_gate_exps.weight ", "blk.00.ffn_gate_exps.weight", "blk.-1.ffn_gate_exps.weight",
            "blk.+1.ffn_gate_exps.weight",
        "blk.16384.ffn_gate_exps.weight", "blk.99999999999.ffn_gate_exps.weight", "xblk.0.ffn_gate_exps.weight",
        "blk.0.ffn_exps.weight", "blk.0.ffn__exps.weight", "blk.0.ffn_gate.weight", "blk.0.ffn_gate_exps.lora.weight",
        "v.blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.bias2"})
    EXPECT_FALSE(parse_expert_tensor(name)) << name;
}

}  // namespace
}  // namespace kvasir::gguf
