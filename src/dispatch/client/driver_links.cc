// Driver, second half: reading its links.
#include <algorithm>
#include <time.h>

#include "dispatch/client/driver.h"
#include "dispatch/client/row_copy.h"

namespace kvasir::dispatch {

void Driver::collect_mail() {
  for (Mail& mail : port_->collect()) {
    if (mail.removed) {
      removed_.push_back(mail.worker);
    } else if (mail.link) {
      if (links_.size() <= mail.worker) links_.resize(mail.worker + 1);
      if (links_[mail.worker].link) {  // a better way to the same worker; this round keeps its link
        moved_.push_back(std::move(mail));
        continue;
      }
      links_[mail.worker] = {.link = std::move(mail.link), .gathered = nullptr};
      engine_.link_up(mail.worker);
      wire_choice_.forget(mail.worker);
      read_link(mail.worker);  // its reader may hold frames that poll does not see
    } else if (mail.worker < links_.size() && links_[mail.worker].link) {
      drop_link(mail.worker, Nanos(0));
    }
  }
}

void Driver::take_moved() {
  for (Mail& mail : std::exchange(moved_, {})) {
    if (std::ranges::find(removed_, mail.worker) != removed_.end()) continue;
    engine_.link_down(mail.worker);  // what it still owes is not waited for
    links_[mail.worker] = {.link = std::move(mail.link), .gathered = nullptr};
    engine_.link_up(mail.worker);
    read_link(mail.worker);
  }
}

void Driver::let_go() {
  if (removed_.empty()) return;
  for (const WorkerIndex w : removed_) {
    engine_.link_down(w);
    links_[w] = {};
  }
  {
    // What is still to be told of them is told before their slots are given to others.
    const MutexLock lock(shared_.mutex);
    engine_.settle(shared_.fleet, monotonic_now());
    tell_bytes();
  }
  for (const WorkerIndex w : removed_) port_->report_let_go(w);
  removed_.clear();
  shared_.bell.ring();
}

void Driver::tell_bytes() {
  for (WorkerIndex w = 0; w < worker_bytes_.size(); ++w)
    if (worker_bytes_[w] > 0) shared_.fleet.on_bytes(w, std::exchange(worker_bytes_[w], 0));
}

void Driver::count_sent(WorkerIndex w, std::size_t bytes) {
  bytes_sent_ += bytes;
  if (worker_bytes_.size() <= w) worker_bytes_.resize(w + 1);
  worker_bytes_[w] += bytes;
}

void Driver::drop_link(WorkerIndex w, Nanos wait) {
  engine_.link_down(w);
  if (!links_[w].link) return;
  links_[w] = {};
  port_->report_lost({.worker = w, .wait = wait});
  shared_.bell.ring();
}

void Driver::break_link(WorkerIndex w, const std::string& why) {
  shared_.log("worker " + shared_.name(w) + ": " + why);
  engine_.on_invalid(w);
  drop_link(w, Nanos(0));
}

void Driver::poll_links(Nanos timeout) {
  fds_.clear();
  fd_workers_.clear();
  fds_.push_back({.fd = port_->fd(), .events = POLLIN, .revents = 0});
  for (WorkerIndex w = 0; w < links_.size(); ++w) {
    if (!links_[w].link) continue;
    const Link& link = *links_[w].link;
    fds_.push_back({.fd = link.stream->fd(), .events = link.stream->wants(), .revents = 0});
    if (!link.writer.idle(*link.stream)) fds_.back().events |= POLLOUT;
    fd_workers_.push_back(w);
    if (link.stream->buffered_input()) timeout = Nanos(0);
  }
  const timespec wait{.tv_sec = timeout.count() / 1'000'000'000, .tv_nsec = timeout.count() % 1'000'000'000};
  const int ready = ::ppoll(fds_.data(), fds_.size(), &wait, nullptr);
  for (std::size_t i = 0; i < fd_workers_.size(); ++i) {
    const WorkerIndex w = fd_workers_[i];
    if (!links_[w].link) continue;
    Link& link = *links_[w].link;
    const bool readable = ready > 0 && fds_[i + 1].revents != 0;
    if (!readable && !link.stream->buffered_input()) continue;
    if (!link.writer.idle(*link.stream) && !link.writer.flush(*link.stream)) {
      drop_link(w, Nanos(0));
      continue;
    }
    read_link(w);
  }
  if (port_->has_mail()) collect_mail();
}

void Driver::look() {
  bool writing = false;
  engine_.for_each_owing([&](WorkerIndex w) {
    if (!links_[w].link) return;
    writing |= !links_[w].link->writer.idle(*links_[w].link->stream);
    read_link(w);
  });
  if (writing) return poll_links(Nanos(0));  // which goes on with it
  if (port_->has_mail()) collect_mail();
}

bool Driver::read_link(WorkerIndex w) {
  bool came = false;
  while (links_[w].link) {
    // What else there may be is read later; looking would cost a call.
    if (came && round_ != nullptr && engine_.finished()) return came;
    Link& link = *links_[w].link;
    const Result<net::FrameReader::State> got = link.reader.read(*link.stream);
    if (!got) {
      if (protocol_was_broken(link)) break_link(w, got.error().message);
      else drop_link(w, Nanos(0));
      return came;
    }
    if (*got == net::FrameReader::State::kWouldBlock) return came;
    if (*got == net::FrameReader::State::kEnd) {
      drop_link(w, Nanos(0));
      return came;
    }
    came = true;
    const net::Frame& frame = link.reader.frame();
    const std::size_t bytes = wire::kHeaderBytes + frame.payload.size();
    bytes_received_ += bytes;
    if (worker_bytes_.size() <= w) worker_bytes_.resize(w + 1);
    worker_bytes_[w] += bytes;
    if (!on_frame(w, frame)) break_link(w, "it sent a frame that has no place here; its connection is dropped.");
  }
  return came;
}

bool Driver::on_frame(WorkerIndex w, const net::Frame& frame) {
  switch (frame.header.type) {
    case wire::FrameType::kResult: return on_result_frame(w, frame);
    case wire::FrameType::kError: return on_error_frame(w, frame);
    case wire::FrameType::kHoldings:  // the control connection's matter
    case wire::FrameType::kPong: return true;
    case wire::FrameType::kDrain: {
      const MutexLock lock(shared_.mutex);
      shared_.fleet.on_draining(w);
      return true;
    }
    default: return false;
  }
}

bool Driver::on_result_frame(WorkerIndex w, const net::Frame& frame) {
  const Result<wire::ResultView> view = wire::decode_result(frame.payload);
  if (!view) return false;
  const wire::ResultHead& head = view->head;
  const bool more = (frame.header.flags & wire::kFlagMore) != 0;
  const std::size_t row_size = view->rows.size() / std::max<std::size_t>(head.n_rows, 1);
  const std::size_t n_embd = head.n_embd;  // the engine takes only the round's own width
  const bool sums = round_ != nullptr && round_->weighted();
  if (sums && decoded_.size() < n_embd) decoded_.resize(n_embd);
  const auto take_row = [&](std::uint32_t i, std::span<float> to) {
    const ByteSpan row = view->rows.subspan(i * row_size, row_size);
    bool sane;
    if (head.row_type == wire::RowType::kF32) {
      sane = copy_sane(row.data(), to.data(), n_embd);
    } else {
      wire::decode_row(head.row_type, row, to);
      sane = all_sane(to);
    }
    return sane ? RowState::kFinite : has_nan(to) ? RowState::kNan : RowState::kInfinite;
  };
  const Verdict verdict = engine_.on_result(
      w, frame.header.request_id, head, more, monotonic_now(),
      [&](std::uint32_t i, std::uint32_t at) {
        const std::span<float> out(round_->out + at * n_embd, n_embd);
        const std::span<float> to = sums ? std::span(decoded_).first(n_embd) : out;
        const RowState state = take_row(i, to);
        if (state != RowState::kFinite) return state;
        if (shared_.options.wire_auto && head.row_type == wire::RowType::kF32) show(WireChoice::Direction::kReceived, to);
        if (sums) add_row(to, out);
        return state;
      },
      [&](std::uint32_t i, std::uint32_t slot) {
        check_rows_.grow(engine_.check_slots());
        return take_row(i, check_rows_.row(slot));
      });
  return verdict != Verdict::kInvalid;
}

bool Driver::on_error_frame(WorkerIndex w, const net::Frame& frame) {
  const Result<wire::ErrorMessage> error = wire::decode_error(frame.payload);
  if (!error) return false;
  const Verdict verdict = engine_.on_error(w, frame.header.request_id, error->code, monotonic_now());
  using wire::ErrorCode;
  const bool everyday = error->code == ErrorCode::kBusy || error->code == ErrorCode::kCancelled ||
                        error->code == ErrorCode::kDraining || verdict == Verdict::kLate;
  if (!everyday) shared_.log("worker " + shared_.name(w) + " refused a request: " + error->message);
  // Our bytes may have been damaged on the way as well as its own: no blame, a new connection.
  if (verdict == Verdict::kInvalid) drop_link(w, Nanos(0));
  return true;
}

}  // namespace kvasir::dispatch
