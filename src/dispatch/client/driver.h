// RoundDriver: carries out the engine's orders on its own data links, on its caller's thread.
#pragma once

#include <poll.h>

#include <exception>
#include <memory>
#include <vector>

#include "dispatch/client/check_rows.h"
#include "dispatch/client/shared.h"
#include "dispatch/core/round_engine.h"
#include "dispatch/core/wire_choice.h"

namespace kvasir::dispatch {

class Driver final : public RoundDriver {
 public:
  Driver(Shared& shared, std::shared_ptr<Port> port);
  ~Driver() override;
  using RoundDriver::run;
  Status run(const Round& round, const LocalCompute& local, const Meanwhile& meanwhile) override;

 private:
  struct DataLink {
    std::unique_ptr<Link> link;
    // Gathered rows on their way out; the writer shares it while bytes wait.
    std::shared_ptr<Bytes> gathered;
  };

  Status give_up(const std::exception& error);
  Status run_round(const Round& round, const LocalCompute& local);
  Status run_local_only(const Round& round, const LocalCompute& local);
  Status drive(const Round& round, const LocalCompute& local);
  Status compute_meanwhile();  // one piece
  Status compute_here(const Round& round, const LocalCompute& local);
  Status compute_check(const Round& round, const LocalCompute& local);

  void collect_mail();
  void take_moved();
  void let_go();  // of workers that were removed, between rounds
  void wait_for_first_links();
  void carry_out(const Round& round);
  void send_request(const Round& round, const Request& request);
  struct Rows {
    ByteSpan bytes;
    wire::RowType type;
    bool in_place;
  };
  // The rows of a request as they travel: in place where they lie so, else gathered. In bf16
  // if one of them overflows the narrower range of the type asked for.
  Rows rows_of(const Round& round, const Request& request, DataLink& data);

  // Reads whatever has come. `timeout` 0: looks only. Returns when something came, or after it.
  void poll_links(Nanos timeout);
  // Likewise at once, but looks only where an answer of this round is due: one system call less.
  void look();
  bool read_link(WorkerIndex w);  // true: at least one frame came
  // Takes one frame; false: it breaks the protocol.
  bool on_frame(WorkerIndex w, const net::Frame& frame);
  bool on_result_frame(WorkerIndex w, const net::Frame& frame);
  bool on_error_frame(WorkerIndex w, const net::Frame& frame);
  void drop_link(WorkerIndex w, Nanos wait);
  void break_link(WorkerIndex w, const std::string& why);  // after nonsense
  // Rows on their way in f32, for the gate of wire_choice_.
  void show(WireChoice::Direction direction, std::span<const float> row);
  void count_sent(WorkerIndex w, std::size_t bytes);
  void tell_bytes() KVASIR_REQUIRES(shared_.mutex);  // to the fleet
  void finish_stats(const Round& round, Nanos took);

  Shared& shared_;
  std::shared_ptr<Port> port_;
  RoundEngine engine_;
  std::vector<DataLink> links_;               // by worker; grows as the table does
  std::vector<std::uint64_t> worker_bytes_;   // the same; since the fleet was told
  std::vector<Mail> moved_;                   // links that replace others between rounds
  std::vector<WorkerIndex> removed_;          // no longer in the table, and not let go yet
  const Round* round_ = nullptr;  // the one under way
  const Meanwhile* meanwhile_ = nullptr;  // null: nothing is left of it
  std::vector<pollfd> fds_;
  std::vector<WorkerIndex> fd_workers_;
  std::vector<std::uint32_t> all_pairs_;
  WireChoice wire_choice_;      // with Options::wire_auto
  CheckRows check_rows_;
  std::vector<wire::Pair> check_pairs_;
  Nanos check_time_{};  // of local compute for spot checks, not yet in the statistics
  std::vector<float> decoded_;  // one row of an answer, before it is added to a sum
  bool waited_ = false;
  RoundCounters told_;  // what the statistics know already
  std::uint64_t bytes_sent_ = 0, bytes_received_ = 0;
};

}  // namespace kvasir::dispatch
