#include "scheduler.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

namespace aio {
namespace {

// Attempts without progress before a block is given up. The kernel retries by itself; this bounds the rest.
constexpr std::uint32_t kAttemptsMax = 16;
constexpr std::size_t kRequestsPerGrowth = 256;

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace

// --- tickets ---

Ticket::~Ticket() {
  if (request_ == nullptr || scheduler_->forked()) return;
  const std::lock_guard lock(scheduler_->mutex_);
  request_->held = false;
  if (done()) scheduler_->recycle(request_);
}

bool Ticket::wait_for(std::chrono::nanoseconds timeout) const noexcept {
  if (done()) return true;
  const auto s = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  const timespec relative{s.count(), (timeout - s).count()};
  // Either this thread sees `over`, or the finishing thread sees the waiter: both sides are sequentially consistent.
  request_->waiters.fetch_add(1);
  if (request_->over.load() == 0) {
    ::syscall(SYS_futex, &request_->over, FUTEX_WAIT_PRIVATE, 0, &relative, nullptr, 0);
  }
  request_->waiters.fetch_sub(1);
  return done();
}

bool Ticket::watch(std::shared_ptr<Channel> channel, std::uint64_t token) const {
  const std::lock_guard lock(scheduler_->mutex_);
  if (done()) return false;
  request_->watches.push_back({std::move(channel), token});
  return true;
}

// --- lists ---

void Scheduler::List::push(Request* r) {
  r->next = nullptr;
  (last ? last->next : first) = r;
  last = r;
}

Request* Scheduler::List::pop() {
  Request* const r = first;
  first = r->next;
  if (first == nullptr) last = nullptr;
  return r;
}

void Scheduler::List::remove(Request* r) {
  Request* before = nullptr;
  Request* at = first;
  while (at != r) before = at, at = at->next;
  (before ? before->next : first) = r->next;
  if (last == r) last = before;
}

// --- callers ---

Scheduler::Scheduler(const Limits& limits, std::shared_ptr<FaultPlan> plan)
    : limits_(limits), plan_(std::move(plan)), blocks_(limits.depth) {
  free_blocks_.reserve(limits.depth);
  again_.reserve(limits.depth);
  for (std::uint32_t i = 0; i < limits.depth; ++i) {
    blocks_[i].index = i;
    free_blocks_.push_back(&blocks_[i]);
  }
}

Scheduler::File& Scheduler::file_at(std::int32_t file) {
  if (file < 0 || static_cast<std::size_t>(file) >= files_.size() || files_[static_cast<std::size_t>(file)].fd.get() < 0) {
    throw std::invalid_argument("file " + std::to_string(file) + " is not registered with this queue");
  }
  return files_[static_cast<std::size_t>(file)];
}

void Scheduler::check(const File& file, std::uint64_t offset, const std::byte* data, std::uint64_t nbytes) const {
  constexpr auto kOffsetMax = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (offset > kOffsetMax || nbytes > kOffsetMax - offset) throw std::invalid_argument("offset + nbytes overflows");
  if (data == nullptr && nbytes > 0) throw std::invalid_argument("address is null");
  if (offset % file.offset_alignment != 0 || nbytes % file.offset_alignment != 0 ||
      reinterpret_cast<std::uintptr_t>(data) % file.memory_alignment != 0) {
    throw std::invalid_argument("O_DIRECT on this file needs offset and nbytes in multiples of " +
                                std::to_string(file.offset_alignment) + " and address of " +
                                std::to_string(file.memory_alignment));
  }
}

std::optional<Ticket> Scheduler::submit(Operation operation, std::int32_t file_index, std::uint64_t offset, std::byte* data,
                                        std::uint64_t nbytes, Priority priority) {
  auto lease = operation == Operation::sync ? nullptr : Mapping::containing(data, nbytes);
  const std::lock_guard lock(mutex_);
  if (refusal_ != 0) throw std::system_error(refusal_, std::generic_category(), "the queue is closed");
  File& file = file_at(file_index);
  if (operation != Operation::sync) check(file, offset, data, nbytes);
  if (requests_ >= limits_.requests_max) return std::nullopt;

  account(Clock::now());
  Request& r = *new_request();
  r.operation = operation;
  r.priority = priority;
  r.file = file_index;
  r.offset = offset;
  r.data = data;
  r.nbytes = nbytes;
  r.sequence = sequence_++;
  r.lease = std::move(lease);
  ++requests_;
  ++file.outstanding;
  if (operation == Operation::sync) r.writes_before = file.outstanding_writes;
  if (operation == Operation::write) ++file.outstanding_writes;
  if (operation != Operation::sync && nbytes == 0) {
    complete(r);
  } else if (r.writes_before > 0) {
    waiting_syncs_.push(&r);
  } else {
    lane_of(r).push(&r);
    if (!free_blocks_.empty()) wake_engine();
  }
  return Ticket(shared_from_this(), &r);
}

// With the lock held: an engine is alive as long as a request may be pushed.
void Scheduler::wake_engine() {
  work_.notify_one();
  if (wake_) wake_();
}

void Scheduler::wait_for_room(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  room_.wait_for(lock, timeout, [this] { return requests_ < limits_.requests_max || refusal_ != 0; });
}

std::int32_t Scheduler::add_file(OwnedFd fd, std::uint32_t memory_alignment, std::uint32_t offset_alignment) {
  if (limits_.block_bytes % offset_alignment != 0) {
    throw std::invalid_argument("block_bytes must be a multiple of " + std::to_string(offset_alignment) + " for this file");
  }
  const std::lock_guard lock(mutex_);
  auto it = std::find_if(files_.begin(), files_.end(), [](const File& f) { return f.fd.get() < 0; });
  if (it == files_.end()) it = files_.emplace(files_.end());
  it->fd = std::move(fd);
  it->memory_alignment = memory_alignment;
  it->offset_alignment = offset_alignment;
  return static_cast<std::int32_t>(it - files_.begin());
}

OwnedFd Scheduler::remove_file(std::int32_t file_index) {
  const std::lock_guard lock(mutex_);
  File& file = file_at(file_index);
  if (file.outstanding > 0) throw std::system_error(EBUSY, std::generic_category(), "the file has requests outstanding");
  return std::move(file.fd);
}

Counters Scheduler::counters() {
  const std::lock_guard lock(mutex_);
  account(Clock::now());
  return counters_;
}

std::uint32_t Scheduler::blocks_in_flight() {
  const std::lock_guard lock(mutex_);
  return limits_.depth - static_cast<std::uint32_t>(free_blocks_.size());
}

bool Scheduler::drain(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  if (refusal_ == 0) refusal_ = ESHUTDOWN;
  room_.notify_all();
  return idle_.wait_for(lock, timeout, [this] { return requests_ == 0; });
}

void Scheduler::cancel(int error) {
  const std::lock_guard lock(mutex_);
  refusal_ = error;
  const auto end = [&](Request* r) {
    if (r->error == 0) r->error = error, r->error_offset = r->offset + r->issued_bytes;
    if (r->blocks_in_flight == 0) complete(*r);
  };
  while (waiting_syncs_.first) end(waiting_syncs_.pop());
  for (auto& by_direction : lanes_) {
    for (List& lane : by_direction) {
      while (lane.first) end(lane.pop());
    }
  }
  room_.notify_all();
}

void Scheduler::abandon(int error) {
  cancel(error);
  static auto* const kept = new std::vector<std::shared_ptr<Mapping>>;
  static std::mutex kept_mutex;
  const std::lock_guard lock(mutex_);
  const std::lock_guard keeping(kept_mutex);
  again_.clear();
  for (Block& block : blocks_) {
    if (block.request == nullptr) continue;
    kept->push_back(block.request->lease);
    block.error = error;
    finish_block(block, Clock::now());
  }
}

void Scheduler::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  if (wake_) wake_();
}

// --- engines ---

bool Scheduler::nothing_pending() const {
  return again_.empty() && !lanes_[0][0].first && !lanes_[0][1].first && !lanes_[1][0].first && !lanes_[1][1].first;
}

bool Scheduler::stopped() {
  const std::lock_guard lock(mutex_);
  return stopping_ && nothing_pending() && free_blocks_.size() == blocks_.size();
}

std::size_t Scheduler::exchange(std::span<const Completion> finished, std::span<Block*> started, Wait wait) {
  std::unique_lock lock(mutex_);
  const auto now = Clock::now();
  account(now);
  for (const Completion& c : finished) {
    if (finish(*c.block, c.result)) finish_block(*c.block, now);
  }
  std::size_t num_started = 0;
  for (;;) {
    while (num_started < started.size()) {
      Block* const block = take();
      if (block == nullptr) break;
      started[num_started++] = block;
    }
    if (num_started > 0 || wait == Wait::no) break;
    if (stopping_ && nothing_pending() && free_blocks_.size() == blocks_.size()) {
      work_.notify_all();
      break;
    }
    work_.wait(lock);
  }
  const auto depth = static_cast<std::uint32_t>(blocks_.size() - free_blocks_.size());
  counters_.depth_max = std::max(counters_.depth_max, depth);
  if (num_started > 0 && wait == Wait::until_work && !free_blocks_.empty() && !nothing_pending()) work_.notify_one();
  return num_started;
}

// Time passed in the state the queue was in: called before each change of it.
void Scheduler::account(Clock::time_point now) {
  const double passed = seconds(now - std::exchange(accounted_, now));
  const auto depth = blocks_.size() - free_blocks_.size();
  if (depth == 0 && nothing_pending()) {
    counters_.idle_seconds += passed;
    return;
  }
  counters_.busy_seconds += passed;
  counters_.depth_seconds += passed * static_cast<double>(depth);
  if (depth < blocks_.size() && nothing_pending()) counters_.starved_seconds += passed;
}

Request* Scheduler::new_request() {
  if (free_requests_.empty()) {
    free_requests_.reserve(nodes_.size() + kRequestsPerGrowth);
    for (std::size_t i = 0; i < kRequestsPerGrowth; ++i) free_requests_.push_back(&nodes_.emplace_back());
  }
  Request* const r = free_requests_.back();
  free_requests_.pop_back();
  r->held = true;
  r->issued_bytes = 0;
  r->blocks_in_flight = 0;
  r->writes_before = 0;
  r->error = 0;
  r->error_offset = 0;
  r->bytes_done.store(0, std::memory_order_relaxed);
  r->over.store(0, std::memory_order_relaxed);
  return r;
}

void Scheduler::recycle(Request* request) { free_requests_.push_back(request); }

Scheduler::List& Scheduler::lane_of(const Request& r) {
  return lanes_[static_cast<int>(r.priority)][r.operation == Operation::read ? 0 : 1];
}

// The request whose next block goes out: urgent before background, reads and writes in turn. It stays in its lane.
Request* Scheduler::next_in_lanes() {
  for (auto& by_direction : lanes_) {
    const int other = 1 - turn_;
    Request* const mine = by_direction[turn_].first;
    if (mine == nullptr && by_direction[other].first == nullptr) continue;
    if (mine == nullptr) return by_direction[other].first;
    turn_ = other;
    return mine;
  }
  return nullptr;
}

Block* Scheduler::take() {
  Block* block = nullptr;
  if (!again_.empty()) {
    block = again_.back();
    again_.pop_back();
  } else {
    if (free_blocks_.empty()) return nullptr;
    Request* const r = next_in_lanes();
    if (r == nullptr) return nullptr;
    block = free_blocks_.back();
    free_blocks_.pop_back();
    const File& file = files_[static_cast<std::size_t>(r->file)];
    block->request = r;
    block->operation = r->operation;
    block->fd = file.fd.get();
    block->file = r->file;
    block->granule = file.offset_alignment;
    block->data = r->data + r->issued_bytes;
    block->offset = r->offset + r->issued_bytes;
    block->total_bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(r->nbytes - r->issued_bytes, limits_.block_bytes));
    block->remaining_bytes = block->total_bytes;
    block->attempts = 0;
    block->error = 0;
    block->started = Clock::now();
    r->issued_bytes += block->total_bytes;
    ++r->blocks_in_flight;
    if (r->issued_bytes == r->nbytes) lane_of(*r).pop();
  }
  if (plan_) block->fault = plan_->next({block->operation, block->file, block->offset, block->remaining_bytes});
  return block;
}

// Every result passes through here; nothing else looks at one.
// True: the block is over (see block.error). False: its remainder was queued again.
bool Scheduler::finish(Block& block, std::int32_t result) {
  if (block.operation == Operation::sync) return block.error = result < 0 ? -result : 0, true;  // Never retried: the
  // kernel reports a failed write-back once, and a second fdatasync would claim success for lost pages.
  if (result == -EAGAIN || result == -EINTR) return queue_again(block) ? false : (block.error = -result, true);
  if (result < 0) return block.error = -result, true;
  if (result == 0) return block.error = block.operation == Operation::read ? ENODATA : EIO, true;  // the file ended
  assert(static_cast<std::uint32_t>(result) <= block.remaining_bytes);
  std::uint32_t moved = static_cast<std::uint32_t>(result);
  if (moved < block.remaining_bytes) {
    ++counters_.short_transfers;
    moved -= moved % block.granule;  // O_DIRECT resumes at aligned offsets only; the odd end is done again.
    if (moved == 0) return queue_again(block) ? false : (block.error = EIO, true);
  }
  block.data += moved;
  block.offset += moved;
  block.remaining_bytes -= moved;
  block.attempts = 0;
  if (block.remaining_bytes == 0) return true;
  again_.push_back(&block);
  return false;
}

// False: the block has had its attempts.
bool Scheduler::queue_again(Block& block) {
  if (++block.attempts >= kAttemptsMax) return false;
  ++counters_.retries;
  again_.push_back(&block);
  return true;
}

// The block is over, one way or the other: its bytes count, and its place is free.
void Scheduler::finish_block(Block& block, Clock::time_point now) {
  Request& r = *block.request;
  const std::uint32_t moved = block.total_bytes - block.remaining_bytes;
  if (block.operation != Operation::sync) {
    DirectionCounters& c = block.operation == Operation::read ? counters_.read : counters_.write;
    c.bytes += moved;
    ++c.operations;
    c.latency.add(static_cast<std::uint64_t>(std::chrono::nanoseconds(now - block.started).count()));
  }
  r.bytes_done.fetch_add(moved, std::memory_order_relaxed);
  if (block.error != 0 && r.error == 0) {
    r.error = block.error;
    r.error_offset = block.offset;
    if (r.issued_bytes < r.nbytes) lane_of(r).remove(&r);  // What was not handed out is not tried.
  }
  const bool all_handed_out = r.issued_bytes == r.nbytes || r.error != 0;
  block.request = nullptr;
  if (--r.blocks_in_flight == 0 && all_handed_out) complete(r);
  free_blocks_.push_back(&block);
}

void Scheduler::complete(Request& r) {
  File& file = files_[static_cast<std::size_t>(r.file)];
  --file.outstanding;
  --requests_;
  if (r.error != 0) ++counters_.failed_requests;
  switch (r.operation) {
    case Operation::read: ++counters_.read.requests; break;
    case Operation::write:
      ++counters_.write.requests;
      --file.outstanding_writes;
      release_syncs(r.file, r.sequence);
      break;
    case Operation::sync: ++counters_.syncs; break;
  }
  r.lease.reset();
  r.over.store(1);
  if (r.waiters.load() > 0) ::syscall(SYS_futex, &r.over, FUTEX_WAKE_PRIVATE, std::numeric_limits<int>::max());
  for (const Watch& watch : r.watches) watch.channel->post(watch.token);
  r.watches.clear();
  if (!r.held) recycle(&r);
  room_.notify_one();
  if (requests_ == 0) idle_.notify_all();
}

// A write is over: syncs that were asked for after it wait for one write less.
void Scheduler::release_syncs(std::int32_t file, std::uint64_t sequence) {
  for (Request *sync = waiting_syncs_.first, *next = nullptr; sync != nullptr; sync = next) {
    next = sync->next;
    if (sync->file != file || sync->sequence < sequence || --sync->writes_before > 0) continue;
    waiting_syncs_.remove(sync);
    lane_of(*sync).push(sync);
  }
}

}  // namespace aio
