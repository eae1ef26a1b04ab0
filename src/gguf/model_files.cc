#include "gguf/model_files.h"

#include <algorithm>
#include <charconv>
#include <format>

namespace kvasir::gguf {
namespace {

constexpr std::string_view kSplitNo = "split.no";
constexpr std::string_view kSplitCount = "split.count";
constexpr std::size_t kPartDigits = 5;

std::optional<std::uint32_t> parse_digits(std::string_view text) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

std::optional<PartName> PartName::parse(std::string_view name) {
  const std::size_t query = name.find('?');
  const std::string_view path = name.substr(0, query);
  constexpr std::string_view kSuffix = ".gguf", kOf = "-of-";
  constexpr std::size_t kTailBytes = 1 + kPartDigits + kOf.size() + kPartDigits + kSuffix.size();
  if (!path.ends_with(kSuffix) || path.size() <= kTailBytes) return std::nullopt;
  const std::string_view tail = path.substr(path.size() - kTailBytes);
  if (tail[0] != '-' || tail.substr(1 + kPartDigits, kOf.size()) != kOf) return std::nullopt;
  const auto part = parse_digits(tail.substr(1, kPartDigits));
  const auto n_parts = parse_digits(tail.substr(1 + kPartDigits + kOf.size(), kPartDigits));
  if (!part || !n_parts || *part < 1 || *part > *n_parts) return std::nullopt;
  const std::size_t prefix_size = path.size() - kTailBytes;
  return PartName{std::string(name.substr(0, prefix_size)), *part, *n_parts,
                  std::string(name.substr(path.size() - kSuffix.size()))};
}

std::string PartName::format(std::uint32_t part_number) const {
  return std::format("{}-{:05}-of-{:05}{}", prefix, part_number, n_parts, tail);
}

Result<ModelFiles> ModelFiles::open(const std::string& name, const SourceOpener& opener) {
  KVASIR_ASSIGN(SourcePtr named_source, opener(name));
  KVASIR_ASSIGN(GgufFile named, GgufFile::open(std::move(named_source)));
  ModelFiles set;
  const std::uint64_t n_parts = named.get_uint(kSplitCount).value_or(1);
  if (n_parts <= 1) {
    set.files_.push_back(std::move(named));
    KVASIR_TRY(set.merge());
    return set;
  }
  if (n_parts > kMaxParts)
    return fix_input(std::format("'{}' is one of {} parts; at most {} are supported, merge them first.", name, n_parts,
                                 kMaxParts));
  const auto pattern = PartName::parse(name);
  if (!pattern || pattern->n_parts != n_parts)
    return fix_input(std::format("'{}' is one of {} parts but is not named like model-00001-of-{:05}.gguf, so "
                                 "the others cannot be found; give the parts their original names.",
                                 name, n_parts, n_parts));
  for (std::uint32_t i = 1; i <= pattern->n_parts; ++i) {
    const std::string part_name = pattern->format(i);
    if (i == pattern->part) {
      set.files_.push_back(std::move(named));
    } else {
      auto source = opener(part_name);
      if (!source)
        return fix_input(std::format("part {} of {} of the model is missing: {}", i, n_parts, source.error().message));
      KVASIR_ASSIGN(GgufFile part, GgufFile::open(*std::move(source)));
      set.files_.push_back(std::move(part));
    }
    const GgufFile& part = set.files_.back();
    if (part.get_uint(kSplitNo) != i - 1 || part.get_uint(kSplitCount) != n_parts)
      return fix_input(std::format("'{}' says it is not part {} of {}; the parts' names are mixed up.", part_name, i,
                                   n_parts));
  }
  KVASIR_TRY(set.merge());
  return set;
}

Result<ModelFiles> ModelFiles::from_source(SourcePtr source) {
  KVASIR_ASSIGN(GgufFile file, GgufFile::open(std::move(source)));
  ModelFiles set;
  set.files_.push_back(std::move(file));
  KVASIR_TRY(set.merge());
  return set;
}

Status ModelFiles::merge() {
  for (std::uint32_t f = 0; f < files_.size(); ++f)
    for (const TensorInfo& tensor : files_[f].tensors()) tensors_.push_back({f, &tensor});
  if (files_.size() == 1) return {};  // the reader has looked for duplicates
  std::vector<std::string_view> names;
  names.reserve(tensors_.size());
  for (const Entry& entry : tensors_) names.push_back(entry.tensor->name);
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  if (twice != names.end())
    return fix_input(std::format("tensor '{}' is in two parts of '{}'; the parts belong to different models.", *twice,
                                 files_.front().name()));
  return {};
}

std::uint64_t ModelFiles::total_bytes() const {
  std::uint64_t total = 0;
  for (const GgufFile& file : files_) total += file.source().size();
  return total;
}

}  // namespace kvasir::gguf
