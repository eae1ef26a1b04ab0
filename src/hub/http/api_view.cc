// What the dashboard and `kvasir top` read: the live feed, the ledger by day, and the line by
// which the hub notices at once that a node is gone.

#include <algorithm>
#include <chrono>
#include <format>
#include <map>

#include "hub/http/hub.h"
#include "hub/http/json_input.h"

namespace kvasir::hub {
namespace {

using nlohmann::json;

constexpr std::int64_t kDays = 30;
constexpr std::size_t kContributorsMax = 50;
constexpr std::size_t kLinesMax = 2048;  // beyond it, nodes are missed by their heartbeats

Response events(Hub& hub, const Request& request) {
  const auto model = request.query.find("model");
  Response out;
  out.stream =
      hub.view().follow(model == request.query.end() ? "" : model->second, request.principal.scope == Scope::kAdmin);
  if (out.stream == nullptr) {
    Response busy = error_response(503, std::format("{} pages follow this hub already; close one.", kFollowersMax));
    busy.headers.emplace_back("Retry-After", "10");
    return busy;
  }
  out.content_type = "text/event-stream";
  out.headers.emplace_back("X-Accel-Buffering", "no");  // nginx must pass events on as they come
  return out;
}

// Both sides report; what a backbone received is what counts, and the worker's own figure
// where no backbone speaks.
Response contributions(Hub& hub, const Request&) {
  const std::int64_t today = unix_now() / 86'400, from = today - kDays + 1;
  const auto all = hub.store().contributions(from, today);
  if (!all) {
    hub.log_error(all.error());
    return error_response(503, "the ledger cannot be read just now; try again in a moment.");
  }
  struct Sum {
    std::int64_t pairs[2] = {}, bytes[2] = {};
    std::int64_t best(const std::int64_t (&of)[2]) const { return of[0] > 0 ? of[0] : of[1]; }
  };
  std::map<std::string, std::map<std::int64_t, Sum>> by_worker;
  for (const Contribution& c : *all) {
    if (c.side != Side::kWorker && c.side != Side::kBackbone) continue;  // the same bytes as others saw them
    Sum& sum = by_worker[c.worker_id][c.day];
    sum.pairs[c.side == Side::kWorker] += c.pairs;
    sum.bytes[c.side == Side::kWorker] += c.bytes;
  }
  std::vector<std::int64_t> total(kDays);
  std::vector<json> workers;
  for (const auto& [id, days] : by_worker) {
    std::vector<std::int64_t> pairs(kDays);
    std::int64_t sum = 0, bytes = 0;
    for (const auto& [day, figures] : days) {
      const auto i = static_cast<std::size_t>(day - from);
      pairs[i] = figures.best(figures.pairs);
      total[i] += pairs[i];
      sum += pairs[i];
      bytes += figures.best(figures.bytes);
    }
    workers.push_back({{"id", id}, {"pairs", sum}, {"bytes", bytes}, {"by_day", pairs}});
  }
  std::ranges::sort(workers, [](const json& a, const json& b) { return a["pairs"] > b["pairs"]; });
  if (workers.size() > kContributorsMax) workers.resize(kContributorsMax);
  Response out;
  out.text = dump({{"from", std::format("{:%F}", std::chrono::sys_days(std::chrono::days(from)))},
                   {"total", total},
                   {"contributors", by_worker.size()},
                   {"workers", workers}});
  return out;
}

// Says nothing and ends when the node does.
class Line final : public EventStream {
 public:
  Line(Hub& hub, std::string worker_id) : hub_(hub), worker_id_(std::move(worker_id)) {
    hub_.with_market([&](Market& market) { market.line_opened(worker_id_); });
  }
  ~Line() override {
    hub_.with_market([&](Market& market) { market.line_ended(worker_id_, monotonic_now()); });
    --hub_.lines;
  }
  std::shared_ptr<const std::string> next() override { return nullptr; }
  void on_more(std::function<void()>) override {}

 private:
  Hub& hub_;
  const std::string worker_id_;
};

Response line(Hub& hub, const Request& request) {
  const auto id = request.query.find("worker_id");
  if (id == request.query.end()) return error_response(400, "say whose line this is: worker_id=ID.");
  const bool mine =
      hub.with_market([&](Market& market) { return market.find_owner(id->second) == request.principal.token_id; });
  if (!mine)
    return error_response(404, std::format("the hub has had no heartbeat of '{}' with this token.", id->second));
  if (hub.lines.fetch_add(1) >= kLinesMax) {
    --hub.lines;
    Response busy = error_response(503, "the hub keeps as many lines as it may; heartbeats are enough.");
    busy.headers.emplace_back("Retry-After", "60");
    return busy;
  }
  Response out;
  out.content_type = "text/event-stream";
  out.headers.emplace_back("X-Accel-Buffering", "no");
  out.stream = std::make_shared<Line>(hub, id->second);
  out.watched = true;
  return out;
}

}  // namespace

void add_view_routes(Router& router, Hub& hub) {
  const std::vector<Scope> viewers = hub.options().public_view
                                         ? std::vector<Scope>()
                                         : std::vector<Scope>{Scope::kWorker, Scope::kBackbone, Scope::kViewer};
  router.add({.method = "GET",
              .pattern = "/api/view/events",
              .summary = "Server-sent events: one model's coverage, workers and traffic, and every change of them",
              .scopes = viewers,
              .query = {{"model", "of this model; without it, of the first", false}},
              .body_example = {},
              .answer_example = {},
              .handler = [&hub](const Request& request) { return events(hub, request); }});
  router.add({.method = "GET",
              .pattern = "/api/view/contributions",
              .summary = "What each node has served in the last 30 days, day by day, the busiest first",
              .scopes = viewers,
              .query = {},
              .body_example = {},
              .answer_example = R"({"from":"2026-03-01","total":[1000],"contributors":1,
                "workers":[{"id":"laptop","pairs":1000,"bytes":6200000,"by_day":[1000]}]})",
              .handler = [&hub](const Request& request) { return contributions(hub, request); }});
  router.add({.method = "GET",
              .pattern = "/api/expert-line",
              .summary = "Stays open as long as the node lives: the hub then notices its end at once",
              .scopes = {Scope::kWorker},
              .query = {{"worker_id", "as in the heartbeats", true}},
              .body_example = {},
              .answer_example = {},
              .handler = [&hub](const Request& request) { return line(hub, request); }});
}

}  // namespace kvasir::hub
