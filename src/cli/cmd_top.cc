// kvasir top: the hub's dashboard in a terminal.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <format>
#include <ftxui/component/component.hpp>
#include <ftxui/component/screen_interactive.hpp>
#include <ftxui/screen/screen.hpp>
#include <ftxui/screen/terminal.hpp>
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/node_token.h"
#include "cli/top_state.h"
#include "cli/top_view.h"
#include "hub/client/hub_client.h"

namespace kvasir::cli {
namespace {

constexpr Nanos kPause = std::chrono::seconds(1);
constexpr Nanos kOncePatience = std::chrono::seconds(20);
constexpr Nanos kNap = std::chrono::milliseconds(50);
constexpr int kColumnsDefault = 100, kRowsDefault = 40;  // where there is no terminal

struct Options {
  hub::HubAddress address;
  std::string token_file, model;
  bool once = false;
};

// Follows the hub on a thread of its own; `changed` is called after each change.
class Follower {
 public:
  Follower(std::unique_ptr<hub::HubClient> client, std::string model, bool anonymous, std::function<void()> changed)
      : client_(std::move(client)),
        model_(std::move(model)),
        anonymous_(anonymous),
        changed_(std::move(changed)),
        thread_([this] { run(); }) {}
  ~Follower() {
    stopping_ = true;
    client_->cancel();
    thread_.join();
  }

  template <typename Use>
  auto with(const Use& use) const {
    const MutexLock lock(mutex_);
    return use(state_, link_);
  }
  // Of the models there are, the next one.
  void next_model() {
    const MutexLock lock(mutex_);
    const auto here = std::ranges::find(state_.models, state_.model);
    if (state_.models.size() < 2) return;
    model_ = here == state_.models.end() || here + 1 == state_.models.end() ? state_.models.front() : *(here + 1);
    turn_ = true;
  }
  bool refused() const { return refused_; }

 private:
  void run() {
    while (!stopping_) {
      std::string path = "/api/view/events";
      {
        const MutexLock lock(mutex_);
        if (!model_.empty()) path += "?model=" + hub::percent_encode(model_);
        state_ = {};
        turn_ = false;
      }
      const auto end = client_->stream(path, [this](const char* bytes, std::size_t n) {
        {
          const MutexLock lock(mutex_);
          if (!state_.feed(bytes, n)) return false;
          link_ = "live";
        }
        changed_();
        return !stopping_ && !turn_;
      });
      if (turn_ || stopping_) continue;
      {
        const MutexLock lock(mutex_);
        if (!end)
          link_ = end.error().message;
        else if (end->status == 200)
          link_ = "the hub closed the line; trying again";
        else if (end->status == 401 && anonymous_)
          link_ = "this hub asks for a token: --token-file FILE, or KVASIR_TOKEN.";
        else
          link_ = end->error;
      }
      refused_ = (!end && end.error().action == ErrorAction::kFixInput) ||
                 (end && end->status >= 400 && end->status < 500 && end->status != 429);
      changed_();
      for (const TimePoint until = monotonic_now() + kPause; !stopping_ && monotonic_now() < until;)
        std::this_thread::sleep_for(kNap);
    }
  }

  const std::unique_ptr<hub::HubClient> client_;
  std::string model_ KVASIR_GUARDED_BY(mutex_);  // asked for
  const bool anonymous_;
  const std::function<void()> changed_;
  mutable Mutex mutex_;
  TopState state_ KVASIR_GUARDED_BY(mutex_);
  std::string link_ KVASIR_GUARDED_BY(mutex_) = "connecting";
  std::atomic<bool> stopping_{false}, turn_{false}, refused_{false};
  std::thread thread_;
};

// Without the escape sequences for colours and weights.
std::string without_styles(const std::string& text) {
  std::string out;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '\033')
      at = std::min(text.find('m', at), text.size());
    else if (text[at] != '\r')
      out += text[at];
  }
  return out;
}

Status print_once(Follower& follower, const std::string& url) {
  const TimePoint end = monotonic_now() + kOncePatience;
  while (!follower.with([](const TopState& state, const std::string&) { return state.complete(); })) {
    const std::string link = follower.with([](const TopState&, const std::string& text) { return text; });
    if (follower.refused()) return fix_input(link);
    if (monotonic_now() > end) return retry_later(link);
    std::this_thread::sleep_for(kNap);
  }
  const bool terminal = ::isatty(STDOUT_FILENO) != 0;
  const ftxui::Dimensions size = terminal ? ftxui::Terminal::Size() : ftxui::Dimensions{kColumnsDefault, kRowsDefault};
  ftxui::Element page = follower.with(
      [&](const TopState& state, const std::string& link) { return draw_top(state, url, link, size.dimx, size.dimy); });
  ftxui::Screen screen = ftxui::Screen::Create(ftxui::Dimension::Fixed(size.dimx), ftxui::Dimension::Fit(page));
  ftxui::Render(screen, page);
  std::printf("%s\n", terminal ? screen.ToString().c_str() : without_styles(screen.ToString()).c_str());
  return {};
}

Status top(Options& options) {
  if (options.address.token.empty()) {
    KVASIR_ASSIGN(options.address.token, read_node_token(options.token_file));
  }
  // A public view takes any; without one the hub says that it needs a token.
  const bool anonymous = options.address.token.empty();
  if (anonymous) options.address.token = "none";
  KVASIR_ASSIGN(options.address, hub::check_address(options.address));
  KVASIR_ASSIGN(auto client, hub::HubClient::create(options.address));
  const std::string url = options.address.url;
  if (options.once || ::isatty(STDOUT_FILENO) == 0) {
    Follower follower(std::move(client), options.model, anonymous, [] {});
    return print_once(follower, url);
  }
  ftxui::ScreenInteractive screen = ftxui::ScreenInteractive::Fullscreen();
  screen.TrackMouse(false);
  Follower follower(std::move(client), options.model, anonymous, [&screen] { screen.PostEvent(ftxui::Event::Custom); });
  ftxui::Component page = ftxui::Renderer([&] {
    const ftxui::Dimensions size = ftxui::Terminal::Size();
    return follower.with([&](const TopState& state, const std::string& link) {
      return draw_top(state, url, link + "   m: model  q: quit", size.dimx, size.dimy);
    });
  });
  page |= ftxui::CatchEvent([&](const ftxui::Event& event) {
    if (event == ftxui::Event::Character('q') || event == ftxui::Event::Escape ||
        event == ftxui::Event::Character('\x03')) {
      screen.Exit();
      return true;
    }
    if (event == ftxui::Event::Character('m')) {
      follower.next_model();
      return true;
    }
    return false;
  });
  screen.Loop(page);
  return {};
}

}  // namespace

void add_top(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("top", "Watch a hub: coverage, workers and traffic, in the terminal");
  command->add_option("hub", options->address.url, "https://HOST of the hub")->required();
  command->add_option("--token-file", options->token_file,
                      "file with a token of any kind (default: KVASIR_TOKEN); a public view needs none");
  command->add_option("--ca-file", options->address.ca_file, "PEM certificate of a hub that signed its own");
  command->add_option("--model", options->model, "this model (default: the first)");
  command->add_flag("--once", options->once, "print one picture and end");
  command->callback([options, &exit_code] { exit_code = report(top(*options)); });
}

}  // namespace kvasir::cli
