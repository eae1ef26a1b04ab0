#include "join/line.h"

#include <algorithm>
#include <format>
#include <random>

namespace kvasir::join {
namespace {

// Short at first, so that a node is not taken for lost; the hub's grace is 0.7 s.
constexpr Nanos kAgain = std::chrono::milliseconds(100), kAgainMax = std::chrono::seconds(30);
// Older hubs have no lines, and full ones say so: heartbeats do, too.
constexpr Nanos kUnwanted = std::chrono::minutes(5);
constexpr Nanos kNap = std::chrono::milliseconds(50);

}  // namespace

Result<std::unique_ptr<Line>> Line::open(const hub::HubAddress& address, const std::string& worker_id,
                                         std::function<void()> ended) {
  KVASIR_ASSIGN(auto client, hub::HubClient::create(address));
  return std::unique_ptr<Line>(
      new Line(std::move(client), "/api/expert-line?worker_id=" + hub::percent_encode(worker_id), std::move(ended)));
}

Line::Line(std::unique_ptr<hub::HubClient> client, std::string path, std::function<void()> ended)
    : client_(std::move(client)), path_(std::move(path)), ended_(std::move(ended)), thread_([this] { run(); }) {}

Line::~Line() {
  stopping_ = true;
  client_->cancel();
  thread_.join();
}

void Line::run() {
  std::mt19937 random(std::random_device{}());
  Nanos pause = kAgain;
  while (!stopping_) {
    const TimePoint begin = monotonic_now();
    const auto end = client_->stream(path_, [](const char*, std::size_t) { return true; });
    if (stopping_) return;
    if (end && end->status == 200) {
      ended_();
      // A line that holds for a while is a good one.
      pause = monotonic_now() - begin > std::chrono::seconds(10) ? kAgain : std::min(2 * pause, kAgainMax);
    } else {
      const bool unwanted = end && (end->status == 404 || end->status == 503 || end->status == 405);
      pause = unwanted ? std::max(end->retry_after.value_or(Nanos::zero()), pause) : pause;
      pause = std::min(2 * pause, unwanted ? kUnwanted : kAgainMax);
    }
    const TimePoint until = monotonic_now() + pause + pause * static_cast<int>(random() % 500) / 1000;
    while (!stopping_ && monotonic_now() < until) std::this_thread::sleep_for(kNap);
  }
}

}  // namespace kvasir::join
