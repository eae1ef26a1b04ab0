// UPLOAD.

#include "base/check.h"
#include "wire/codec.h"

namespace kvasir::wire {

Result<UploadView> decode_upload(ByteSpan payload) {
  ByteCursor in(payload);
  UploadView view;
  view.head.total_bytes = in.get<std::uint64_t>();
  view.head.offset = in.get<std::uint64_t>();
  const auto n_bytes = in.get<std::uint32_t>();
  const auto reserved = in.get<std::uint32_t>();
  if (n_bytes <= kUploadChunkBytes) view.bytes = in.get_bytes(n_bytes);
  if (!in.at_end() || view.bytes.empty() || reserved != 0)
    return retry_elsewhere("the peer sent a malformed UPLOAD: its length is wrong; drop the connection.");
  if (view.head.total_bytes > kUploadBytesMax || view.head.offset > view.head.total_bytes ||
      view.bytes.size() > view.head.total_bytes - view.head.offset)
    return retry_elsewhere(
        "the peer sent a malformed UPLOAD: its bytes lie outside the slice, or that is over the limit; drop the connection.");
  return view;
}

Bytes encode_upload_prefix(std::uint64_t request_id, const UploadHead& head, ByteSpan bytes, bool checksum) {
  KVASIR_CHECK(!bytes.empty() && bytes.size() <= kUploadChunkBytes && head.total_bytes <= kUploadBytesMax &&
               head.offset <= head.total_bytes && bytes.size() <= head.total_bytes - head.offset);
  Bytes frame(kHeaderBytes);
  ByteWriter out(frame);
  out.put(head.total_bytes);
  out.put(head.offset);
  out.put(static_cast<std::uint32_t>(bytes.size()));
  out.put(std::uint32_t{0});
  FrameHeader header{.type = FrameType::kUpload,
                     .request_id = request_id,
                     .payload_bytes = static_cast<std::uint32_t>(kUploadHeadBytes + bytes.size())};
  if (checksum) {
    header.flags = kFlagChecksum;
    header.checksum = payload_checksum(std::span(frame).subspan(kHeaderBytes), bytes);
  }
  encode_header(header, std::span(frame).first<kHeaderBytes>());
  return frame;
}

}  // namespace kvasir::wire
