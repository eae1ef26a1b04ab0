#include "plugin/buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/check.h"
#include "gguf/expert_tensor.h"
#include "gguf/placeholder.h"

namespace kvasir::plugin {
namespace {

constexpr std::size_t kAlignment = 64;  // as ggml's CPU buffers (TENSOR_ALIGNMENT, wide vector loads)
// Smaller allocations gain nothing from huge pages and would each be rounded up to one.
constexpr std::size_t kHugePageBytes = 2u << 20;

struct Memory {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  bool owned = false;  // an anonymous mapping of ours
};

ggml_backend_buffer_type g_type{}, g_staging_type{};
bool g_keep_weights = true;
BufferFreed g_on_freed = nullptr;

Memory& memory(ggml_backend_buffer_t buffer) { return *static_cast<Memory*>(buffer->context); }

void free_buffer(ggml_backend_buffer_t buffer) noexcept {
  Memory* m = &memory(buffer);
  if (g_on_freed != nullptr) g_on_freed(m->data, m->bytes);
  if (m->owned) munmap(m->data, m->bytes);
  delete m;
}

void* get_base(ggml_backend_buffer_t buffer) noexcept { return memory(buffer).data; }

std::byte* at(const ggml_tensor* tensor, std::size_t offset) { return static_cast<std::byte*>(tensor->data) + offset; }

void memset_tensor(ggml_backend_buffer_t, ggml_tensor* t, std::uint8_t value, std::size_t offset, std::size_t size) noexcept {
  std::memset(at(t, offset), value, size);
}
bool is_expert_weight(const ggml_tensor* t) noexcept {
  const auto name = gguf::parse_expert_tensor(t->name);
  return name && name->part == gguf::ExpertPart::kWeight;
}
void set_tensor(ggml_backend_buffer_t, ggml_tensor* t, const void* data, std::size_t offset, std::size_t size) noexcept {
  if (!g_keep_weights && is_expert_weight(t)) {
    if (offset >= gguf::kPlaceholderBytes) return;
    size = std::min(size, gguf::kPlaceholderBytes - offset);
  }
  std::memcpy(at(t, offset), data, size);
}
void get_tensor(ggml_backend_buffer_t, const ggml_tensor* t, void* data, std::size_t offset, std::size_t size) noexcept {
  std::memcpy(data, at(t, offset), size);
}
bool cpy_tensor(ggml_backend_buffer_t, const ggml_tensor* src, ggml_tensor* dst) noexcept {
  const ggml_backend_buffer* from = src->view_src != nullptr ? src->view_src->buffer : src->buffer;
  if (from == nullptr || !ggml_backend_buft_is_host(from->buft)) return false;
  std::memcpy(dst->data, src->data, ggml_nbytes(src));
  return true;
}
void clear(ggml_backend_buffer_t buffer, std::uint8_t value) noexcept { std::memset(memory(buffer).data, value, memory(buffer).bytes); }

ggml_backend_buffer_t wrap(Memory m, ggml_backend_buffer_type_t type) noexcept {
  Memory* context = new (std::nothrow) Memory(m);
  if (context == nullptr) return nullptr;
  ggml_backend_buffer_i table{};
  table.free_buffer = free_buffer;
  table.get_base = get_base;
  table.memset_tensor = memset_tensor;
  table.set_tensor = set_tensor;
  table.get_tensor = get_tensor;
  table.cpy_tensor = cpy_tensor;
  table.clear = clear;
  return ggml_backend_buffer_init(type, table, context, m.bytes);
}

const char* type_name(ggml_backend_buffer_type_t) noexcept { return "Kvasir"; }
std::size_t type_alignment(ggml_backend_buffer_type_t) noexcept { return kAlignment; }
bool type_is_host(ggml_backend_buffer_type_t type) noexcept { return type == &g_staging_type || g_keep_weights; }
const char* staging_name(ggml_backend_buffer_type_t) noexcept { return "Kvasir_Staging"; }

ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, std::size_t size) noexcept {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  // Weights are read front to back: fewer page-table walks read up to 1.5 times faster. Those that
  // are not kept must not cost a huge page for each first byte.
  if (size >= kHugePageBytes) madvise(data, size, g_keep_weights ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  return wrap({static_cast<std::byte*>(data), size, true}, type);
}

}  // namespace

ggml_backend_buffer_type_t init_buffer_type(ggml_backend_dev_t device, BufferFreed on_freed, bool keep_weights) {
  KVASIR_CHECK(g_type.device == nullptr);
  g_on_freed = on_freed;
  g_type.iface.get_name = type_name;
  g_type.iface.alloc_buffer = type_alloc;
  g_type.iface.get_alignment = type_alignment;
  g_type.iface.is_host = type_is_host;
  g_type.device = device;
  g_keep_weights = keep_weights;
  g_staging_type = g_type;
  g_staging_type.iface.get_name = staging_name;
  return &g_type;
}

ggml_backend_buffer_type_t staging_buffer_type() { return &g_staging_type; }

bool is_our_buffer_type(ggml_backend_buffer_type_t type) { return type == &g_type; }
bool is_our_buffer(ggml_backend_buffer* buffer) { return buffer != nullptr && buffer->buft == &g_type; }
ggml_backend_buffer_t buffer_from_host_memory(void* data, std::size_t bytes) {
  return wrap({static_cast<std::byte*>(data), bytes, false}, &g_type);
}

}  // namespace kvasir::plugin
