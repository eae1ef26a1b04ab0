// The numerics id: a fixed FFN in four weight types, computed for 1 and for 12 rows (below
// and above the threshold at which ggml's kernels change), hashed bit for bit. Weights are
// made from integers alone, so that only the kernels can differ between two machines.
#include <blake3.h>

#include <cstring>
#include <vector>

#include "ffn/device.h"
#include "ffn/engine.h"

namespace kvasir::ffn {
namespace {

constexpr std::uint32_t kWidth = 512;  // n_embd = n_ff: two blocks of every type
constexpr std::uint32_t kExperts = 2;
constexpr std::uint32_t kRowCounts[] = {1, 12};

class Noise {
 public:
  std::uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    return state_ ^= state_ << 5;
  }

 private:
  std::uint32_t state_ = 0x9e3779b9;
};

// Random blocks with the f16 scales set by hand, so that no value is NaN or infinite.
std::vector<std::uint8_t> random_blocks(ggml_type type, std::size_t bytes, Noise& noise) {
  constexpr std::uint16_t kSmallF16 = 0x1400;  // 2^-10
  std::vector<std::uint8_t> data(bytes);
  for (std::uint8_t& byte : data) byte = static_cast<std::uint8_t>(noise.next() >> 24);
  const auto set_u16 = [&](std::size_t at, std::uint16_t value) { std::memcpy(&data[at], &value, sizeof value); };
  const std::size_t block = ggml_type_size(type);
  for (std::size_t at = 0; at < bytes; at += block) {
    switch (type) {
      case GGML_TYPE_Q4_K:  // d, dmin, 12 scales, 128 nibble pairs
        set_u16(at, kSmallF16);
        set_u16(at + 2, kSmallF16);
        break;
      case GGML_TYPE_Q6_K: set_u16(at + block - 2, kSmallF16 - 0x0c00); break;  // d is last; 2^-13
      case GGML_TYPE_Q8_0: set_u16(at, kSmallF16); break;
      default:  // F16: sign and mantissa random, exponent of 2^-4
        set_u16(at, static_cast<std::uint16_t>(data[at] | ((data[at + 1] << 8) & 0x8300) | 0x2c00));
        break;
    }
  }
  return data;
}

Status hash_ffn(Engine& engine, ggml_backend_dev_t device, ggml_type type, blake3_hasher& hasher) {
  Noise noise;
  ggml_context_ptr context(ggml_init({ggml_tensor_overhead() * 4, nullptr, true}));
  if (!context) return retry_later("There is no memory left for the numerics probe.");
  ExpertTensors tensors;
  tensors.n_local = kExperts;
  for (ggml_tensor** t : {&tensors.gate, &tensors.up, &tensors.down})
    *t = ggml_new_tensor_3d(context.get(), type, kWidth, kWidth, kExperts);
  ggml_backend_buffer_ptr buffer(
      ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_dev_buffer_type(device)));
  if (!buffer) return retry_later("There is no device memory left for the numerics probe.");
  for (ggml_tensor* t : {tensors.gate, tensors.up, tensors.down}) {
    const std::vector<std::uint8_t> data = random_blocks(type, ggml_nbytes(t), noise);
    ggml_backend_tensor_set(t, data.data(), 0, data.size());
  }

  const wire::Recipe recipe{.n_embd = kWidth, .n_ff = kWidth, .n_expert = kExperts};
  KVASIR_TRY(Engine::check(recipe, tensors));
  for (std::uint32_t n_rows : kRowCounts) {
    std::vector<float> rows(std::size_t{n_rows} * kWidth), out(rows.size());
    for (float& value : rows) value = static_cast<float>(static_cast<std::int32_t>(noise.next()) >> 8) * 0x1p-23f;
    std::vector<LocalPair> pairs(n_rows);
    for (std::uint32_t i = 0; i < n_rows; ++i) pairs[i] = {i, 1};
    KVASIR_TRY(engine.compute(recipe, tensors, {rows.data(), kWidth, n_rows}, pairs, out.data()));
    blake3_hasher_update(&hasher, out.data(), out.size() * sizeof(float));
  }
  engine.forget_graphs();
  return {};
}

}  // namespace

Result<wire::NumericsId> numerics_id(const std::string& device_name) {
  KVASIR_ASSIGN(ggml_backend_dev_t device, find_device(device_name));
  KVASIR_ASSIGN(const std::unique_ptr<Engine> engine, Engine::create({.device = device_name}));
  wire::NumericsId id;
  id.ggml_version = ggml_version();
  id.cpu_variant = describe_build(device).substr(0, wire::kTextBytesMax);
  blake3_hasher hasher;
  blake3_hasher_init(&hasher);
  for (ggml_type type : {GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0, GGML_TYPE_F16})
    KVASIR_TRY(hash_ffn(*engine, device, type, hasher));
  blake3_hasher_finalize(&hasher, reinterpret_cast<std::uint8_t*>(id.probe.data()), id.probe.size());
  return id;
}

}  // namespace kvasir::ffn
