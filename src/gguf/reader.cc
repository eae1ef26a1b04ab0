#include "gguf/reader.h"

#include <algorithm>
#include <bit>
#include <format>
#include <numeric>

#include "base/math.h"

namespace kvasir::gguf {
namespace {

constexpr std::uint32_t kMagic = 0x46554747;  // "GGUF"
constexpr std::uint64_t kMinKeyValueBytes = 8 + 4 + 1;       // key length, type, smallest value
constexpr std::uint64_t kMinTensorBytes = 8 + 4 + 4 + 8;     // name length, dims, type, offset

// Reads a source front to back through one window. The first failure sticks; callers look
// at status() once per record.
class WindowReader {
 public:
  explicit WindowReader(const ByteSource& source) : source_(source) {}

  std::uint64_t tell() const { return window_offset_ + at_; }
  std::uint64_t left() const { return std::min(source_.size(), kMaxHeaderBytes) - tell(); }
  const Status& status() const { return status_; }
  bool ok() const { return status_.has_value(); }
  void fail(std::string sentence) {
    if (ok()) status_ = fix_input(std::format("'{}' is not a valid GGUF file: {}.", source_.name(), sentence));
  }

  template <typename T>
  T get() {
    std::array<std::byte, sizeof(T)> raw{};
    get_bytes(raw);
    return ok() ? load_le<T>(raw.data()) : T{};
  }

  void get_bytes(std::span<std::byte> out) {
    if (!need(out.size())) return;
    while (!out.empty()) {
      if (at_ == window_.size() && !refill()) return;
      const std::size_t n = std::min(out.size(), window_.size() - at_);
      std::memcpy(out.data(), window_.data() + at_, n);
      at_ += n;
      out = out.subspan(n);
    }
  }

  // A string of at most `limit` bytes; `what` names it in the error.
  std::string get_string(std::uint64_t limit, std::string_view what) {
    const auto size = get<std::uint64_t>();
    if (ok() && size > limit) fail(std::format("{} of {} bytes is longer than the limit of {}", what, size, limit));
    if (!need(size)) return {};
    std::string text(static_cast<std::size_t>(size), '\0');
    get_bytes(std::as_writable_bytes(std::span(text.data(), text.size())));
    return text;
  }

  void skip(std::uint64_t size) {
    if (!need(size)) return;
    if (size <= window_.size() - at_) {
      at_ += static_cast<std::size_t>(size);
    } else {
      window_offset_ += at_ + size;
      window_.clear();
      at_ = 0;
    }
  }

 private:
  bool need(std::uint64_t size) {
    if (ok() && size > left())
      fail(source_.size() > kMaxHeaderBytes ? std::format("its header is larger than the limit of {} bytes",
                                                          kMaxHeaderBytes)
                                            : std::string("it ends inside its header; fetch it again"));
    return ok();
  }
  bool refill() {
    window_offset_ += window_.size();
    at_ = 0;
    window_.resize(static_cast<std::size_t>(
        std::min<std::uint64_t>(source_.read_ahead_bytes(), source_.size() - window_offset_)));
    status_ = source_.read_at(window_offset_, window_);
    return ok();
  }

  const ByteSource& source_;
  Bytes window_;
  std::uint64_t window_offset_ = 0;  // of window_[0] in the source
  std::size_t at_ = 0;
  Status status_;
};

// The number is checked before it becomes an enumerator: others are undefined behaviour.
gguf_type read_value_type(WindowReader& in, const KeyValue& kv) {
  const auto number = in.get<std::uint32_t>();
  if (in.ok() && number >= GGUF_TYPE_COUNT) in.fail(std::format("'{}' has the unknown value type {}", kv.key, number));
  return in.ok() ? static_cast<gguf_type>(number) : GGUF_TYPE_UINT8;
}

// Walks over one value, filling in everything of `kv` but the key.
void read_value(WindowReader& in, KeyValue& kv) {
  kv.type = read_value_type(in, kv);
  gguf_type unit = kv.type;
  if (kv.type == GGUF_TYPE_ARRAY) {
    unit = kv.element_type = read_value_type(in, kv);
    kv.count = in.get<std::uint64_t>();
    if (in.ok() && unit == GGUF_TYPE_ARRAY) return in.fail(std::format("'{}' is an array of arrays", kv.key));
    if (in.ok() && kv.count > kMaxArrayElements)
      return in.fail(std::format("array '{}' has {} elements; the limit is {}", kv.key, kv.count, kMaxArrayElements));
  }
  kv.data_offset = in.tell();
  if (!in.ok()) return;
  const std::size_t unit_bytes = scalar_bytes(unit);
  if (unit == GGUF_TYPE_STRING) {
    if (kv.count > in.left() / sizeof(std::uint64_t))
      return in.fail(std::format("array '{}' has more strings than the file has room for", kv.key));
    for (std::uint64_t i = 0; i < kv.count && in.ok(); ++i) {
      const auto size = in.get<std::uint64_t>();
      if (in.ok() && size > kMaxStringBytes)
        return in.fail(std::format("a string in '{}' has {} bytes; the limit is {}", kv.key, size, kMaxStringBytes));
      in.skip(size);
    }
  } else if (kv.type == GGUF_TYPE_ARRAY) {
    in.skip(kv.count * unit_bytes);  // cannot wrap: both are bounded above
  } else {
    in.get_bytes(std::span(kv.scalar).first(unit_bytes));
  }
  kv.data_bytes = in.tell() - kv.data_offset;
}

// Reads one tensor record; `offset` is still relative to the data section.
void read_tensor(WindowReader& in, TensorInfo& tensor) {
  tensor.name = in.get_string(kMaxTensorNameBytes, "a tensor name");
  const auto n_dims = in.get<std::uint32_t>();
  if (!in.ok()) return;
  if (n_dims > kMaxDims)
    return in.fail(std::format("tensor '{}' has {} dimensions; the limit is {}", tensor.name, n_dims, kMaxDims));
  for (std::uint32_t i = 0; i < n_dims; ++i) {
    tensor.ne[i] = in.get<std::uint64_t>();
    if (in.ok() && tensor.ne[i] == 0) return in.fail(std::format("tensor '{}' has an empty dimension", tensor.name));
  }
  const auto type_number = in.get<std::uint32_t>();
  tensor.offset = in.get<std::uint64_t>();
  if (!in.ok()) return;
  const auto type = type_from_number(type_number);
  if (!type)
    return in.fail(std::format("tensor '{}' has type {}, which this version of ggml does not know", tensor.name,
                               type_number));
  tensor.type = *type;
  if (tensor.ne[0] % static_cast<std::uint64_t>(ggml_blck_size(*type)) != 0)
    return in.fail(std::format("rows of tensor '{}' have {} values, not a multiple of {}'s block of {}", tensor.name,
                               tensor.ne[0], ggml_type_name(*type), ggml_blck_size(*type)));
  const auto nbytes = tensor_bytes(*type, tensor.ne);
  if (!nbytes) return in.fail(std::format("the size of tensor '{}' overflows", tensor.name));
  tensor.nbytes = *nbytes;
}

// Sorts indices by name; the first name that occurs twice, if any.
template <typename Record>
std::optional<std::string> sort_by_name(const std::vector<Record>& records, std::string Record::* name,
                                        std::vector<std::uint32_t>& order) {
  order.resize(records.size());
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::sort(order, {}, [&](std::uint32_t i) -> const std::string& { return records[i].*name; });
  const auto same = [&](std::uint32_t a, std::uint32_t b) { return records[a].*name == records[b].*name; };
  const auto twice = std::ranges::adjacent_find(order, same);
  if (twice == order.end()) return std::nullopt;
  return records[*twice].*name;
}

template <typename Record>
const Record* find_by_name(const std::vector<Record>& records, std::string Record::* name,
                           const std::vector<std::uint32_t>& order, std::string_view wanted) {
  const auto key = [&](std::uint32_t i) { return std::string_view(records[i].*name); };
  const auto at = std::ranges::lower_bound(order, wanted, {}, key);
  return at != order.end() && key(*at) == wanted ? &records[*at] : nullptr;
}

// A stored integer as u64; nullopt for other kinds and for negative values.
std::optional<std::uint64_t> to_uint(gguf_type type, const std::byte* p) {
  const auto signed_value = [](std::int64_t v) {
    return v < 0 ? std::nullopt : std::optional(static_cast<std::uint64_t>(v));
  };
  switch (type) {
    case GGUF_TYPE_UINT8: return load_le<std::uint8_t>(p);
    case GGUF_TYPE_UINT16: return load_le<std::uint16_t>(p);
    case GGUF_TYPE_UINT32: return load_le<std::uint32_t>(p);
    case GGUF_TYPE_UINT64: return load_le<std::uint64_t>(p);
    case GGUF_TYPE_INT8: return signed_value(load_le<std::int8_t>(p));
    case GGUF_TYPE_INT16: return signed_value(load_le<std::int16_t>(p));
    case GGUF_TYPE_INT32: return signed_value(load_le<std::int32_t>(p));
    case GGUF_TYPE_INT64: return signed_value(load_le<std::int64_t>(p));
    default: return std::nullopt;
  }
}

}  // namespace

std::size_t scalar_bytes(gguf_type type) {
  switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_BOOL: return 1;
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16: return 2;
    case GGUF_TYPE_UINT32:
    case GGUF_TYPE_INT32:
    case GGUF_TYPE_FLOAT32: return 4;
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
    case GGUF_TYPE_FLOAT64: return 8;
    default: return 0;
  }
}

Result<GgufFile> GgufFile::open(SourcePtr source) {
  GgufFile file;
  file.source_ = std::move(source);
  WindowReader in(*file.source_);
  if (file.source_->size() < sizeof kMagic || in.get<std::uint32_t>() != kMagic) {
    KVASIR_TRY(in.status());
    return fix_input(std::format("'{}' is not a GGUF file; give a model in llama.cpp's format.", file.name()));
  }

  file.version_ = in.get<std::uint32_t>();
  if (in.ok() && (std::byteswap(file.version_) == 2 || std::byteswap(file.version_) == 3))
    in.fail("it is big-endian; convert it to little-endian first");
  if (in.ok() && file.version_ != 2 && file.version_ != 3)
    in.fail(std::format("GGUF version {} is not known (2 and 3 are)", file.version_));
  const auto n_tensors = in.get<std::uint64_t>();
  const auto n_kv = in.get<std::uint64_t>();
  if (in.ok() && n_kv > kMaxKeyValues)
    in.fail(std::format("it has {} metadata values; the limit is {}", n_kv, kMaxKeyValues));
  if (in.ok() && n_tensors > kMaxTensors)
    in.fail(std::format("it has {} tensors; the limit is {}", n_tensors, kMaxTensors));
  if (in.ok() && n_kv * kMinKeyValueBytes + n_tensors * kMinTensorBytes > in.left())
    in.fail("it counts more metadata values and tensors than it has room for");
  KVASIR_TRY(in.status());

  file.key_values_.reserve(static_cast<std::size_t>(n_kv));
  for (std::uint64_t i = 0; i < n_kv; ++i) {
    KeyValue kv;
    kv.key = in.get_string(kMaxKeyBytes, "a metadata key");
    if (in.ok() && kv.key.empty()) in.fail("a metadata key is empty");
    if (in.ok()) read_value(in, kv);
    KVASIR_TRY(in.status());
    file.key_values_.push_back(std::move(kv));
  }
  if (const auto twice = sort_by_name(file.key_values_, &KeyValue::key, file.key_order_))
    in.fail(std::format("the metadata key '{}' occurs twice", *twice));
  if (const KeyValue* kv = file.find(GGUF_KEY_GENERAL_ALIGNMENT)) {
    file.alignment_ = kv->type == GGUF_TYPE_UINT32 ? load_le<std::uint32_t>(kv->scalar.data()) : 0;
    if (!std::has_single_bit(file.alignment_) || file.alignment_ > kMaxAlignment)
      in.fail(std::format("its alignment is not a power of two of at most {}", kMaxAlignment));
  }
  KVASIR_TRY(in.status());

  file.tensors_.reserve(static_cast<std::size_t>(n_tensors));
  for (std::uint64_t i = 0; i < n_tensors; ++i) {
    TensorInfo tensor;
    read_tensor(in, tensor);
    KVASIR_TRY(in.status());
    file.tensors_.push_back(std::move(tensor));
  }
  if (const auto twice = sort_by_name(file.tensors_, &TensorInfo::name, file.tensor_order_))
    in.fail(std::format("the tensor '{}' occurs twice", *twice));

  file.data_offset_ = *checked_align_up(in.tell(), file.alignment_);  // both far below 2^64
  for (TensorInfo& tensor : file.tensors_) {
    const auto begin = checked_add(file.data_offset_, tensor.offset);
    const auto end = begin ? checked_add(*begin, tensor.nbytes) : std::nullopt;
    if (tensor.offset % file.alignment_ != 0)
      in.fail(std::format("the data of tensor '{}' is not aligned to {}", tensor.name, file.alignment_));
    if (!end || *end > file.source_->size())
      in.fail(std::format("the data of tensor '{}' ends past the end of the file; fetch it again", tensor.name));
    KVASIR_TRY(in.status());
    tensor.offset = *begin;
  }
  KVASIR_TRY(in.status());
  return file;
}

const KeyValue* GgufFile::find(std::string_view key) const {
  return find_by_name(key_values_, &KeyValue::key, key_order_, key);
}

const TensorInfo* GgufFile::find_tensor(std::string_view name) const {
  return find_by_name(tensors_, &TensorInfo::name, tensor_order_, name);
}

std::optional<std::uint64_t> GgufFile::get_uint(std::string_view key) const {
  const KeyValue* kv = find(key);
  return kv ? to_uint(kv->type, kv->scalar.data()) : std::nullopt;
}

std::optional<bool> GgufFile::get_bool(std::string_view key) const {
  const KeyValue* kv = find(key);
  if (!kv || kv->type != GGUF_TYPE_BOOL) return std::nullopt;
  return kv->scalar[0] != std::byte{0};
}

Result<std::string> GgufFile::get_string(std::string_view key) const {
  const KeyValue* kv = find(key);
  if (!kv || kv->type != GGUF_TYPE_STRING)
    return fix_input(std::format("'{}' has no text under '{}'; it is not the kind of file needed here.", name(), key));
  std::string text(static_cast<std::size_t>(kv->data_bytes - sizeof(std::uint64_t)), '\0');
  KVASIR_TRY(source_->read_at(kv->data_offset + sizeof(std::uint64_t),
                              std::as_writable_bytes(std::span(text.data(), text.size()))));
  return text;
}

Result<std::vector<std::uint32_t>> GgufFile::get_u32_array(std::string_view key, std::uint64_t count_max) const {
  const KeyValue* kv = find(key);
  const std::size_t unit_bytes = kv ? scalar_bytes(kv->element_type) : 0;
  if (!kv || kv->type != GGUF_TYPE_ARRAY || unit_bytes == 0)
    return fix_input(std::format("'{}' has no list of numbers under '{}'; it is not the kind of file needed here.",
                                 name(), key));
  if (kv->count > count_max)
    return fix_input(std::format("'{}' is not valid: '{}' has {} elements, more than {}.", name(), key, kv->count,
                                 count_max));
  Bytes raw(static_cast<std::size_t>(kv->data_bytes));
  KVASIR_TRY(source_->read_at(kv->data_offset, raw));
  std::vector<std::uint32_t> out;
  out.reserve(static_cast<std::size_t>(kv->count));
  for (std::size_t i = 0; i < kv->count; ++i) {
    const auto value = to_uint(kv->element_type, raw.data() + i * unit_bytes);
    if (!value || *value > UINT32_MAX)
      return fix_input(std::format("'{}' is not valid: element {} of '{}' is not a number in [0, 2^32).", name(), i,
                                   key));
    out.push_back(static_cast<std::uint32_t>(*value));
  }
  return out;
}

Result<std::vector<std::string>> GgufFile::get_string_array(std::string_view key, std::uint64_t count_max) const {
  const KeyValue* kv = find(key);
  if (!kv || kv->type != GGUF_TYPE_ARRAY || kv->element_type != GGUF_TYPE_STRING)
    return fix_input(std::format("'{}' has no list of texts under '{}'; it is not the kind of file needed here.",
                                 name(), key));
  if (kv->count > count_max)
    return fix_input(std::format("'{}' is not valid: '{}' has {} elements, more than {}.", name(), key, kv->count,
                                 count_max));
  Bytes raw(static_cast<std::size_t>(kv->data_bytes));
  KVASIR_TRY(source_->read_at(kv->data_offset, raw));
  ByteCursor in(raw);
  std::vector<std::string> out;
  out.reserve(static_cast<std::size_t>(kv->count));
  for (std::uint64_t i = 0; i < kv->count; ++i) {
    const ByteSpan text = in.get_bytes(static_cast<std::size_t>(in.get<std::uint64_t>()));
    out.emplace_back(reinterpret_cast<const char*>(text.data()), text.size());
  }
  // The lengths were walked when the file was opened; they can differ only if it changed.
  if (!in.at_end()) return fatal(std::format("'{}' changed while it was read; do not change a model in use.", name()));
  return out;
}

Result<Bytes> GgufFile::get_raw_value(const KeyValue& kv) const {
  const std::size_t tag_bytes = kv.type == GGUF_TYPE_ARRAY ? 4 + 4 + 8 : 4;
  Bytes raw(tag_bytes + static_cast<std::size_t>(kv.data_bytes));
  KVASIR_TRY(source_->read_at(kv.data_offset - tag_bytes, raw));
  return raw;
}

}  // namespace kvasir::gguf
