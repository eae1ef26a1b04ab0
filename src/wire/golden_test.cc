// docs/protocol.md is the golden file: its examples are the encoder's bytes, its limits the
// constants. A change of either side alone fails here.

#include <gtest/gtest.h>

#include <charconv>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

#include "base/hex.h"
#include "wire/raw_framing.h"
#include "wire/samples.h"

namespace kvasir::wire {
namespace {

struct Document {
  std::map<std::string, std::string> examples;  // name -> hex digits
  std::map<std::string, std::uint64_t> limits;  // constant -> value
};

Document read_document() {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  std::ifstream in(std::string(source != nullptr ? source : ".") + "/docs/protocol.md");
  Document document;
  std::string* example = nullptr;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("```")) {
      example = line.starts_with("```hex ") ? &document.examples[line.substr(7)] : nullptr;
    } else if (example != nullptr) {
      for (const char c : line.substr(0, line.find(';')))
        if (c != ' ') *example += c;
    } else if (line.starts_with("| `k")) {
      const std::size_t name_end = line.find('`', 3);
      const std::size_t value = line.find("| ", name_end) + 2;
      std::uint64_t number = 0;
      std::from_chars(line.data() + value, line.data() + line.size(), number);
      document.limits[line.substr(3, name_end - 3)] = number;
    }
  }
  return document;
}

TEST(Golden, ExamplesOfTheDocumentAreTheEncodersBytes) {
  Document document = read_document();
  for (const SampleFrame& sample : sample_frames()) {
    ASSERT_TRUE(document.examples.contains(sample.name)) << sample.name;
    EXPECT_EQ(document.examples[sample.name], to_hex(sample.bytes)) << sample.name;
    document.examples.erase(sample.name);
  }
  EXPECT_TRUE(document.examples.empty()) << document.examples.begin()->first << " is no sample";
}

TEST(Golden, LimitsOfTheDocumentAreTheConstants) {
#define KVASIR_LIMIT(name) {#name, name}
  const std::map<std::string, std::uint64_t> constants = {
      KVASIR_LIMIT(kFramePayloadBytesMax), KVASIR_LIMIT(kResultPayloadBytesMax), KVASIR_LIMIT(kAnswerBytesMax),
      KVASIR_LIMIT(kExecRowsMax), KVASIR_LIMIT(kExecPairsMax), KVASIR_LIMIT(kRecipesMax), KVASIR_LIMIT(kHoldingsMax),
      KVASIR_LIMIT(kRangesMax), KVASIR_LIMIT(kHoldingsRangesMax), KVASIR_LIMIT(kTextBytesMax), KVASIR_LIMIT(kWidthMax),
      KVASIR_LIMIT(kLayersMax), KVASIR_LIMIT(kExpertsMax), KVASIR_LIMIT(kUploadBytesMax), KVASIR_LIMIT(kUploadChunkBytes),
      KVASIR_LIMIT(kRawUsedMax), KVASIR_LIMIT(kRawTokensMax),
      KVASIR_LIMIT(kRawPairsMax), KVASIR_LIMIT(kRawRequestBytesMax)};
#undef KVASIR_LIMIT
  EXPECT_EQ(read_document().limits, constants);
}

// The other direction: the document's bytes give the messages.
TEST(Golden, ExamplesDecode) {
  Document document = read_document();
  const auto payload = [&](const char* name, FrameType type) {
    Bytes bytes = from_hex(document.examples[name]).value_or(Bytes{});
    EXPECT_GE(bytes.size(), kHeaderBytes) << name;
    if (bytes.size() < kHeaderBytes) return Bytes{};
    const auto header = decode_header(std::span(bytes).first<kHeaderBytes>());
    EXPECT_TRUE(header) << name;
    bytes.erase(bytes.begin(), bytes.begin() + kHeaderBytes);
    EXPECT_EQ(header->type, type);
    EXPECT_EQ(header->payload_bytes, bytes.size());
    EXPECT_TRUE(checksum_matches(*header, bytes));
    return bytes;
  };
  EXPECT_EQ(*decode_hello(payload("HELLO", FrameType::kHello)), sample_hello());
  EXPECT_EQ(*decode_holdings(payload("HOLDINGS", FrameType::kHoldings)), sample_holdings());
  EXPECT_EQ(*decode_layer_recipe(payload("LAYER_RECIPE", FrameType::kLayerRecipe)), sample_recipe());
  EXPECT_EQ(decode_error(payload("ERROR", FrameType::kError))->code, ErrorCode::kBusy);
  EXPECT_EQ(decode_ping(payload("PING", FrameType::kPing))->sent_ns, 1'000'000'007u);
  EXPECT_EQ(decode_pong(payload("PONG", FrameType::kPong))->row_us, 180u);
  EXPECT_TRUE(payload("CANCEL", FrameType::kCancel).empty());
  EXPECT_TRUE(payload("DRAIN", FrameType::kDrain).empty());

  const Bytes upload_bytes = payload("UPLOAD", FrameType::kUpload);
  EXPECT_EQ(decode_upload(upload_bytes)->head, (UploadHead{.total_bytes = 4096, .offset = 0}));
  const Bytes exec_bytes = payload("EXEC", FrameType::kExec);
  const ExecView exec = *decode_exec(exec_bytes);
  EXPECT_EQ(exec.pair(1), (Pair{0, 9}));
  float row[2];
  decode_row(RowType::kF32, exec.rows, row);
  EXPECT_EQ(row[1], -2.0f);
  const Bytes fast_bytes = payload("EXEC-fast", FrameType::kExec);
  const ExecView fast = *decode_exec(fast_bytes);
  EXPECT_EQ(fast.weight(2), 0.25f);
  decode_row(RowType::kF16, fast.rows.last(4), row);
  EXPECT_EQ(row[1], 65504.0f);
  const Bytes result_bytes = payload("RESULT", FrameType::kResult);
  EXPECT_EQ(decode_result(result_bytes)->head.total_rows, 2u);
}

}  // namespace
}  // namespace kvasir::wire
