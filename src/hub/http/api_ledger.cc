// The contribution ledger: who served how much, day by day, as both sides say.

#include <charconv>
#include <chrono>
#include <format>
#include <map>

#include "hub/http/hub.h"
#include "hub/http/json_input.h"

namespace kvasir::hub {
namespace {

using nlohmann::json;

constexpr std::size_t kEntriesMax = 10'000;  // of one report
constexpr std::size_t kBackboneIdBytesMax = 64;
constexpr std::uint64_t kAmountMax = std::uint64_t{1} << 50;
constexpr std::int64_t kDaysPerAnswerMax = 366;

std::int64_t today() { return unix_now() / 86'400; }

std::string format_day(std::int64_t day) { return std::format("{:%F}", std::chrono::sys_days(std::chrono::days(day))); }

// "2026-03-01"
std::optional<std::int64_t> parse_day(std::string_view text) {
  if (text.size() != 10 || text[4] != '-' || text[7] != '-') return std::nullopt;
  const auto number = [&](std::size_t at, std::size_t n) {
    unsigned value = 0;
    const auto [end, error] = std::from_chars(text.data() + at, text.data() + at + n, value);
    return error == std::errc{} && end == text.data() + at + n ? std::optional(value) : std::nullopt;
  };
  const auto y = number(0, 4), m = number(5, 2), d = number(8, 2);
  if (!y || !m || !d) return std::nullopt;
  const std::chrono::year_month_day date{std::chrono::year(static_cast<int>(*y)), std::chrono::month(*m),
                                         std::chrono::day(*d)};
  if (!date.ok()) return std::nullopt;
  return std::chrono::sys_days(date).time_since_epoch().count();
}

Result<std::vector<Contribution>> entries_of(Hub& hub, const JsonInput& input, const Request& request) {
  std::int64_t day = today();
  KVASIR_ASSIGN(const auto given, input.optional_text("day", 10));
  if (given) {
    const auto parsed = parse_day(*given);
    // A report may arrive after midnight, and clocks differ; the past is closed.
    if (!parsed || *parsed < day - 1 || *parsed > day + 1)
      return fix_input("'day' must be today or the day before or after, as YYYY-MM-DD in UTC.");
    day = *parsed;
  }
  const json* entries = input.find("entries");
  if (entries == nullptr || !entries->is_array() || entries->size() > kEntriesMax)
    return fix_input(std::format("'entries' must be a list of up to {} objects with worker_id, pairs, rows and bytes.",
                                 kEntriesMax));
  std::vector<Contribution> out;
  std::map<std::string, bool> backbones;  // named by a worker, and whether they are any
  for (const json& each : *entries) {
    if (!each.is_object()) return fix_input("each entry must be an object with worker_id, pairs, rows and bytes.");
    const JsonInput entry(each);
    Contribution c;
    c.day = day;
    KVASIR_ASSIGN(c.worker_id, entry.text("worker_id", 128));
    for (const auto& [name, field] :
         {std::pair("pairs", &c.pairs), std::pair("rows", &c.rows), std::pair("bytes", &c.bytes)}) {
      KVASIR_ASSIGN(const auto amount, entry.optional_uint(name, kAmountMax));
      *field = static_cast<std::int64_t>(amount.value_or(0));
    }
    c.reporter = request.principal.token_id;
    c.side = request.principal.scope == Scope::kWorker ? Side::kWorker : Side::kBackbone;
    KVASIR_ASSIGN(const auto backbone, entry.optional_text("backbone", kBackboneIdBytesMax));
    out.push_back(c);
    if (c.side != Side::kWorker || !backbone || backbone->empty()) continue;
    if (!backbones.contains(*backbone)) {
      KVASIR_ASSIGN(const auto token, hub.store().find_token(*backbone));
      backbones[*backbone] = token && permits(token->scope, Scope::kBackbone);
    }
    if (!backbones[*backbone]) continue;
    c.side = Side::kServedTo;
    c.reporter = *backbone;
    out.push_back(std::move(c));
  }
  return out;
}

Response report(Hub& hub, const Request& request) {
  const auto input = JsonInput::parse(request.body);
  if (!input) return error_response(input.error());
  const auto entries = entries_of(hub, *input, request);
  if (!entries) return error_response(entries.error());
  const auto given_id = input->optional_text("report_id", 128);
  if (!given_id) return error_response(given_id.error());
  if (request.principal.scope == Scope::kWorker) {
    for (const Contribution& c : *entries) {
      const auto owned = hub.owns_worker(c.worker_id, request.principal.token_id);
      if (!owned) return error_response(owned.error());
      if (!*owned)
        return error_response(
            403, std::format("worker id '{}' belongs to another token; a node reports for itself.", c.worker_id));
    }
  }
  // Ids of different reporters do not meet.
  const std::string id = *given_id ? std::format("{}:{}", request.principal.token_id, **given_id) : std::string();
  const auto added = hub.store().add_contributions(*entries, id, unix_now());
  if (!added) {
    hub.log_error(added.error());
    return error_response(503, "the ledger cannot be written just now; send the same report again.");
  }
  Response out;
  out.text = dump({{"ok", true}, {"repeated", !*added}});
  return out;
}

Response contributions(Hub& hub, const Request& request) {
  std::int64_t from = today(), to = today();
  for (const auto& [name, field] : {std::pair("from", &from), std::pair("to", &to)}) {
    const auto given = request.query.find(std::string_view(name));
    if (given == request.query.end()) continue;
    const auto day = parse_day(given->second);
    if (!day) return error_response(400, std::format("'{}' must be a day as YYYY-MM-DD.", name));
    *field = *day;
  }
  if (from > to || to - from >= kDaysPerAnswerMax)
    return error_response(
        400, std::format("'from' must not be after 'to', and at most {} days before it.", kDaysPerAnswerMax - 1));
  const auto all = hub.store().contributions(from, to);
  if (!all) {
    hub.log_error(all.error());
    return error_response(503, "the ledger cannot be read just now; try again in a moment.");
  }
  json entries = json::array();
  for (const Contribution& c : *all) {
    if (request.principal.scope == Scope::kWorker && c.reporter != request.principal.token_id) {
      // A node sees what others say of it, not what they say of others.
      const auto owned = hub.owns_worker(c.worker_id, request.principal.token_id);
      if (!owned || !*owned) continue;
    }
    entries.push_back({{"day", format_day(c.day)},
                       {"worker_id", c.worker_id},
                       {"reporter", c.reporter},
                       {"side", to_string(c.side)},
                       {"pairs", c.pairs},
                       {"rows", c.rows},
                       {"bytes", c.bytes}});
  }
  Response out;
  out.text = dump({{"entries", entries}});
  return out;
}

}  // namespace

void add_ledger_routes(Router& router, Hub& hub) {
  router.add(
      {.method = "POST",
       .pattern = "/api/contributions",
       .summary = "What was served, as one side counted it; the same report_id counts once",
       .scopes = {Scope::kWorker, Scope::kBackbone},
       .query = {},
       .body_example =
           R"({"report_id":"a1","day":"2026-03-01","entries":[{"worker_id":"laptop","pairs":1000,"rows":250,
                "bytes":6200000}]})",
       .answer_example = R"({"ok":true,"repeated":false})",
       .handler = [&hub](const Request& request) { return report(hub, request); }});
  router.add(
      {.method = "GET",
       .pattern = "/api/contributions",
       .summary = "The ledger, both sides' figures",
       .scopes = {Scope::kWorker, Scope::kBackbone},
       .query = {{"from", "first day, YYYY-MM-DD (today)", false}, {"to", "last day (today)", false}},
       .body_example = {},
       .answer_example =
           R"({"entries":[{"day":"2026-03-01","worker_id":"laptop","reporter":"00","side":"backbone","pairs":1000,
                "rows":250,
                "bytes":6200000}]})",
       .handler = [&hub](const Request& request) { return contributions(hub, request); }});
}

}  // namespace kvasir::hub
