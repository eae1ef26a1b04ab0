#include "gguf/synth_tokenizer.h"

#include <array>
#include <format>
#include <string>
#include <vector>

namespace kvasir::gguf {
namespace {

// "Ġ" is how the byte-level alphabet writes a space.
constexpr std::array<std::pair<std::string_view, std::string_view>, 8> kMerges = {{
    {"t", "h"}, {"th", "e"}, {"h", "e"}, {"i", "n"}, {"a", "n"}, {"Ġ", "t"}, {"Ġ", "a"}, {"Ġ", "the"}}};
constexpr std::uint32_t kEndOfText = 256 + kMerges.size();

// Token types as llama.cpp numbers them.
constexpr std::int32_t kNormal = 1, kControl = 3, kUnused = 5;

std::string utf8(std::uint32_t code_point) {  // below U+0800
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  return {static_cast<char>(0xc0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3f))};
}

// GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 onwards.
std::vector<std::string> byte_tokens() {
  std::vector<std::string> tokens;
  std::uint32_t next = 256;
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    tokens.push_back(utf8(printable ? byte : next++));
  }
  return tokens;
}

}  // namespace

std::uint32_t synth_token_count() { return kEndOfText + 1; }

void add_synth_tokenizer(std::uint32_t n_vocab, HeaderBuilder& header) {
  std::vector<std::string> tokens = byte_tokens();
  std::vector<std::string> merges;
  for (const auto& [left, right] : kMerges) {
    merges.push_back(std::format("{} {}", left, right));
    tokens.push_back(std::format("{}{}", left, right));
  }
  std::vector<std::int32_t> types(tokens.size(), kNormal);
  tokens.emplace_back("<|endoftext|>");
  types.push_back(kControl);
  while (tokens.size() < n_vocab) {
    tokens.push_back(std::format("<|unused_{}|>", tokens.size()));
    types.push_back(kUnused);
  }
  header.add_string("tokenizer.ggml.model", "gpt2");
  header.add_string("tokenizer.ggml.pre", "gpt-2");
  header.add_string_array("tokenizer.ggml.tokens", tokens);
  header.add_i32_array("tokenizer.ggml.token_type", types);
  header.add_string_array("tokenizer.ggml.merges", merges);
  header.add_u32("tokenizer.ggml.bos_token_id", kEndOfText);
  header.add_u32("tokenizer.ggml.eos_token_id", kEndOfText);
  header.add_bool("tokenizer.ggml.add_bos_token", false);
}

}  // namespace kvasir::gguf
