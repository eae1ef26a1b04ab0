// The client: the real Fleet and RoundEngines, and a model of the sockets around them that
// does what src/dispatch/client does. Every round is checked when it ends.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "dispatch/core/round_engine.h"
#include "sim/cluster.h"

namespace kvasir::sim {

// Bugs planted on purpose: the checks must find each of them.
enum class Canary { kNone, kWrongRow, kLateRowTaken, kSumTwice, kLeak, kNoDeadline };

struct Totals {
  std::uint64_t rounds = 0, failed_rounds = 0, pairs_remote = 0, pairs_local = 0, hedges = 0, late = 0, invalid = 0,
      redispatched = 0, requests = 0, sums_dropped = 0, checked = 0, lies_found = 0, wrong_answers = 0;
};

class Client {
 public:
  struct Plan {
    std::size_t n_drivers = 1;
    std::size_t rounds_per_driver = 40;
    bool local_allowed = true;
    bool input_has_nan = false;  // rows whose honest answer is not finite
    dispatch::HotSet::Members hot{};  // experts computed here by choice
    double spot_check = 0;
    Nanos lie_quarantine_max = dispatch::Tuning{}.lie_quarantine_max;
    bool weighted = false;       // answers are weighted sums, in a narrow row type
  };
  Client(World& world, std::vector<std::unique_ptr<Worker>>& workers, const Plan& plan, std::uint64_t seed, Canary canary);

  bool finished() const;
  void more_rounds(std::size_t per_driver);
  // From now on every round must be computed wholly by workers.
  void demand_remote() { remote_demanded_ = true; }
  // Closes everything and checks that nothing is left over.
  void shut_down();
  Totals totals() const;

 private:
  struct Control {
    std::shared_ptr<Connection> connection;
    bool up = false;
    TimePoint connect_until{};
    TimePoint ping_at{};
    std::optional<TimePoint> ping_sent;
  };
  struct DataLink {
    std::shared_ptr<Connection> connection;
    bool ready = false;
    TimePoint connect_until{};
    TimePoint next_attempt{};
  };
  struct Arrival {
    dispatch::WorkerIndex worker;
    std::shared_ptr<Connection> connection;
    std::optional<Message> message;  // nullopt: closed
  };
  struct Driver {
    std::unique_ptr<dispatch::RoundEngine> engine;
    std::vector<DataLink> links;
    std::deque<Arrival> inbox;  // what lies in the socket buffers
    bool computing = false;     // the thread is in local compute
    std::size_t rounds_left = 0;
    bool in_round = false;
    std::uint32_t layer = 0;
    std::vector<wire::Pair> pairs;
    std::vector<float> weights;  // small whole numbers; empty: rows per pair
    std::vector<std::uint64_t> rows;
    std::vector<bool> rows_finite;
    std::vector<std::uint64_t> out;  // per pair, or sums per row
    std::vector<std::uint64_t> opinions;  // second answers, by slot
    std::vector<int> written;        // per pair; unused with sums, where a second time changes the sum
    TimePoint started{}, last_final{}, wake_at{};
    Nanos computed{};
    std::uint64_t local_before = 0;
  };

  void tick();  // the background thread's work
  void step_control(dispatch::WorkerIndex w);
  void lose_control(dispatch::WorkerIndex w);
  void step_data(std::size_t d, dispatch::WorkerIndex w);
  void drop_link(std::size_t d, dispatch::WorkerIndex w, Nanos wait);

  void begin_round(std::size_t d);
  void turn(std::size_t d);  // the driver's loop, as far as it gets without waiting
  void take(std::size_t d, Arrival arrival);
  void take_result(std::size_t d, dispatch::WorkerIndex w, const Message& message);
  void carry_out(std::size_t d);
  void compute_locally(std::size_t d);
  void compute_check(std::size_t d);
  void judge(Driver& driver);
  void end_round(std::size_t d);
  void add_answer(Driver& driver, std::uint32_t at, std::uint64_t answer);
  void check_round(Driver& driver, const Status& status);
  void check_request(const Driver& driver, const dispatch::Request& request);
  void check_values(const Driver& driver);

  World& world_;
  std::vector<std::unique_ptr<Worker>>& workers_;
  const Plan plan_;
  const Canary canary_;
  const dispatch::Tuning tuning_;
  dispatch::Fleet fleet_;
  std::vector<Control> controls_;
  std::vector<std::unique_ptr<Driver>> drivers_;
  std::uint64_t next_row_ = 1;
  std::uint64_t failed_rounds_ = 0, rounds_ = 0, wrong_answers_ = 0;
  bool remote_demanded_ = false, down_ = false;
};

}  // namespace kvasir::sim
