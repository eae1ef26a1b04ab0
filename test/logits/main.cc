// kvasir-logits: evaluates a prompt and some decode steps with stock libllama and writes every
// logit, bit for bit. Two runs are equal if and only if their files are: that is how the tests
// compare workers, local replica and a llama.cpp without the plugin.
//
// Backends are loaded as llama.cpp's own tools load them, so GGML_BACKEND_PATH brings the plugin.

#include <ggml-backend.h>
#include <llama-cpp.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "logits_file.h"

namespace {

using Tokens = std::vector<llama_token>;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string model;
  std::string text_file;           // prompt; random ids if empty
  std::string out;                 // logits file; none if empty
  std::string device;              // only this ggml device; empty: llama.cpp's choice
  int n_prompt = 32;               // tokens of each sequence
  int n_decode = 8;                // steps after the prompt
  int n_seq = 1;
  int n_threads = 2;
  int n_ubatch = 512;
  unsigned seed = 1;
  bool no_repack = false;
  bool no_mmap = false;
  bool greedy = true;
  bool embeddings = false;         // models without logits: token embeddings instead
  std::vector<int> pause_before;   // decode steps; see pause()
};

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "kvasir-logits: %s\n", message.c_str());
  std::exit(1);
}

// Announces the step and waits for a line, so that a test can act between two steps.
void pause(int step) {
  std::printf("paused %d\n", step);
  std::fflush(stdout);
  char c = 0;
  do {
    if (read(STDIN_FILENO, &c, 1) != 1) fail("standard input ended at a pause");
  } while (c != '\n');
}

Tokens read_text(const llama_vocab* vocab, const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail("cannot read the text '" + path + "'");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  Tokens tokens(text.size() + 8);
  const int n = llama_tokenize(vocab, text.data(), static_cast<int>(text.size()), tokens.data(),
                               static_cast<int>(tokens.size()), /*add_special=*/true, /*parse_special=*/false);
  if (n <= 0) fail("the text '" + path + "' gives no tokens");
  tokens.resize(static_cast<std::size_t>(n));
  return tokens;
}

// One prompt a sequence: different stretches of the text, or random ids.
std::vector<Tokens> make_prompts(const Options& options, const llama_vocab* vocab) {
  std::mt19937 random(options.seed);
  const auto n_vocab = static_cast<std::uint32_t>(llama_vocab_n_tokens(vocab));
  const auto n_prompt = static_cast<std::size_t>(options.n_prompt);
  Tokens text;
  if (!options.text_file.empty()) text = read_text(vocab, options.text_file);
  std::vector<Tokens> prompts(static_cast<std::size_t>(options.n_seq));
  for (std::size_t s = 0; s < prompts.size(); ++s) {
    if (!text.empty() && text.size() < (s + 1) * n_prompt) fail("the text is too short for that many prompt tokens");
    for (std::size_t i = 0; i < n_prompt; ++i)
      prompts[s].push_back(text.empty() ? static_cast<llama_token>(random() % n_vocab) : text[s * n_prompt + i]);
  }
  return prompts;
}

class Evaluator {
 public:
  Evaluator(const Options& options, llama_model* model) : options_(options) {
    llama_context_params params = llama_context_default_params();
    const int per_sequence = options.n_prompt + options.n_decode + 1;
    params.n_ctx = static_cast<std::uint32_t>(options.n_seq * per_sequence + 255) / 256 * 256;
    params.n_batch = static_cast<std::uint32_t>(std::max(options.n_seq * options.n_prompt, options.n_seq));
    params.n_ubatch = std::min(static_cast<std::uint32_t>(options.n_ubatch), params.n_batch);
    params.n_seq_max = static_cast<std::uint32_t>(options.n_seq);
    params.kv_unified = true;  // sequences share a batch instead of being split from it
    params.n_threads = options.n_threads;
    params.n_threads_batch = options.n_threads;
    if (options.embeddings) {
      params.embeddings = true;
      params.pooling_type = LLAMA_POOLING_TYPE_NONE;
      params.n_ubatch = params.n_batch;  // what attends both ways needs the whole prompt at once
    }
    context_.reset(llama_init_from_model(model, params));
    if (!context_) fail("cannot make a context");
    encoder_ = llama_model_has_encoder(model) && !llama_model_has_decoder(model);
    width_ = options.embeddings ? llama_model_n_embd_out(model) : llama_vocab_n_tokens(llama_model_get_vocab(model));
    batch_ = llama_batch_init(static_cast<int>(params.n_batch), 0, 1);
  }
  ~Evaluator() { llama_batch_free(batch_); }
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  int width() const { return width_; }

  // Evaluates one more stretch of each sequence; keeps every row of the answer and returns the
  // position of the greatest logit after each stretch.
  Tokens step(const std::vector<Tokens>& stretches, kvasir::test::LogitsWriter& writer) {
    batch_.n_tokens = 0;
    for (std::size_t s = 0; s < stretches.size(); ++s) {
      for (std::size_t i = 0; i < stretches[s].size(); ++i) {
        const int n = batch_.n_tokens++;
        batch_.token[n] = stretches[s][i];
        batch_.pos[n] = position_ + static_cast<llama_pos>(i);
        batch_.n_seq_id[n] = 1;
        batch_.seq_id[n][0] = static_cast<llama_seq_id>(s);
        batch_.logits[n] = 1;
      }
    }
    const int status = encoder_ ? llama_encode(context_.get(), batch_) : llama_decode(context_.get(), batch_);
    if (status != 0) fail("llama_decode failed with status " + std::to_string(status));
    position_ += static_cast<llama_pos>(stretches[0].size());

    Tokens best;
    int row = 0;
    for (const Tokens& stretch : stretches) {
      const float* values = nullptr;
      for (std::size_t i = 0; i < stretch.size(); ++i, ++row) {
        values = options_.embeddings ? llama_get_embeddings_ith(context_.get(), row) : llama_get_logits_ith(context_.get(), row);
        if (values == nullptr) fail("no answer for a row");
        writer.add({values, static_cast<std::size_t>(width_)});
      }
      best.push_back(static_cast<llama_token>(std::max_element(values, values + width_) - values));
    }
    return best;
  }

 private:
  const Options& options_;
  llama_context_ptr context_;
  llama_batch batch_{};
  llama_pos position_ = 0;
  int width_ = 0;
  bool encoder_ = false;
};

double ms_since(Clock::time_point start) { return std::chrono::duration<double, std::milli>(Clock::now() - start).count(); }

int run(const Options& options) {
  ggml_backend_load_all();
  llama_backend_init();
  llama_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) std::fputs(text, stderr);
      },
      nullptr);
  llama_model_params params = llama_model_default_params();
  params.use_extra_bufts = !options.no_repack;
  if (options.no_mmap) params.load_mode = LLAMA_LOAD_MODE_NONE;
  ggml_backend_dev_t devices[2] = {nullptr, nullptr};
  if (!options.device.empty()) {
    devices[0] = ggml_backend_dev_by_name(options.device.c_str());
    if (devices[0] == nullptr) fail("no device '" + options.device + "'");
    params.devices = devices;
  }
  const auto load_start = Clock::now();
  const llama_model_ptr model(llama_model_load_from_file(options.model.c_str(), params));
  if (!model) fail("cannot load '" + options.model + "'");
  const double load_ms = ms_since(load_start);

  std::vector<Tokens> stretches = make_prompts(options, llama_model_get_vocab(model.get()));
  Evaluator evaluator(options, model.get());
  kvasir::test::LogitsWriter writer(options.out, static_cast<std::uint32_t>(evaluator.width()));
  const auto prompt_start = Clock::now();
  Tokens next = evaluator.step(stretches, writer);
  const double prompt_ms = ms_since(prompt_start);

  const std::set<int> pauses(options.pause_before.begin(), options.pause_before.end());
  std::mt19937 random(options.seed + 1);
  std::vector<Tokens> produced(stretches.size());
  std::vector<double> step_ms;
  for (int step = 0; step < options.n_decode; ++step) {
    if (pauses.contains(step)) pause(step);
    for (std::size_t s = 0; s < stretches.size(); ++s) {
      const auto fixed = static_cast<llama_token>(random() % static_cast<std::uint32_t>(evaluator.width()));
      stretches[s] = {options.greedy ? next[s] : fixed};
      produced[s].push_back(stretches[s][0]);
    }
    const auto start = Clock::now();
    next = evaluator.step(stretches, writer);
    step_ms.push_back(ms_since(start));
  }
  if (!writer.finish()) fail("cannot write '" + options.out + "'");

  nlohmann::ordered_json report = {{"rows", writer.n_rows()}, {"width", evaluator.width()}, {"xxh3", writer.hash_hex()},
                                   {"finite", writer.all_finite()}, {"tokens", produced}, {"load_ms", load_ms},
                                   {"prompt_ms", prompt_ms}, {"step_ms", step_ms}};
  std::printf("%s\n", report.dump().c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  bool fixed = false;
  CLI::App app{"Writes every logit of a prompt and its decode steps, bit for bit, with stock libllama."};
  app.add_option("--model", options.model, "GGUF file")->required();
  app.add_option("--prompt-tokens", options.n_prompt, "tokens of each sequence's prompt")->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_option("--text", options.text_file, "take the prompts from this file (default: random ids)");
  app.add_option("--seed", options.seed, "of the random ids")->capture_default_str();
  app.add_option("--decode", options.n_decode, "steps after the prompt")->check(CLI::Range(0, 100000))->capture_default_str();
  app.add_option("--n-seq", options.n_seq, "sequences in one batch")->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--threads", options.n_threads)->check(CLI::Range(1, 512))->capture_default_str();
  app.add_option("--ubatch", options.n_ubatch)->check(CLI::Range(1, 65536))->capture_default_str();
  app.add_option("--device", options.device, "use only this ggml device");
  app.add_option("--out", options.out, "logits file: test/logits/logits_file.h");
  app.add_option("--pause-before", options.pause_before, "decode steps before which to print 'paused N' and wait for a line");
  app.add_flag("--no-repack", options.no_repack, "no repacked buffers, as llama.cpp's --no-repack");
  app.add_flag("--no-mmap", options.no_mmap, "read the weights into memory");
  app.add_flag("--fixed", fixed, "decode random ids instead of the greatest logit");
  app.add_flag("--embeddings", options.embeddings, "token embeddings instead of logits");
  CLI11_PARSE(app, argc, argv);
  options.greedy = !fixed && !options.embeddings;
  return run(options);
}
