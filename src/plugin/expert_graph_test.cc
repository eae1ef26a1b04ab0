// Graphs as llama.cpp builds them, and near misses that must be left alone.

#include "plugin/expert_graph.h"
#include "plugin/shared_expert.h"

#include <ggml-cpp.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvasir::plugin {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using wire::Activation;
using wire::GateLayout;

constexpr int kEmbd = 64, kFf = 32, kExpert = 8, kUsed = 2, kTokens = 3;

class ExpertGraph : public ::testing::Test {
 protected:
  ExpertGraph() : owner_(ggml_init({.mem_size = 1 << 20, .mem_buffer = nullptr, .no_alloc = true})), ctx(owner_.get()) {
    graph = ggml_new_graph(ctx);
    cur = input(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, kEmbd, 1, kTokens), "cur");
    // As in llama.cpp: the first kUsed columns of an argsort over all experts.
    ggml_tensor* sorted = input(ggml_new_tensor_2d(ctx, GGML_TYPE_I32, kExpert, kTokens), "argsort");
    ids = ggml_view_2d(ctx, sorted, kUsed, kTokens, sorted->nb[1], 0);
    weights = input(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, kUsed, kTokens), "weights");
  }

  ggml_tensor* input(ggml_tensor* t, const char* name) {
    ggml_set_name(t, name);
    return t;
  }
  ggml_tensor* matrix(const char* name, int n_in, int n_out) {
    return input(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_in, n_out, kExpert), name);
  }
  ggml_tensor* bias(const char* name, int n) { return input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, kExpert), name); }
  ggml_tensor* scale(const char* name) { return input(ggml_new_tensor_1d(ctx, GGML_TYPE_F32, kExpert), name); }
  ggml_tensor* scaled(ggml_tensor* x, ggml_tensor* s) {
    ggml_tensor* rows = ggml_repeat_4d(ctx, ggml_reshape_3d(ctx, s, 1, kExpert, 1), 1, kExpert, kTokens, 1);
    return ggml_mul(ctx, x, ggml_get_rows(ctx, rows, ids));
  }
  ggml_tensor* gate() { return ggml_mul_mat_id(ctx, matrix("blk.5.ffn_gate_exps.weight", kEmbd, kFf), cur, ids); }
  ggml_tensor* up() { return ggml_mul_mat_id(ctx, matrix("blk.5.ffn_up_exps.weight", kEmbd, kFf), cur, ids); }
  ggml_tensor* down(ggml_tensor* hidden) {
    return ggml_mul_mat_id(ctx, matrix("blk.5.ffn_down_exps.weight", kFf, kEmbd), hidden, ids);
  }
  // Weights and the sum over a token's experts, as llama.cpp appends them.
  void combine(ggml_tensor* experts) {
    experts = ggml_mul(ctx, experts, weights);
    ggml_tensor* sum = ggml_view_2d(ctx, experts, kEmbd, kTokens, experts->nb[2], 0);
    for (int i = 1; i < kUsed; ++i)
      sum = ggml_add(ctx, sum, ggml_view_2d(ctx, experts, kEmbd, kTokens, experts->nb[2], i * experts->nb[1]));
    ggml_build_forward_expand(graph, sum);
  }
  int local_steps(const GraphPlan& plan) {
    int n = 0;
    for (const auto& step : plan.steps) n += step.node != nullptr;
    return n;
  }

  ggml_context_ptr owner_;
  ggml_context* ctx;
  ggml_cgraph* graph;
  ggml_tensor *cur, *ids, *weights;
};

TEST_F(ExpertGraph, SwigluSplit) {
  ggml_tensor* u = up();
  ggml_tensor* out = down(ggml_swiglu_split(ctx, gate(), u));
  combine(out);
  const GraphPlan plan = plan_graph(graph, false);
  EXPECT_THAT(plan.unknown, IsEmpty());
  ASSERT_EQ(plan.ffns.size(), 1u);
  const ExpertFfn& f = plan.ffns[0];
  EXPECT_EQ(f.layer, 5u);
  EXPECT_EQ(f.recipe.gate_layout, GateLayout::kSplit);
  EXPECT_EQ(f.recipe.activation, Activation::kSwiglu);
  EXPECT_EQ(f.recipe.n_embd, 64u);
  EXPECT_EQ(f.recipe.n_ff, 32u);
  EXPECT_EQ(f.recipe.n_expert, 8u);
  EXPECT_EQ(f.cur, cur);
  EXPECT_EQ(f.ids, ids);
  EXPECT_EQ(f.out, out);
  EXPECT_EQ(f.nodes.size(), 4u);
  for (const auto& step : plan.steps) EXPECT_LT(step.capture, 0) << "nothing runs between its nodes";
}

TEST_F(ExpertGraph, MergedGateUpWithScaleAndDownBias) {
  ggml_tensor* both = ggml_mul_mat_id(ctx, matrix("blk.5.ffn_gate_up_exps.weight", kEmbd, 2 * kFf), cur, ids);
  both = scaled(both, scale("blk.5.ffn_gate_up_exps.scale"));
  ggml_tensor* g = ggml_view_3d(ctx, both, kFf, kUsed, kTokens, both->nb[1], both->nb[2], 0);
  ggml_tensor* u = ggml_view_3d(ctx, both, kFf, kUsed, kTokens, both->nb[1], both->nb[2], kFf * sizeof(float));
  ggml_tensor* out = ggml_add_id(ctx, scaled(down(ggml_swiglu_split(ctx, g, u)), scale("blk.5.ffn_down_exps.scale")),
                                 bias("blk.5.ffn_down_exps.bias", kEmbd), ids);
  combine(out);
  const GraphPlan plan = plan_graph(graph, false);
  EXPECT_THAT(plan.unknown, IsEmpty());
  ASSERT_EQ(plan.ffns.size(), 1u);
  const wire::Recipe& r = plan.ffns[0].recipe;
  EXPECT_EQ(r.gate_layout, GateLayout::kMerged);
  EXPECT_TRUE(r.up_scale && r.down_scale && r.down_bias);
  EXPECT_FALSE(r.gate_scale || r.gate_bias || r.up_bias);
  EXPECT_EQ(plan.ffns[0].out, out);
}

TEST_F(ExpertGraph, BiasesAndSwigluOai) {
  ggml_tensor* u = ggml_add_id(ctx, up(), bias("blk.5.ffn_up_exps.bias", kFf), ids);
  ggml_tensor* g = ggml_add_id(ctx, gate(), bias("blk.5.ffn_gate_exps.bias", kFf), ids);
  combine(down(ggml_swiglu_oai(ctx, g, u, 1.702f, 7.0f)));
  const GraphPlan plan = plan_graph(graph, false);
  ASSERT_EQ(plan.ffns.size(), 1u);
  const wire::Recipe& r = plan.ffns[0].recipe;
  EXPECT_EQ(r.activation, Activation::kSwigluOai);
  EXPECT_TRUE(r.gate_bias && r.up_bias);
  EXPECT_FALSE(r.down_bias);
}

TEST_F(ExpertGraph, ReluSquaredWithoutGate) {
  combine(down(ggml_sqr(ctx, ggml_relu(ctx, up()))));
  const GraphPlan plan = plan_graph(graph, false);
  ASSERT_EQ(plan.ffns.size(), 1u);
  EXPECT_EQ(plan.ffns[0].recipe.gate_layout, GateLayout::kNone);
  EXPECT_EQ(plan.ffns[0].recipe.activation, Activation::kReluSqr);
}

TEST_F(ExpertGraph, ClampedSiluProduct) {
  ggml_tensor* u = ggml_clamp(ctx, up(), -7, 7);
  ggml_tensor* g = ggml_clamp(ctx, ggml_silu(ctx, gate()), -INFINITY, 7);
  combine(down(ggml_mul(ctx, g, u)));
  const GraphPlan plan = plan_graph(graph, false);
  ASSERT_EQ(plan.ffns.size(), 1u);
  const wire::Recipe& r = plan.ffns[0].recipe;
  EXPECT_EQ(r.activation, Activation::kSiluMul);
  EXPECT_TRUE(r.clamp_up.enabled && r.clamp_gate_activated.enabled);
  EXPECT_EQ(r.clamp_gate_activated.max, 7.0f);
}

TEST_F(ExpertGraph, SoftCappedSiluProduct) {
  const auto cap = [&](ggml_tensor* x, float in, float out) {
    return ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, x, in)), out);
  };
  ggml_tensor* g = gate();
  ggml_tensor* activated = ggml_mul(ctx, cap(g, 0.5f, 2), ggml_sigmoid(ctx, g));
  combine(down(ggml_mul(ctx, activated, cap(up(), 0.25f, 4))));
  const GraphPlan plan = plan_graph(graph, false);
  EXPECT_THAT(plan.unknown, IsEmpty());
  ASSERT_EQ(plan.ffns.size(), 1u);
  const wire::Recipe& r = plan.ffns[0].recipe;
  EXPECT_EQ(r.activation, Activation::kSoftCapSiluMul);
  EXPECT_EQ(r.cap_gate, (wire::SoftCap{0.5f, 2}));
  EXPECT_EQ(r.cap_up, (wire::SoftCap{0.25f, 4}));
}

TEST_F(ExpertGraph, ClampedSwiglu) {
  ggml_tensor* u = up();
  combine(down(ggml_swiglu_clamp(ctx, gate(), u, 7)));
  const GraphPlan plan = plan_graph(graph, false);
  ASSERT_EQ(plan.ffns.size(), 1u);
  EXPECT_EQ(plan.ffns[0].recipe.activation, Activation::kSwigluClamp);
  EXPECT_EQ(plan.ffns[0].recipe.limit, 7.0f);
}

TEST_F(ExpertGraph, AnUnknownActivationStaysLocalAndIsNamed) {
  combine(down(ggml_tanh(ctx, up())));
  const GraphPlan plan = plan_graph(graph, false);
  EXPECT_THAT(plan.ffns, IsEmpty());
  EXPECT_THAT(plan.unknown, ElementsAre(HasSubstr("TANH")));
  EXPECT_EQ(local_steps(plan), ggml_graph_n_nodes(graph));
}

TEST_F(ExpertGraph, AnInnerValueReadFromOutsideKeepsTheLayerLocal) {
  ggml_tensor* u = up();
  combine(down(ggml_swiglu_split(ctx, gate(), u)));
  ggml_build_forward_expand(graph, ggml_scale(ctx, u, 2));
  const GraphPlan plan = plan_graph(graph, false);
  EXPECT_THAT(plan.ffns, IsEmpty());
  EXPECT_THAT(plan.unknown, ElementsAre(HasSubstr("from outside")));
}

TEST_F(ExpertGraph, ANodeInBetweenMakesTheInputsBeCopiedFirst) {
  ggml_tensor* u = up();
  ggml_build_forward_expand(graph, u);
  ggml_build_forward_expand(graph, ggml_scale(ctx, weights, 2));  // a stranger between up and down
  combine(down(ggml_swiglu_split(ctx, gate(), u)));
  const GraphPlan plan = plan_graph(graph, false);
  ASSERT_EQ(plan.ffns.size(), 1u);
  // The copy comes before the stranger, the FFN after it.
  int copied_at = -1, stranger_at = -1, computed_at = -1;
  for (int i = 0; i < static_cast<int>(plan.steps.size()); ++i) {
    if (plan.steps[i].capture == 0) copied_at = i;
    if (plan.steps[i].node != nullptr && plan.steps[i].node->op == GGML_OP_SCALE) stranger_at = i;
    if (plan.steps[i].ffn == 0) computed_at = i;
  }
  EXPECT_GE(copied_at, 0);
  EXPECT_LT(copied_at, stranger_at);
  EXPECT_LT(stranger_at, computed_at);
}

TEST_F(ExpertGraph, SwappedHalvesAreNotTakenForTheUsualOrder) {
  ggml_tensor* both = ggml_mul_mat_id(ctx, matrix("blk.5.ffn_gate_up_exps.weight", kEmbd, 2 * kFf), cur, ids);
  ggml_tensor* first = ggml_view_3d(ctx, both, kFf, kUsed, kTokens, both->nb[1], both->nb[2], 0);
  ggml_tensor* second = ggml_view_3d(ctx, both, kFf, kUsed, kTokens, both->nb[1], both->nb[2], kFf * sizeof(float));
  combine(down(ggml_swiglu_split(ctx, second, first)));
  const GraphPlan plan = plan_graph(graph, false);
  EXPECT_THAT(plan.ffns, IsEmpty());
  EXPECT_EQ(plan.unknown.size(), 1u);
}

// --- claims -----------------------------------------------------------------------------

TEST_F(ExpertGraph, ClaimsTheExpertsAndWhatLiesBetweenThem) {
  const OpClaims all_ours{[](ggml_backend_buffer*) { return true; }};
  ggml_tensor* hidden = ggml_swiglu_split(ctx, gate(), up());
  ggml_tensor* out = down(hidden);
  EXPECT_TRUE(all_ours.claims(hidden));
  EXPECT_TRUE(all_ours.claims(out));
  ggml_tensor* weighted = ggml_mul(ctx, out, weights);
  EXPECT_TRUE(all_ours.claims(weighted));
  ggml_tensor* residual = input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, kEmbd, kTokens), "residual");
  ggml_tensor* view = ggml_view_2d(ctx, weighted, kEmbd, kTokens, weighted->nb[2], 0);
  EXPECT_TRUE(all_ours.claims(ggml_add(ctx, view, view)));
  EXPECT_FALSE(all_ours.claims(ggml_add(ctx, view, residual))) << "the residual belongs to the backbone";
  EXPECT_FALSE(all_ours.claims(ggml_mul(ctx, residual, residual)));
}

TEST_F(ExpertGraph, DoesNotClaimOtherStackedMatrices) {
  const OpClaims all_ours{[](ggml_backend_buffer*) { return true; }};
  EXPECT_FALSE(all_ours.claims(ggml_mul_mat_id(ctx, matrix("blk.0.attn_v_exps.weight", kEmbd, kFf), cur, ids)));
  EXPECT_TRUE(all_ours.claims(ggml_mul_mat_id(ctx, matrix("operator test operand", kEmbd, kFf), cur, ids)));
  // test-backend-ops asks before it allocates: with a refusal it would run no case and pass.
  EXPECT_TRUE((OpClaims{[](ggml_backend_buffer* b) { return b != nullptr; }}).claims(
      ggml_mul_mat_id(ctx, matrix("as", kEmbd, kFf), cur, ids)));
  const OpClaims none_ours{[](ggml_backend_buffer*) { return false; }};
  EXPECT_FALSE(none_ours.claims(gate()));
}

// --- the shared expert --------------------------------------------------------------------

struct SharedExpert : ExpertGraph {
  ggml_tensor* flat(const char* name, int n_in, int n_out) { return input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_in, n_out), name); }
  // As in qwen2moe: sigmoid(gate · x) * FFN(x), added to the experts' sum.
  ggml_tensor* shared(ggml_tensor* x) {
    ggml_tensor* open = ggml_sigmoid(ctx, ggml_mul_mat(ctx, flat("blk.5.ffn_gate_inp_shexp.weight", kEmbd, 1), x));
    ggml_tensor* u = ggml_mul_mat(ctx, flat("blk.5.ffn_up_shexp.weight", kEmbd, kFf), x);
    ggml_tensor* g = ggml_mul_mat(ctx, flat("blk.5.ffn_gate_shexp.weight", kEmbd, kFf), x);
    return ggml_mul(ctx, ggml_mul_mat(ctx, flat("blk.5.ffn_down_shexp.weight", kFf, kEmbd), ggml_swiglu_split(ctx, g, u)), open);
  }
};

TEST_F(SharedExpert, IsClaimedWithWhatLiesBetweenItsProducts) {
  const auto ours = [](ggml_backend_buffer*) { return true; };
  ggml_tensor* x = ggml_reshape_2d(ctx, cur, kEmbd, kTokens);
  ggml_tensor* out = shared(x);
  EXPECT_TRUE(claims_shared_expert(out, ours));
  EXPECT_TRUE(claims_shared_expert(out->src[0], ours));
  EXPECT_TRUE(claims_shared_expert(out->src[1], ours)) << "the sigmoid of its gate";
  EXPECT_FALSE(claims_shared_expert(ggml_add(ctx, out, x), ours));
  EXPECT_FALSE(claims_shared_expert(ggml_mul(ctx, x, x), ours));
  EXPECT_FALSE(claims_shared_expert(ggml_mul_mat(ctx, flat("blk.5.attn_q.weight", kEmbd, kEmbd), x), ours));
  EXPECT_FALSE(claims_shared_expert(out, [](ggml_backend_buffer*) { return false; }));
}

TEST_F(SharedExpert, ComesBeforeTheAnswersUnlessItReadsThem) {
  ggml_tensor* x = ggml_reshape_2d(ctx, cur, kEmbd, kTokens);
  ggml_tensor* out = down(ggml_swiglu_split(ctx, gate(), up()));
  combine(out);
  ggml_tensor* extra = shared(x);
  ggml_build_forward_expand(graph, extra);
  GraphPlan plan = plan_graph(graph, false);
  ASSERT_EQ(plan.ffns.size(), 1u);
  const EarlyNodes early = find_early_nodes(plan).at(0);
  EXPECT_THAT(early.nodes, ::testing::Contains(extra));
  int products = 0;
  for (const ggml_tensor* node : early.nodes) {
    products += node->op == GGML_OP_MUL_MAT;
    EXPECT_NE(node->op, GGML_OP_ADD) << "the experts' sum";
  }
  EXPECT_EQ(products, 4);

  // One that takes the experts' outputs in waits for them.
  ggml_tensor* sum = ggml_view_2d(ctx, out, kEmbd, kTokens, out->nb[2], 0);
  ggml_build_forward_expand(graph, shared(sum));
  plan = plan_graph(graph, false);
  EXPECT_EQ(find_early_nodes(plan).at(0).nodes.size(), early.nodes.size());
}

// --- the combine chain -------------------------------------------------------------------

constexpr int kViewOfIds = 1;  // a node, too

TEST_F(ExpertGraph, TakesTheCombineChainIn) {
  ggml_tensor* u = up();
  combine(down(ggml_swiglu_split(ctx, gate(), u)));
  const GraphPlan plan = plan_graph(graph, true);
  ASSERT_EQ(plan.ffns.size(), 1u);
  const ExpertFfn& f = plan.ffns[0];
  EXPECT_EQ(f.weights, weights);
  EXPECT_EQ(f.out, ggml_graph_node(graph, -1));
  EXPECT_EQ(f.nodes.size(), 4u + 1 + kUsed + kUsed - 1);
  EXPECT_EQ(local_steps(plan), kViewOfIds);
}

TEST_F(ExpertGraph, LeavesTheCombineChainAloneUnlessAsked) {
  ggml_tensor* u = up();
  combine(down(ggml_swiglu_split(ctx, gate(), u)));
  const GraphPlan plan = plan_graph(graph, false);
  ASSERT_EQ(plan.ffns.size(), 1u);
  EXPECT_EQ(plan.ffns[0].weights, nullptr);
  EXPECT_EQ(local_steps(plan), kViewOfIds + 1 + kUsed + kUsed - 1);
}

TEST_F(ExpertGraph, TheResidualAfterTheChainStaysOutside) {
  ggml_tensor* u = up();
  combine(down(ggml_swiglu_split(ctx, gate(), u)));
  ggml_tensor* sum = ggml_graph_node(graph, -1);
  ggml_build_forward_expand(graph, ggml_add(ctx, sum, input(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, kEmbd, kTokens), "residual")));
  const GraphPlan plan = plan_graph(graph, true);
  ASSERT_EQ(plan.ffns.size(), 1u);
  EXPECT_EQ(plan.ffns[0].out, sum);
  EXPECT_EQ(local_steps(plan), kViewOfIds + 1);
}

class NoCombine : public ExpertGraph {
 protected:
  ggml_tensor* experts() {
    ggml_tensor* u = up();
    return down(ggml_swiglu_split(ctx, gate(), u));
  }
  ggml_tensor* view(ggml_tensor* t, int i) { return ggml_view_2d(ctx, t, kEmbd, kTokens, t->nb[2], i * t->nb[1]); }
  void expect_not_taken(ggml_tensor* last) {
    ggml_build_forward_expand(graph, last);
    const GraphPlan plan = plan_graph(graph, true);
    ASSERT_EQ(plan.ffns.size(), 1u);
    EXPECT_EQ(plan.ffns[0].weights, nullptr);
    EXPECT_GT(local_steps(plan), 0);
  }
};

TEST_F(NoCombine, WithoutWeights) {
  ggml_tensor* out = experts();
  expect_not_taken(ggml_add(ctx, view(out, 0), view(out, 1)));
}

TEST_F(NoCombine, WithOneExpertAddedTwice) {
  ggml_tensor* out = ggml_mul(ctx, experts(), weights);
  expect_not_taken(ggml_add(ctx, view(out, 1), view(out, 1)));
}

TEST_F(NoCombine, OverSomeOfTheExpertsOnly) {
  expect_not_taken(ggml_cont(ctx, view(ggml_mul(ctx, experts(), weights), 0)));
}

TEST_F(NoCombine, WhenTheWeightedRowsAreReadElsewhere) {
  ggml_tensor* out = ggml_mul(ctx, experts(), weights);
  ggml_tensor* sum = ggml_add(ctx, view(out, 0), view(out, 1));
  expect_not_taken(ggml_add(ctx, sum, ggml_cont(ctx, view(out, 1))));
}

TEST_F(NoCombine, WithSomethingElseInTheChain) {
  ggml_tensor* out = ggml_mul(ctx, experts(), weights);
  expect_not_taken(ggml_add(ctx, ggml_scale(ctx, view(out, 0), 2), view(out, 1)));
}

TEST_F(NoCombine, WithARowOfItsOwnForEachPair) {
  cur = input(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, kEmbd, kUsed, kTokens), "cur");
  ggml_tensor* out = ggml_mul(ctx, experts(), weights);
  expect_not_taken(ggml_add(ctx, view(out, 0), view(out, 1)));
}

}  // namespace
}  // namespace kvasir::plugin
