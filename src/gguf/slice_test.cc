#include "gguf/slice.h"

#include <memory>

#include "gguf/slice_format.h"
#include "gguf/synth.h"
#include "gguf/test_support.h"
#include "gguf/verify.h"

namespace kvasir::gguf {
namespace {

using testing::HasSubstr;

SlicePlan random_plan(const MoeModel& model, std::mt19937& random) {
  SlicePlan plan;
  for (const LayerExperts& layer : model.layers()) {
    if (layer.group != ExpertGroup::kExps || random() % 3 == 0) continue;
    std::vector<std::uint32_t> ids;
    const unsigned density = 1 + static_cast<unsigned>(random() % 8);
    for (std::uint32_t id : layer.held.ids())
      if (random() % density == 0) ids.push_back(id);
    if (!ids.empty()) plan.layers[layer.layer] = ExpertSet::from_ids(ids);
  }
  if (plan.layers.empty()) plan.layers[model.layers().front().layer] = ExpertSet::from_ids({0});
  return plan;
}

// Every slab of the slice equals the model's, compared by ids and nothing the slicer computed.
void expect_slabs_of(const MoeModel& slice, const MoeModel& model) {
  for (const LayerExperts& mine : slice.layers()) {
    const LayerExperts* theirs = model.find(mine.layer, mine.group);
    ASSERT_TRUE(theirs);
    EXPECT_EQ(mine.n_expert, theirs->n_expert);
    EXPECT_EQ(*slice.layer_id(mine), *model.layer_id(*theirs));
    ASSERT_EQ(mine.tensors.size(), theirs->tensors.size());
    for (const ExpertTensor& tensor : mine.tensors) {
      const ExpertTensor* other = theirs->find(tensor.id.role, tensor.id.part);
      ASSERT_TRUE(other);
      EXPECT_EQ(tensor.name, other->name);
      EXPECT_EQ(tensor.type, other->type);
      EXPECT_EQ(tensor.per_expert, other->per_expert) << tensor.name;
      ASSERT_EQ(tensor.bytes_per_expert, other->bytes_per_expert);
      const auto hashes = slice.slab_hashes(tensor);
      ASSERT_TRUE(hashes) << message_of(hashes);
      const std::vector<std::uint32_t> ids = tensor.per_expert ? mine.held.ids() : std::vector<std::uint32_t>{0};
      ASSERT_EQ(hashes->size(), ids.size());
      for (std::uint32_t local = 0; local < ids.size(); ++local) {
        Bytes a(static_cast<std::size_t>(tensor.bytes_per_expert)), b(a.size());
        ASSERT_TRUE(slice.read_slab(tensor, local, a));
        ASSERT_TRUE(model.read_slab(*other, *theirs->held.rank(ids[local]), b));
        ASSERT_EQ(a, b) << tensor.name << " expert " << ids[local];
        Blake3 hash;
        hash.update(a);
        ASSERT_EQ(hash.finish(), (*hashes)[local]);
      }
    }
  }
}

// Opens a file with ggml's own reader, and checks that it sees the same tensors.
void expect_ggml_opens(const std::string& path, const MoeModel& slice) {
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> context(gguf_init_from_file(path.c_str(), {true, nullptr}),
                                                                    gguf_free);
  ASSERT_TRUE(context);
  ASSERT_EQ(static_cast<std::size_t>(gguf_get_n_tensors(context.get())), slice.files().tensors().size());
  for (const ModelFiles::Entry& entry : slice.files().tensors()) {
    const auto id = gguf_find_tensor(context.get(), entry.tensor->name.c_str());
    ASSERT_GE(id, 0);
    EXPECT_EQ(gguf_get_data_offset(context.get()) + gguf_get_tensor_offset(context.get(), id), entry.tensor->offset);
    EXPECT_EQ(gguf_get_tensor_size(context.get(), id), entry.tensor->nbytes);
    EXPECT_EQ(gguf_get_tensor_type(context.get(), id), entry.tensor->type);
  }
}

void round_trip(const MoeModel& model, int n_plans, unsigned seed) {
  const TempDir dir;
  std::mt19937 random(seed);
  for (int i = 0; i < n_plans; ++i) {
    const SlicePlan plan = random_plan(model, random);
    SCOPED_TRACE(plan.to_json());
    const auto same = SlicePlan::from_json(model, plan.to_json());
    ASSERT_TRUE(same) << message_of(same);
    ASSERT_EQ(same->layers, plan.layers);

    const auto layout = SliceLayout::make(model, plan);
    ASSERT_TRUE(layout) << message_of(layout);
    const std::string path = dir / "slice.gguf";
    std::uint64_t last = 0, total = 0;
    ASSERT_TRUE(write_slice(*layout, path, [&](std::uint64_t done, std::uint64_t of) { last = done, total = of; }));
    EXPECT_EQ(last, total);
    EXPECT_EQ(last, total_bytes(layout->runs()));
    EXPECT_EQ(dir.file_count(), 1u);

    const auto slice = MoeModel::open(path);
    ASSERT_TRUE(slice) << message_of(slice);
    EXPECT_EQ(slice->kind(), FileKind::kSlice);
    EXPECT_EQ(slice->model_name(), model.model_name());
    EXPECT_EQ(slice->n_embd(), model.n_embd());
    for (const auto& [layer, set] : plan.layers) EXPECT_EQ(slice->find(layer, ExpertGroup::kExps)->held, set);
    expect_slabs_of(*slice, model);
    expect_ggml_opens(path, *slice);
    const auto verified = verify(*slice, model);
    ASSERT_TRUE(verified) << message_of(verified);

    // The stream a hub would send is the same file, in whatever pieces it is asked for.
    const Bytes file = read_file(path);
    ASSERT_EQ(file.size(), layout->total_bytes());
    const auto hashes = hash_slabs(*layout);
    ASSERT_TRUE(hashes);
    const SourcePtr stream = make_slice_source(*layout, *hashes, "stream");
    ASSERT_EQ(stream->size(), file.size());
    for (int j = 0; j < 20; ++j) {
      const std::size_t begin = random() % (file.size() + 1), size = random() % (file.size() - begin + 1);
      Bytes part(size, std::byte{0xee});
      ASSERT_TRUE(stream->read_at(begin, part));
      ASSERT_TRUE(std::equal(part.begin(), part.end(), file.begin() + static_cast<std::ptrdiff_t>(begin)));
    }
    Bytes past(1);
    EXPECT_FALSE(stream->read_at(file.size(), past));
  }
}

TEST(Slice, RoundTripsOnTheRealModel) {
  const auto model = MoeModel::open(real_model_path());
  ASSERT_TRUE(model) << message_of(model);
  round_trip(*model, 12, 1);
}

TEST(Slice, RoundTripsWithSideTensorsAndTwoGroups) {
  const Bytes bytes = side_tensor_model();
  round_trip(open_memory("m.gguf", bytes), 60, 2);
}

TEST(Slice, RoundTripsOnSyntheticModels) {
  const TempDir dir;
  std::mt19937 random(3);
  for (ggml_type type : {GGML_TYPE_MXFP4, GGML_TYPE_Q5_K, GGML_TYPE_F16}) {
    SynthOptions options;
    options.n_layer = 1 + static_cast<std::uint32_t>(random() % 3);
    options.n_expert = 1 + static_cast<std::uint32_t>(random() % 20);
    options.n_expert_used = 1;
    options.gate = options.up = options.down = type;
    options.n_vocab = 300;
    ASSERT_TRUE(write_synthetic(options, dir / "m.gguf"));
    const auto model = MoeModel::open(dir / "m.gguf");
    ASSERT_TRUE(model) << message_of(model);
    round_trip(*model, 5, static_cast<unsigned>(random()));
  }
}

TEST(Slice, CarriesNoVocabularyAndTheOlderIntegers) {
  const auto model = MoeModel::open(real_model_path());
  const auto plan = SlicePlan::from_json(*model, R"({"layers": {"1": [[3,5],[20,21]], "3": [[7,8]]}})");
  ASSERT_TRUE(plan) << message_of(plan);
  const auto layout = SliceLayout::make(*model, *plan);
  const Bytes header = layout->header(std::vector<Hash>(layout->slab_count()));
  EXPECT_EQ(header.size(), layout->header_bytes());
  Bytes file = header;
  file.resize(layout->total_bytes());
  const auto gguf = GgufFile::open(make_memory_source("s", file));
  ASSERT_TRUE(gguf) << message_of(gguf);
  for (const KeyValue& kv : gguf->key_values()) EXPECT_FALSE(kv.key.starts_with("tokenizer.")) << kv.key;
  EXPECT_EQ(gguf->get_uint("qwen2moe.expert_count"), 32u);
  EXPECT_EQ(gguf->get_uint("qwen2moe.expert_used_count"), 4u);
  EXPECT_EQ(gguf->get_uint("general.file_type"), 15u);
  EXPECT_EQ(gguf->get_uint(kOldLayerBeginKey), 1u);
  EXPECT_EQ(gguf->get_uint(kOldLayerEndKey), 4u);
  EXPECT_EQ(gguf->get_uint(kOldExpertBeginKey), 3u);
  EXPECT_EQ(gguf->get_uint(kOldExpertEndKey), 21u);
  EXPECT_THAT(*gguf->get_u32_array(kSliceLayersKey, 9), testing::ElementsAre(1u, 3u));
  EXPECT_THAT(*gguf->get_u32_array("kvasir.expert_shard.experts.1", 9), testing::ElementsAre(3u, 4u, 20u));
  EXPECT_EQ(gguf->find_tensor("blk.1.ffn_gate_inp.weight"), nullptr);
  EXPECT_EQ(gguf->find_tensor("blk.1.ffn_up_shexp.weight"), nullptr);
}

TEST(Slice, ChunkExpertsFollowTheExpertsKept) {
  const Bytes bytes = side_tensor_model();  // 8 experts, 4 chunk experts
  const MoeModel model = open_memory("m.gguf", bytes);
  const LayerExperts& chexps = *model.find(0, ExpertGroup::kChexps);
  EXPECT_EQ(experts_of_group(model, chexps, ExpertSet::from_ids({0, 1, 7})), ExpertSet::from_ids({0, 3}));
  EXPECT_EQ(experts_of_group(model, chexps, ExpertSet::all(8)), ExpertSet::all(4));
}

TEST(Slice, ASliceCanBeCutFromASlice) {
  const TempDir dir;
  const auto model = MoeModel::open(real_model_path());
  const auto cut = [&](const MoeModel& from, const char* layers, const char* experts, const std::string& path) {
    const auto plan = SlicePlan::from_ranges(from, layers, experts);
    if (!plan) return message_of(plan);
    return message_of(write_slice(*SliceLayout::make(from, *plan), path));
  };
  ASSERT_EQ(cut(*model, "0:3", "4:20", dir / "a.gguf"), "no error");
  const auto a = MoeModel::open(dir / "a.gguf");
  ASSERT_EQ(cut(*a, "1,2", "5,18:20", dir / "b.gguf"), "no error");
  ASSERT_EQ(cut(*model, "1,2", "5,18:20", dir / "c.gguf"), "no error");
  EXPECT_EQ(read_file(dir / "b.gguf"), read_file(dir / "c.gguf"));
  EXPECT_THAT(cut(*a, "1", "3", dir / "d.gguf"), HasSubstr("does not hold expert 3 of layer 1 (it holds 4:20)"));
  EXPECT_THAT(cut(*a, "3", ":", dir / "d.gguf"), HasSubstr("layer 3"));
}

TEST(Slice, PlansAreRefusedInOneSentence) {
  const auto model = MoeModel::open(real_model_path());
  const auto ranges = [&](const char* layers, const char* experts) {
    return message_of(SlicePlan::from_ranges(*model, layers, experts));
  };
  const auto json = [&](std::string_view text) { return message_of(SlicePlan::from_json(*model, text)); };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {ranges("4", ":"), "layer 4 does not exist"},
      {ranges("0:5", ":"), "layer 4 does not exist"},
      {ranges("2:2", ":"), "is empty"},
      {ranges("3:1", ":"), "is empty"},
      {ranges("0", "0:33"), "expert 32 does not exist"},
      {ranges("0", "5:5"), "is empty"},
      {ranges("0", "7:3"), "is empty"},
      {ranges("0", ""), "is not a list of experts"},
      {ranges("x", ":"), "is not a list of layers"},
      {json(""), "not JSON"},
      {json("[]"), "\"layers\""},
      {json("{}"), "\"layers\""},
      {json(R"({"layers": []})"), "\"layers\""},
      {json(R"({"layers": {}})"), "names no layer"},
      {json(R"({"layers": {"0": [[0,1]]}, "more": 1})"), "one member"},
      {json(R"({"layers": {"0": []}})"), "needs a list of ranges"},
      {json(R"({"layers": {"0": 3}})"), "needs a list of ranges"},
      {json(R"({"layers": {"0": [3]}})"), "not a pair"},
      {json(R"({"layers": {"0": [[1,2,3]]}})"), "not a pair"},
      {json(R"({"layers": {"0": [[-1,2]]}})"), "not a pair"},
      {json(R"({"layers": {"0": [[0.5,2]]}})"), "not a pair"},
      {json(R"({"layers": {"0": [["0",2]]}})"), "not a pair"},
      {json(R"({"layers": {"0": [[2,2]]}})"), "is empty"},
      {json(R"({"layers": {"0": [[3,2]]}})"), "is empty"},
      {json(R"({"layers": {"0": [[0,33]]}})"), "expert 32 of layer 0 does not exist"},
      {json(R"({"layers": {"0": [[0,18446744073709551615]]}})"), "does not exist"},
      {json(R"({"layers": {"4": [[0,1]]}})"), "layer 4 does not exist"},
      {json(R"({"layers": {"0:2": [[0,1]]}})"), "not one layer's number"},
      {json(R"({"layers": {"-1": [[0,1]]}})"), "is not a list of layers"},
      {json(std::string(kMaxPlanBytes + 1, ' ')), "larger than"},
  };
  for (const auto& [message, expected] : cases) {
    EXPECT_THAT(message, HasSubstr(expected));
    expect_one_sentence(message);
  }
  // Layers without experts: skipped by "all", refused by name.
  const Bytes bytes = side_tensor_model();
  const MoeModel mixed = open_memory("m.gguf", bytes);
  EXPECT_EQ(SlicePlan::from_ranges(mixed, ":", ":")->layers.size(), 2u);
  EXPECT_THAT(message_of(SlicePlan::from_ranges(mixed, "2", ":")),
              HasSubstr("layer 2 of 'm.gguf' has no routed experts"));
}

TEST(Slice, OutputMayNotBeTheModel) {
  const TempDir dir;
  std::filesystem::copy(real_model_path(), dir / "m.gguf");
  std::filesystem::create_hard_link(dir / "m.gguf", dir / "link.gguf");
  const auto model = MoeModel::open(dir / "m.gguf");
  const auto layout = SliceLayout::make(*model, *SlicePlan::from_ranges(*model, ":", "0"));
  for (const char* name : {"m.gguf", "link.gguf"}) {
    const Status status = write_slice(*layout, dir / name);
    ASSERT_FALSE(status);
    EXPECT_THAT(status.error().message, HasSubstr("is the model itself"));
  }
  EXPECT_EQ(read_file(dir / "m.gguf"), read_file(real_model_path()));
}

TEST(Slice, AModelThatShrinksMeanwhileIsAnErrorAndLeavesNothing) {
  const TempDir dir;
  std::filesystem::copy(real_model_path(), dir / "m.gguf");
  const auto model = MoeModel::open(dir / "m.gguf");
  const auto layout = SliceLayout::make(*model, *SlicePlan::from_ranges(*model, ":", ":"));
  std::filesystem::resize_file(dir / "m.gguf", 9'000'000);
  const Status status = write_slice(*layout, dir / "s.gguf");
  ASSERT_FALSE(status);
  EXPECT_THAT(status.error().message, HasSubstr("became shorter"));
  EXPECT_EQ(dir.file_count(), 1u);
}

TEST(Verify, FindsEveryDifference) {
  const TempDir dir;
  const auto model = MoeModel::open(real_model_path());
  const auto layout = SliceLayout::make(*model, *SlicePlan::from_ranges(*model, "0:2", "3:6"));
  ASSERT_TRUE(write_slice(*layout, dir / "s.gguf"));
  const Bytes good = read_file(dir / "s.gguf");
  const auto verify_bytes = [&](const Bytes& bytes) {
    return message_of(verify(open_memory("s.gguf", bytes), *model));
  };
  ASSERT_EQ(verify_bytes(good), "no error");

  Bytes bad = good;
  const SliceTensor& up = layout->tensors()[2];
  bad[static_cast<std::size_t>(up.offset + up.slab_bytes + 9)] ^= std::byte{16};
  EXPECT_THAT(verify_bytes(bad), HasSubstr("byte 9 of expert 4 of 'blk.0.ffn_up_exps.weight' differs"));
  bad = good;
  bad[static_cast<std::size_t>(layout->total_bytes() - 1)] ^= std::byte{1};
  EXPECT_THAT(verify_bytes(bad), HasSubstr("expert 5 of 'blk.1.ffn_up_exps.weight' differs"));

  std::vector<Hash> hashes = *hash_slabs(*layout);
  hashes[7][0] ^= std::byte{1};
  bad = layout->header(hashes);
  bad.insert(bad.end(), good.begin() + static_cast<std::ptrdiff_t>(bad.size()), good.end());
  EXPECT_THAT(verify_bytes(bad), HasSubstr("hash recorded for expert 4 of 'blk.0.ffn_up_exps.weight' is wrong"));

  // Another model with the same shapes.
  SynthOptions options;
  options.n_layer = 4;
  options.n_expert = 32;
  ASSERT_TRUE(write_synthetic(options, dir / "other.gguf"));
  const auto other = MoeModel::open(dir / "other.gguf");
  EXPECT_THAT(message_of(verify(open_memory("s.gguf", good), *other)), HasSubstr("the id of layer 0 (exps) differs"));
  EXPECT_THAT(message_of(verify(*model, *model)), HasSubstr("is a whole model"));
}

TEST(Slice, OpensInPythonGguf) {
  const TempDir dir;
  const auto model = MoeModel::open(real_model_path());
  const auto layout = SliceLayout::make(*model, *SlicePlan::from_ranges(*model, "1:3", "0,5:7"));
  ASSERT_TRUE(write_slice(*layout, dir / "s.gguf"));
  std::ofstream(dir / "check.py") << R"(
import sys
from gguf import GGUFReader
slice, model = GGUFReader(sys.argv[1]), GGUFReader(sys.argv[2])
whole = {t.name: t for t in model.tensors}
assert len(slice.tensors) == 6, len(slice.tensors)
for t in slice.tensors:
    layer = int(t.name.split('.')[1])
    ids = slice.get_field(f'kvasir.expert_shard.experts.{layer}').contents()
    assert ids == [0, 5, 6], ids
    assert t.tensor_type == whole[t.name].tensor_type
    assert (t.data == whole[t.name].data[ids]).all(), t.name
    hashes = slice.get_field('kvasir.expert_shard.slab_blake3.' + t.name).contents()
    assert len(hashes) == 3 and all(len(h) == 64 for h in hashes)
print('ok')
)";
  const std::string command = std::format("python3 '{}' '{}' '{}'", dir / "check.py", dir / "s.gguf",
                                          real_model_path());
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
}

}  // namespace
}  // namespace kvasir::gguf
