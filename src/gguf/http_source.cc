#include "gguf/http_source.h"

#include <curl/curl.h>

#include <algorithm>
#include <charconv>
#include <format>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace kvasir::gguf {
namespace {

constexpr std::size_t kReadAheadBytes = 4u << 20;
constexpr long kMaxRedirects = 5;
constexpr long kStallBytesPerSecond = 1024;
constexpr long kPartialContent = 206, kOk = 200, kTooManyRequests = 429, kServerError = 500;

struct CloseHandle {
  void operator()(CURL* handle) const { curl_easy_cleanup(handle); }
};
using Handle = std::unique_ptr<CURL, CloseHandle>;

// "bytes 0-99/1234": the first byte and the size of the whole.
struct ContentRange {
  std::uint64_t begin = 0, total = 0;
};
std::optional<ContentRange> parse_content_range(std::string_view text) {
  const auto number = [&](std::uint64_t& out, char stop) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (error != std::errc{}) return false;
    if (stop == '\0') return true;
    if (text.empty() || text[0] != stop) return false;
    text.remove_prefix(1);
    return true;
  };
  constexpr std::string_view kUnit = "bytes ";
  if (!text.starts_with(kUnit)) return std::nullopt;
  text.remove_prefix(kUnit.size());
  ContentRange range;
  std::uint64_t last = 0;
  if (!number(range.begin, '-') || !number(last, '/') || !number(range.total, '\0')) return std::nullopt;
  return range;
}

// Without what may be secret: user names, passwords, signatures in the query.
std::string public_name(const std::string& url) {
  std::string name = url.substr(0, url.find_first_of("?#"));
  const std::size_t host = name.find("://") + 3;
  const std::size_t at = name.substr(0, name.find('/', host)).rfind('@');
  if (at != std::string::npos && at >= host) name.erase(host, at + 1 - host);
  return name;
}

// One answer as it arrives. Nothing of an answer without the wanted range is kept.
struct Answer {
  CURL* handle = nullptr;
  std::span<std::byte> out;
  std::size_t received = 0;
  std::uint64_t begin = 0;
  std::optional<ContentRange> range;
  std::string etag;
  bool is_wrong_range = false;

  static std::size_t on_header(char* data, std::size_t, std::size_t size, void* self) {
    auto& answer = *static_cast<Answer*>(self);
    const std::string_view line(data, size);
    const auto value_of = [&](std::string_view name) -> std::optional<std::string_view> {
      const auto same = [](char a, char b) { return (a | 0x20) == (b | 0x20); };
      if (line.size() <= name.size() || line[name.size()] != ':') return {};
      if (!std::ranges::equal(line.substr(0, name.size()), name, same)) return {};
      std::string_view value = line.substr(name.size() + 1);
      value.remove_prefix(std::min(value.find_first_not_of(' '), value.size()));
      return value.substr(0, value.find_last_not_of(" \r\n") + 1);
    };
    if (line.starts_with("HTTP/")) {  // of each redirect too
      answer.range.reset();
      answer.etag.clear();
    }
    if (const auto value = value_of("content-range")) answer.range = parse_content_range(*value);
    if (const auto value = value_of("etag")) answer.etag = *value;
    return size;
  }

  static std::size_t on_body(char* data, std::size_t, std::size_t size, void* self) {
    auto& answer = *static_cast<Answer*>(self);
    long status = 0;
    curl_easy_getinfo(answer.handle, CURLINFO_RESPONSE_CODE, &status);
    if (status >= 300 && status != kPartialContent) return size;  // an error page; the status tells
    if (status != kPartialContent || !answer.range || answer.range->begin != answer.begin ||
        size > answer.out.size() - answer.received) {
      answer.is_wrong_range = true;
      return 0;  // do not let a server without ranges send the whole model
    }
    std::memcpy(answer.out.data() + answer.received, data, size);
    answer.received += size;
    return size;
  }
};

class HttpSource final : public ByteSource {
 public:
  HttpSource(std::string url, const HttpOptions& options)
      : url_(std::move(url)), name_(public_name(url_)), is_https_(url_.starts_with("https:")), options_(options) {}

  Status open() {
    std::byte first;
    std::optional<Identity> seen;
    KVASIR_TRY(fetch(0, {&first, 1}, seen));
    identity_ = *seen;
    return {};
  }

  const std::string& name() const override { return name_; }
  std::uint64_t size() const override { return identity_.size; }
  std::size_t read_ahead_bytes() const override { return kReadAheadBytes; }

  Status read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    if (offset > size() || out.size() > size() - offset)
      return fix_input(std::format("'{}' ends at byte {} but bytes {}:{} are needed; the file is cut short.", name_,
                                   size(), offset, offset + out.size()));
    if (out.empty()) return {};
    std::optional<Identity> expected = identity_;
    return fetch(offset, out, expected);
  }

 private:
  // What must not change while the source is open.
  struct Identity {
    std::uint64_t size = 0;
    std::string etag;
    friend bool operator==(const Identity&, const Identity&) = default;
  };

  // Resumes where a broken transfer ended; gives up after attempts without progress. The
  // answers' identity must be `expected`, which the first one sets if it is empty.
  Status fetch(std::uint64_t offset, std::span<std::byte> out, std::optional<Identity>& expected) const {
    Handle handle = take_handle();
    int attempt = 0;
    while (true) {
      Answer answer{handle.get(), out, 0, offset, {}, {}, false};
      const CURLcode code = transfer(answer);
      long status = 0;
      curl_easy_getinfo(handle.get(), CURLINFO_RESPONSE_CODE, &status);
      if (answer.is_wrong_range || (code == CURLE_OK && status == kOk)) {
        if (expected) return changed();
        return fix_input(std::format("the server of '{}' serves no byte ranges; download the file and give its "
                                     "path.", name_));
      }
      if (answer.range && status == kPartialContent) {
        const Identity seen{answer.range->total, answer.etag};
        if (expected && *expected != seen) return changed();
        expected = seen;
      }
      offset += answer.received;
      out = out.subspan(answer.received);
      if (out.empty()) {
        give_handle(std::move(handle));
        return {};
      }
      const bool is_refused = code == CURLE_OK && status >= 400 && status < kServerError && status != kTooManyRequests;
      const bool is_hopeless = code == CURLE_UNSUPPORTED_PROTOCOL || code == CURLE_URL_MALFORMAT ||
                               code == CURLE_TOO_MANY_REDIRECTS || code == CURLE_PEER_FAILED_VERIFICATION;
      attempt = answer.received > 0 ? 0 : attempt + 1;
      if (is_refused || is_hopeless || attempt >= options_.attempts_max) {
        const std::string why =
            code == CURLE_OK ? std::format("the server answers with status {}", status) : curl_easy_strerror(code);
        if (is_refused || is_hopeless)
          return fix_input(std::format("cannot read '{}': {}; check the address.", name_, why));
        return retry_later(std::format("cannot read '{}': {}; try again later.", name_, why));
      }
      std::this_thread::sleep_for(options_.backoff * (1 << std::min(attempt, 10)));
    }
  }

  static CURLcode transfer(Answer& answer) {
    CURL* handle = answer.handle;
    const std::string range = std::format("{}-{}", answer.begin, answer.begin + answer.out.size() - 1);
    curl_easy_setopt(handle, CURLOPT_RANGE, range.c_str());
    curl_easy_setopt(handle, CURLOPT_HEADERFUNCTION, &Answer::on_header);
    curl_easy_setopt(handle, CURLOPT_HEADERDATA, &answer);
    curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, &Answer::on_body);
    curl_easy_setopt(handle, CURLOPT_WRITEDATA, &answer);
    return curl_easy_perform(handle);
  }

  std::unexpected<Error> changed() const {
    return fatal(std::format("'{}' changed on the server while it was read; start again.", name_));
  }

  // Handles keep their connections; one for each thread that reads at the same time.
  Handle take_handle() const {
    {
      const MutexLock lock(mutex_);
      if (!idle_.empty()) {
        Handle handle = std::move(idle_.back());
        idle_.pop_back();
        return handle;
      }
    }
    Handle handle(curl_easy_init());
    const char* protocols = is_https_ ? "https" : "http,https";
    curl_easy_setopt(handle.get(), CURLOPT_URL, url_.c_str());
    curl_easy_setopt(handle.get(), CURLOPT_PROTOCOLS_STR, protocols);
    curl_easy_setopt(handle.get(), CURLOPT_REDIR_PROTOCOLS_STR, protocols);
    curl_easy_setopt(handle.get(), CURLOPT_FOLLOWLOCATION, 1L);
    curl_easy_setopt(handle.get(), CURLOPT_MAXREDIRS, kMaxRedirects);
    curl_easy_setopt(handle.get(), CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(handle.get(), CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(options_.connect_timeout.count()));
    curl_easy_setopt(handle.get(), CURLOPT_LOW_SPEED_LIMIT, kStallBytesPerSecond);
    curl_easy_setopt(handle.get(), CURLOPT_LOW_SPEED_TIME, static_cast<long>(options_.stall_timeout.count()));
    curl_easy_setopt(handle.get(), CURLOPT_USERAGENT, "kvasir");
    return handle;
  }
  void give_handle(Handle handle) const {
    const MutexLock lock(mutex_);
    idle_.push_back(std::move(handle));
  }

  std::string url_;
  std::string name_;
  bool is_https_;
  HttpOptions options_;
  Identity identity_;  // set by open(), constant since
  mutable Mutex mutex_;
  mutable std::vector<Handle> idle_ KVASIR_GUARDED_BY(mutex_);
};

}  // namespace

bool is_url(const std::string& name) { return name.starts_with("http://") || name.starts_with("https://"); }

Result<SourcePtr> open_http_source(const std::string& url, const HttpOptions& options) {
  static const CURLcode initialised = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (initialised != CURLE_OK) return fatal("libcurl cannot be started; check its installation.");
  if (!is_url(url)) return fix_input(std::format("'{}' is not an http or https address.", public_name(url)));
  auto source = std::make_shared<HttpSource>(url, options);
  KVASIR_TRY(source->open());
  return source;
}

Result<SourcePtr> open_any_source(const std::string& name) {
  return is_url(name) ? open_http_source(name) : open_file_source(name);
}

}  // namespace kvasir::gguf
