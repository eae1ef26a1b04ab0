#include "gguf/synth.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <format>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "gguf/expert_tensor.h"
#include "gguf/header_builder.h"
#include "gguf/output_file.h"
#include "gguf/synth_blocks.h"
#include "gguf/synth_tokenizer.h"

namespace kvasir::gguf {
namespace {

// With these no size below comes near 2^63.
constexpr std::uint32_t kMaxSynthLayers = 1024;
constexpr std::uint32_t kMaxSynthExperts = 4096;
constexpr std::uint32_t kMaxSynthWidth = 64 * 1024;
constexpr std::uint32_t kMaxSynthVocab = 1u << 20;

constexpr std::uint64_t kChunkBytes = 2u << 20;  // what one thread makes and writes at once
constexpr unsigned kMaxThreads = 4;

enum class Fill : std::uint8_t { kWeights, kNorm, kBias, kHole };

struct Tensor {
  std::string name;
  ggml_type type{};
  Shape ne{1, 1, 1, 1};
  Fill fill{};
  float deviation = 0;  // of kWeights
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
};

// Heads of 64 or 128 values, four to a key-value head where they divide.
struct Attention {
  std::uint32_t head_width, n_head, n_head_kv;
};
Attention attention_of(std::uint32_t n_embd) {
  const std::uint32_t width = n_embd >= 1024 && n_embd % 128 == 0 ? 128 : 64;
  const std::uint32_t n_head = n_embd / width;
  return {width, n_head, n_head % 4 == 0 ? n_head / 4 : n_head % 2 == 0 ? n_head / 2 : n_head};
}

Status check_number(std::string_view flag, std::uint32_t value, std::uint32_t limit) {
  if (value >= 1 && value <= limit) return {};
  return fix_input(std::format("{} is {}; choose 1 to {}.", flag, value, limit));
}

Status check(const SynthOptions& o) {
  if (o.architecture != "qwen3moe" && o.architecture != "qwen2moe")
    return fix_input(std::format("cannot make a '{}' model; choose qwen3moe or qwen2moe.", o.architecture));
  KVASIR_TRY(check_number("--layers", o.n_layer, kMaxSynthLayers));
  KVASIR_TRY(check_number("--experts", o.n_expert, kMaxSynthExperts));
  KVASIR_TRY(check_number("--top-k", o.n_expert_used, o.n_expert));
  KVASIR_TRY(check_number("--n-embd", o.n_embd, kMaxSynthWidth));
  KVASIR_TRY(check_number("--n-ff", o.n_ff, kMaxSynthWidth));
  KVASIR_TRY(check_number("--context", o.n_context, 1u << 24));
  if (o.n_embd % 64 != 0)
    return fix_input(std::format("--n-embd is {}; choose a multiple of 64, the width of a head.", o.n_embd));
  if (o.n_ff_shared != 0) {
    if (o.architecture != "qwen2moe")
      return fix_input("only qwen2moe has a shared expert; leave --shared-ff out or choose --arch qwen2moe.");
    KVASIR_TRY(check_number("--shared-ff", o.n_ff_shared, kMaxSynthWidth));
  }
  const std::uint32_t n_tokens = synth_token_count();
  if (o.n_vocab != 0 && (o.n_vocab < n_tokens || o.n_vocab > kMaxSynthVocab))
    return fix_input(std::format("--vocab is {}; choose {} to {}.", o.n_vocab, n_tokens, kMaxSynthVocab));
  for (ggml_type type : {o.gate, o.up, o.down, o.dense})
    if (!can_synthesize(type))
      return fix_input(std::format("cannot make random {} weights; choose F32, F16, BF16, Q8_0, Q4_0, Q4_K, "
                                   "Q5_K, Q6_K, IQ4_XS or MXFP4.",
                                   ggml_type_name(type)));
  return {};
}

class TensorList {
 public:
  explicit TensorList(const SynthOptions& options) : o_(options) {}

  Result<std::vector<Tensor>> make(std::uint32_t n_vocab) {
    const Attention attention = attention_of(o_.n_embd);
    const std::uint64_t n_kv = std::uint64_t{attention.n_head_kv} * attention.head_width;
    const Fill expert_fill = o_.sparse ? Fill::kHole : Fill::kWeights;
    // Rows of the embedding are normalised before use; 1 lets later layers add to them.
    add("token_embd.weight", o_.dense, {o_.n_embd, n_vocab, 1, 1}, Fill::kWeights, 1.0f);
    add("output_norm.weight", GGML_TYPE_F32, {o_.n_embd, 1, 1, 1}, Fill::kNorm);
    weights("output.weight", o_.dense, {o_.n_embd, n_vocab, 1, 1});
    for (std::uint32_t i = 0; i < o_.n_layer; ++i) {
      const auto name = [i](std::string_view rest) { return std::format("blk.{}.{}", i, rest); };
      const auto norm = [&](std::string_view rest, std::uint64_t n) {
        add(name(rest), GGML_TYPE_F32, {n, 1, 1, 1}, Fill::kNorm);
      };
      norm("attn_norm.weight", o_.n_embd);
      weights(name("attn_q.weight"), o_.dense, {o_.n_embd, o_.n_embd, 1, 1});
      weights(name("attn_k.weight"), o_.dense, {o_.n_embd, n_kv, 1, 1});
      weights(name("attn_v.weight"), o_.dense, {o_.n_embd, n_kv, 1, 1});
      weights(name("attn_output.weight"), o_.dense, {o_.n_embd, o_.n_embd, 1, 1});
      if (o_.architecture == "qwen3moe") {
        norm("attn_q_norm.weight", attention.head_width);
        norm("attn_k_norm.weight", attention.head_width);
      } else {
        add(name("attn_q.bias"), GGML_TYPE_F32, {o_.n_embd, 1, 1, 1}, Fill::kBias);
        add(name("attn_k.bias"), GGML_TYPE_F32, {n_kv, 1, 1, 1}, Fill::kBias);
        add(name("attn_v.bias"), GGML_TYPE_F32, {n_kv, 1, 1, 1}, Fill::kBias);
      }
      norm("ffn_norm.weight", o_.n_embd);
      weights(name("ffn_gate_inp.weight"), GGML_TYPE_F32, {o_.n_embd, o_.n_expert, 1, 1});
      weights(name("ffn_gate_exps.weight"), o_.gate, {o_.n_embd, o_.n_ff, o_.n_expert, 1}, expert_fill);
      weights(name("ffn_up_exps.weight"), o_.up, {o_.n_embd, o_.n_ff, o_.n_expert, 1}, expert_fill);
      weights(name("ffn_down_exps.weight"), o_.down, {o_.n_ff, o_.n_embd, o_.n_expert, 1}, expert_fill);
      if (o_.architecture == "qwen2moe") {
        const std::uint64_t n_ff_shared = o_.n_ff_shared ? o_.n_ff_shared : o_.n_ff;
        weights(name("ffn_gate_inp_shexp.weight"), GGML_TYPE_F32, {o_.n_embd, 1, 1, 1});
        weights(name("ffn_gate_shexp.weight"), o_.dense, {o_.n_embd, n_ff_shared, 1, 1});
        weights(name("ffn_up_shexp.weight"), o_.dense, {o_.n_embd, n_ff_shared, 1, 1});
        weights(name("ffn_down_shexp.weight"), o_.dense, {n_ff_shared, o_.n_embd, 1, 1});
      }
    }
    for (Tensor& tensor : tensors_) {
      const auto nbytes = tensor_bytes(tensor.type, tensor.ne);
      if (!nbytes)
        return fix_input(std::format("'{}' would have rows of {} values, not a multiple of {}'s block of {}; "
                                     "choose another type or width.", tensor.name, tensor.ne[0], ggml_type_name(tensor.type),
                                     ggml_blck_size(tensor.type)));
      tensor.nbytes = *nbytes;
    }
    return std::move(tensors_);
  }

 private:
  void add(std::string name, ggml_type type, Shape ne, Fill fill, float deviation = 0) {
    tensors_.push_back({std::move(name), type, ne, fill, deviation, 0, 0});
  }
  // Keeps the spread of what goes through it: 1/sqrt(fan in).
  void weights(std::string name, ggml_type type, Shape ne, Fill fill = Fill::kWeights) {
    add(std::move(name), type, ne, fill, 1.0f / std::sqrt(static_cast<float>(ne[0])));
  }

  const SynthOptions& o_;
  std::vector<Tensor> tensors_;
};

void add_metadata(const SynthOptions& o, std::uint32_t n_vocab, HeaderBuilder& header) {
  const Attention attention = attention_of(o.n_embd);
  const auto key = [&](std::string_view rest) { return std::format("{}.{}", o.architecture, rest); };
  header.add_string("general.architecture", o.architecture);
  header.add_string("general.name", std::format("synthetic {} {}x{} top-{} {}x{} seed {}", o.architecture, o.n_layer,
                                                o.n_expert,
                                                o.n_expert_used, o.n_embd, o.n_ff, o.seed));
  header.add_u32("general.quantization_version", 2);
  header.add_u32(key("vocab_size"), n_vocab);
  header.add_u32(key("context_length"), o.n_context);
  header.add_u32(key("embedding_length"), o.n_embd);
  header.add_u32(key("block_count"), o.n_layer);
  header.add_u32(key("feed_forward_length"), o.n_ff);
  header.add_u32(key("attention.head_count"), attention.n_head);
  header.add_u32(key("attention.head_count_kv"), attention.n_head_kv);
  header.add_u32(key("attention.key_length"), attention.head_width);
  header.add_u32(key("attention.value_length"), attention.head_width);
  header.add_f32(key("attention.layer_norm_rms_epsilon"), 1e-6f);
  header.add_f32(key("rope.freq_base"), 1e6f);
  header.add_u32(key("expert_count"), o.n_expert);
  header.add_u32(key("expert_used_count"), o.n_expert_used);
  header.add_u32(key("expert_feed_forward_length"), o.n_ff);
  if (o.architecture == "qwen2moe")
    header.add_u32(key("expert_shared_feed_forward_length"), o.n_ff_shared ? o.n_ff_shared : o.n_ff);
  add_synth_tokenizer(n_vocab, header);
}

// A span of one tensor that one thread makes at once.
struct Chunk {
  const Tensor* tensor;
  std::uint64_t at, size;
  std::uint64_t key;
};

std::vector<Chunk> make_chunks(const std::vector<Tensor>& tensors, std::uint64_t seed) {
  std::vector<Chunk> chunks;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    if (tensor.fill == Fill::kHole) continue;
    const std::uint64_t block = ggml_type_size(tensor.type);
    const std::uint64_t step = kChunkBytes / block * block;
    // A chunk's bytes depend on the seed and its place, not on which thread makes it.
    for (std::uint64_t at = 0; at < tensor.nbytes; at += step)
      chunks.push_back({&tensor, at, std::min(step, tensor.nbytes - at),
                        seed * 0xd1342543de82ef95 + i * 0x9fb21c651e98df25 + at * 0x2545f4914f6cdd1d});
  }
  return chunks;
}

void fill_chunk(const Chunk& chunk, std::span<std::byte> out) {
  switch (chunk.tensor->fill) {
    case Fill::kWeights: return fill_random_weights(chunk.tensor->type, chunk.tensor->deviation, chunk.key, out);
    case Fill::kNorm: return fill_random_f32(0.9f, 1.1f, chunk.key, out);
    case Fill::kBias: return fill_random_f32(-0.1f, 0.1f, chunk.key, out);
    case Fill::kHole: return;
  }
}

Status write_chunks(const std::vector<Chunk>& chunks, std::uint64_t header_bytes, const OutputFile& out,
                    const Progress& progress) {
  std::uint64_t total = 0;
  for (const Chunk& chunk : chunks) total += chunk.size;
  std::atomic<std::size_t> next{0};
  std::atomic<std::uint64_t> done{0};
  Mutex mutex;
  Status status;
  const auto work = [&](bool reports) {
    Bytes buffer(kChunkBytes);
    for (std::size_t i = next++; i < chunks.size(); i = next++) {
      const std::span<std::byte> part(buffer.data(), static_cast<std::size_t>(chunks[i].size));
      fill_chunk(chunks[i], part);
      const Status written = out.write_at(header_bytes + chunks[i].tensor->offset + chunks[i].at, part);
      if (!written) {
        const MutexLock lock(mutex);
        if (status) status = written;
        next = chunks.size();
        return;
      }
      done += chunks[i].size;
      if (reports && progress) progress(done, total);
    }
  };
  {
    std::vector<std::jthread> helpers;
    const unsigned n_threads = std::clamp(std::thread::hardware_concurrency(), 1u, kMaxThreads);
    for (unsigned i = 1; i < n_threads; ++i) helpers.emplace_back(work, false);
    work(true);
  }
  return status;
}

}  // namespace

Status parse_synth_types(std::string_view text, SynthOptions& options) {
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find(','));
    text.remove_prefix(std::min(part.size() + 1, text.size()));
    const std::size_t equals = part.find('=');
    const std::string_view what = part.substr(0, equals);
    const auto type = type_from_name(equals == std::string_view::npos ? "" : part.substr(equals + 1));
    if (!type)
      return fix_input(std::format("'{}' is not WHAT=TYPE, e.g. gate=Q4_K,up=Q4_K,down=Q6_K,dense=Q8_0.", part));
    if (what == "gate" || what == "experts") options.gate = *type;
    if (what == "up" || what == "experts") options.up = *type;
    if (what == "down" || what == "experts") options.down = *type;
    if (what == "dense") options.dense = *type;
    if (what != "gate" && what != "up" && what != "down" && what != "dense" && what != "experts")
      return fix_input(std::format("there is no '{}' to give a type to; choose gate, up, down, experts or dense.",
                                   what));
  }
  return {};
}

Status write_synthetic(const SynthOptions& options, const std::string& path, const Progress& progress) {
  KVASIR_TRY(check(options));
  const std::uint32_t n_vocab = options.n_vocab ? options.n_vocab : synth_token_count();
  KVASIR_ASSIGN(std::vector<Tensor> tensors, TensorList(options).make(n_vocab));
  HeaderBuilder builder;
  add_metadata(options, n_vocab, builder);
  for (Tensor& tensor : tensors) tensor.offset = builder.add_tensor(tensor.name, tensor.type, tensor.ne);
  const Bytes header = builder.header();

  KVASIR_ASSIGN(OutputFile out, OutputFile::create(path));
  KVASIR_TRY(out.set_size(header.size() + builder.data_bytes()));
  KVASIR_TRY(out.write_at(0, header));
  KVASIR_TRY(write_chunks(make_chunks(tensors, options.seed), header.size(), out, progress));
  return out.commit();
}

}  // namespace kvasir::gguf
