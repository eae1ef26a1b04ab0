#include "cli/llama_server.h"

#include <curl/curl.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <format>
#include <limits>
#include <nlohmann/json.hpp>

#include "cli/interrupt.h"

namespace kvasir::cli {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr auto kStartTimeout = std::chrono::seconds(120);  // a large model from a slow disk
constexpr auto kStopGrace = std::chrono::seconds(10);
constexpr long kStallSeconds = 120;                        // without one byte of an answer
constexpr std::size_t kAnswerBytesMax = 64u << 20;
constexpr int kContextTokens = 512;

struct CurlFree {
  void operator()(CURL* handle) const { curl_easy_cleanup(handle); }
  void operator()(curl_slist* list) const { curl_slist_free_all(list); }
};

// Hands each "data: …" line of an event stream on as JSON; keeps what is no event, for errors.
class EventReader {
 public:
  explicit EventReader(std::function<void(const json&)> on_event) : on_event_(std::move(on_event)) {}

  std::size_t take(std::string_view bytes) {
    total_ += bytes.size();
    if (total_ > kAnswerBytesMax) return 0;
    line_ += bytes;
    for (std::size_t end; (end = line_.find('\n')) != std::string::npos; line_.erase(0, end + 1)) {
      const std::string_view line = std::string_view(line_).substr(0, end);
      if (!line.starts_with("data: ")) {
        other_ += line;
        continue;
      }
      const json event = json::parse(line.substr(6), nullptr, /*allow_exceptions=*/false);
      if (event.is_object()) on_event_(event);
    }
    return bytes.size();
  }
  std::string other() const { return other_ + line_; }

 private:
  std::function<void(const json&)> on_event_;
  std::string line_, other_;
  std::size_t total_ = 0;
};

std::size_t on_bytes(char* data, std::size_t size, std::size_t count, void* reader) {
  // A short count makes curl fail the transfer; no exception may pass through it.
  try {
    return static_cast<EventReader*>(reader)->take({data, size * count});
  } catch (const std::exception&) {
    return 0;
  }
}

int stop_if_interrupted(void*, curl_off_t, curl_off_t, curl_off_t, curl_off_t) { return interrupted() ? 1 : 0; }

// POST (or GET where body is empty); the HTTP status.
Result<long> request(const std::string& socket, const std::string& path, const std::string& body, EventReader& reader) {
  const std::unique_ptr<CURL, CurlFree> curl(curl_easy_init());
  if (!curl) return fatal("libcurl cannot be used here.");
  const std::string url = "http://localhost" + path;
  std::unique_ptr<curl_slist, CurlFree> headers(curl_slist_append(nullptr, "Content-Type: application/json"));
  curl_easy_setopt(curl.get(), CURLOPT_UNIX_SOCKET_PATH, socket.c_str());
  curl_easy_setopt(curl.get(), CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl.get(), CURLOPT_PROXY, "");
  curl_easy_setopt(curl.get(), CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl.get(), CURLOPT_LOW_SPEED_LIMIT, 1L);
  curl_easy_setopt(curl.get(), CURLOPT_LOW_SPEED_TIME, kStallSeconds);
  curl_easy_setopt(curl.get(), CURLOPT_WRITEFUNCTION, on_bytes);
  curl_easy_setopt(curl.get(), CURLOPT_WRITEDATA, &reader);
  curl_easy_setopt(curl.get(), CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(curl.get(), CURLOPT_XFERINFOFUNCTION, stop_if_interrupted);
  if (!body.empty()) {
    curl_easy_setopt(curl.get(), CURLOPT_POSTFIELDS, body.c_str());
    curl_easy_setopt(curl.get(), CURLOPT_HTTPHEADER, headers.get());
  }
  const CURLcode code = curl_easy_perform(curl.get());
  if (interrupted()) return fatal("interrupted.");
  if (code != CURLE_OK) return retry_later(std::format("no answer from llama-server: {}.", curl_easy_strerror(code)));
  long status = 0;
  curl_easy_getinfo(curl.get(), CURLINFO_RESPONSE_CODE, &status);
  return status;
}

std::string greedy_request(const std::string& prompt, int n_tokens, bool stream) {
  const json body = {{"prompt", prompt},   {"n_predict", n_tokens}, {"temperature", 0},      {"top_k", 1},
                     {"ignore_eos", true}, {"stream", stream},      {"return_tokens", true}, {"cache_prompt", false}};
  return body.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace

Result<std::unique_ptr<LlamaServer>> LlamaServer::start(boost::asio::io_context& io, const LlamaServerOptions& options) {
  std::unique_ptr<LlamaServer> server(new LlamaServer(io));
  server->socket_ = (options.folder / (options.name + ".sock")).string();
  if (server->socket_.size() >= sizeof(sockaddr_un{}.sun_path))
    return fix_input(std::format("the path '{}' is too long for a socket; set TMPDIR to a shorter one.", server->socket_));
  ChildOptions child;
  // Of an earlier run under the same name: llama-server does not listen on a socket that is there.
  std::error_code ignored;
  std::filesystem::remove(server->socket_, ignored);
  std::filesystem::remove(options.folder / (options.name + ".log"), ignored);
  KVASIR_ASSIGN(child.executable, find_program("llama-server", "llama.cpp-tools"));
  child.environment = options.environment;
  child.log = options.folder / (options.name + ".log");
  const std::string threads = std::to_string(options.n_threads);
  child.args = {"-m", options.model.string(), "--host", server->socket_, "-t", threads, "-np", "1", "-c", std::to_string(kContextTokens),
                "--no-webui", "--no-warmup", "--offline", options.repack ? "--repack" : "--no-repack"};
  KVASIR_TRY(server->child_.start(child));
  KVASIR_TRY(server->wait_until_ready());
  return server;
}

Status LlamaServer::wait_until_ready() {
  const auto deadline = Clock::now() + kStartTimeout;
  while (Clock::now() < deadline) {
    if (interrupted()) return fatal("interrupted.");
    if (!child_.running()) return fatal("llama-server could not start; " + child_.last_words());
    EventReader reader([](const json&) {});
    if (const auto status = request(socket_, "/health", "", reader); status && *status == 200) return {};
    usleep(20'000);
  }
  return fatal(std::format("llama-server was not ready after {} s; {}", kStartTimeout.count(), child_.last_words()));
}

Result<Completion> LlamaServer::complete(const std::string& prompt, int n_tokens, const std::function<void(std::string_view)>& on_text) {
  KVASIR_ASSIGN(Completion completion, stream(prompt, n_tokens, on_text));
  // The last token is not evaluated any more.
  completion.n_evaluated = static_cast<std::uint64_t>(completion.n_prompt + n_tokens - 1);
  if (completion.tokens.size() == static_cast<std::size_t>(n_tokens)) return completion;
  // A stream leaves out the tokens that end within a character; the answer in one piece has all.
  KVASIR_ASSIGN(completion.tokens, tokens_of(prompt, n_tokens));
  completion.n_evaluated *= 2;
  if (completion.tokens.size() != static_cast<std::size_t>(n_tokens))
    return fatal(std::format("llama-server generated {} tokens instead of {}.", completion.tokens.size(), n_tokens));
  return completion;
}

Result<Completion> LlamaServer::stream(const std::string& prompt, int n_tokens, const std::function<void(std::string_view)>& on_text) {
  Completion completion;
  bool finished = false;
  std::string failure;
  auto last = Clock::now();
  EventReader reader([&](const json& event) {
    if (event.contains("error")) failure = event["error"].dump();
    if (const auto text = event.find("content"); text != event.end() && text->is_string() && !text->get_ref<const std::string&>().empty())
      on_text(text->get_ref<const std::string&>());
    if (const auto tokens = event.find("tokens"); tokens != event.end() && tokens->is_array() && !tokens->empty()) {
      const auto now = Clock::now();
      for (const json& token : *tokens) {
        completion.tokens.push_back(token.get<int>());
        completion.gap_ms.push_back(std::chrono::duration<double, std::milli>(now - last).count());
        last = now;
      }
    }
    if (event.value("stop", false)) {
      finished = true;
      const json timings = event.value("timings", json::object());
      completion.n_prompt = timings.value("prompt_n", 0);
      completion.decode_per_s = timings.value("predicted_per_second", 0.0);
    }
  });
  KVASIR_ASSIGN(const long status, request(socket_, "/completion", greedy_request(prompt, n_tokens, /*stream=*/true), reader));
  if (status != 200) return fatal(std::format("llama-server answered HTTP {}: {}", status, reader.other()));
  if (!failure.empty()) return fatal("llama-server failed: " + failure);
  if (!finished) return fatal("llama-server's answer ended too early; " + child_.last_words());
  return completion;
}

Result<std::vector<float>> LlamaServer::next_token(const std::string& prompt) {
  // More than any vocabulary has: the server gives as many as there are.
  constexpr int kAll = 1 << 20;
  // Greedy, because a temperature would change the probabilities.
  const json body = {{"prompt", prompt},   {"n_predict", 1},   {"temperature", 0},      {"top_k", 1},
                     {"ignore_eos", true}, {"n_probs", kAll}, {"cache_prompt", false}};
  EventReader reader([](const json&) {});
  KVASIR_ASSIGN(const long status, request(socket_, "/completion", body.dump(-1, ' ', false, json::error_handler_t::replace), reader));
  if (status != 200) return fatal(std::format("llama-server answered HTTP {}: {}", status, reader.other()));
  const json answer = json::parse(reader.other(), nullptr, /*allow_exceptions=*/false);
  const json none;
  const auto field = [&](const json& from, const auto& key) -> const json& { return from.contains(key) ? from[key] : none; };
  const json& positions = field(answer, "completion_probabilities");
  const json& tokens = positions.is_array() && !positions.empty() ? field(positions[0], "top_logprobs") : none;
  if (!tokens.is_array() || tokens.empty())
    return fatal("llama-server gave no probabilities; this command needs the llama-server of llama.cpp 0.7.0.");
  std::vector<float> out(tokens.size(), -std::numeric_limits<float>::infinity());
  for (const json& token : tokens) {
    const auto id = token.value("id", std::size_t{out.size()});
    if (id >= out.size()) return fatal("llama-server named a token outside of its vocabulary.");
    // What JSON cannot write, minus infinity, comes as null.
    const json& value = field(token, "logprob");
    if (value.is_number()) out[id] = value.get<float>();
  }
  return out;
}

Result<std::vector<int>> LlamaServer::tokens_of(const std::string& prompt, int n_tokens) {
  EventReader reader([](const json&) {});
  KVASIR_ASSIGN(const long status, request(socket_, "/completion", greedy_request(prompt, n_tokens, /*stream=*/false), reader));
  if (status != 200) return fatal(std::format("llama-server answered HTTP {}: {}", status, reader.other()));
  const json answer = json::parse(reader.other(), nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object()) return fatal("llama-server's answer is not JSON.");
  std::vector<int> tokens;
  for (const json& token : answer.value("tokens", json::array())) tokens.push_back(token.get<int>());
  return tokens;
}

void LlamaServer::stop() { child_.stop(kStopGrace); }

}  // namespace kvasir::cli
