// The core without Python: what sanitizers are run over, and what a stranger may build to see it work.
// Usage: core_test DIRECTORY. Exit status 0: every check held.

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "queue.h"

namespace {

using namespace std::chrono_literals;
using aio::Backend;
using aio::FaultPlan;
using aio::Operation;
using aio::Priority;

constexpr std::uint32_t kBlockBytes = 64 << 10;
constexpr std::size_t kMiB = 1 << 20;

void check_that(bool holds, const char* what, int line) {
  if (holds) return;
  std::fprintf(stderr, "core_test.cpp:%d: not so: %s\n", line, what);
  std::exit(1);
}
#define CHECK(condition) check_that(condition, #condition, __LINE__)

struct Bench {
  Backend backend;
  std::string directory;

  [[nodiscard]] aio::OwnedFd file() const {
    const std::string path = directory + "/core_test." + std::to_string(::getpid());
    aio::OwnedFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600));
    CHECK(fd.get() >= 0);
    ::unlink(path.c_str());
    return fd;
  }
  [[nodiscard]] aio::Options options(std::uint32_t depth = 8) const {
    aio::Options options;
    options.backend = backend;
    options.limits.depth = depth;
    options.limits.block_bytes = kBlockBytes;
    return options;
  }
};

int finish(const aio::Ticket& ticket) {
  while (!ticket.wait_for(100ms)) {
  }
  return ticket.error();
}

aio::Ticket submit(aio::Queue& queue, Operation operation, int file, std::uint64_t offset, std::byte* data, std::size_t n,
                   Priority priority = Priority::background) {
  for (;;) {
    if (auto ticket = queue.submit(operation, file, offset, data, n, priority)) return std::move(*ticket);
    queue.wait_for_room(100ms);
  }
}

void fill(std::byte* data, std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::generate_n(data, n, [&] { return static_cast<std::byte>(random()); });
}

void round_trip(const Bench& bench) {
  aio::Queue queue(bench.options(), nullptr);
  const auto fd = bench.file();
  const int file = queue.register_file(fd.get());
  const auto memory = aio::Mapping::anonymous(4 * kMiB, true);
  queue.register_memory(memory->data(), 2 * kMiB);
  fill(memory->data(), kMiB, 1);
  CHECK(finish(submit(queue, Operation::write, file, 512, memory->data(), kMiB)) == 0);
  CHECK(finish(submit(queue, Operation::sync, file, 0, nullptr, 0)) == 0);
  CHECK(finish(submit(queue, Operation::read, file, 512, memory->data() + 2 * kMiB, kMiB)) == 0);
  CHECK(std::memcmp(memory->data(), memory->data() + 2 * kMiB, kMiB) == 0);
  CHECK(finish(submit(queue, Operation::read, file, 8 * kMiB, memory->data(), 4096)) == ENODATA);
  CHECK(queue.close(10s));
}

// Several threads submit, wait, watch and drop tickets at once, while faults strike.
void crowd(const Bench& bench) {
  const auto plan = std::make_shared<FaultPlan>();
  plan->strike_at_random(3, {0.02, {EIO, EAGAIN, EINTR}, 0.05, 0.02, 200});
  aio::Queue queue(bench.options(), plan);
  const auto fd = bench.file();
  const int file = queue.register_file(fd.get());
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto memory = aio::Mapping::anonymous(2 * kMiB, false);
      const auto channel = std::make_shared<aio::Channel>();
      std::byte* const sent = memory->data();
      std::byte* const received = memory->data() + kMiB;
      for (unsigned i = 0; i < 60; ++i) {
        const std::size_t n = 512 * (1 + (i * 37) % 512);
        const std::uint64_t offset = t * kMiB;
        fill(sent, n, t * 1000 + i);
        if (finish(submit(queue, Operation::write, file, offset, sent, n)) != 0) continue;
        const auto read = submit(queue, Operation::read, file, offset, received, n, Priority::urgent);
        if (read.watch(channel, i)) {
          pollfd readable{channel->fd(), POLLIN, 0};
          CHECK(::poll(&readable, 1, 10'000) == 1);
          CHECK(channel->drain() == std::vector<std::uint64_t>{i});
        }
        if (finish(read) == 0) CHECK(std::memcmp(sent, received, n) == 0);
        const auto dropped = submit(queue, Operation::sync, file, 0, nullptr, 0);
        (void)queue.counters();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(queue.close(10s));
  CHECK(queue.counters().retries > 0 && queue.counters().short_transfers > 0);
}

// A queue that cannot wait for its I/O parks the memory; the result still arrives.
void parked(const Bench& bench) {
  const auto plan = std::make_shared<FaultPlan>();
  plan->strike(0, {0, 0, 0, true});
  const auto fd = bench.file();
  auto memory = aio::Mapping::anonymous(2 * kMiB, true);
  const std::weak_ptr<aio::Mapping> watched = memory;
  auto queue = std::make_unique<aio::Queue>(bench.options(1), plan);
  const int file = queue->register_file(fd.get());
  const auto held = submit(*queue, Operation::write, file, 0, memory->data(), kMiB);
  while (queue->blocks_in_flight() == 0) std::this_thread::yield();
  const auto waiting = submit(*queue, Operation::write, file, kMiB, memory->data(), kMiB);
  CHECK(!queue->close(10ms));
  CHECK(waiting.done() && waiting.error() == ECANCELED);
  queue.reset();
  memory.reset();
  CHECK(!held.done() && !watched.expired());
  plan->release();
  CHECK(finish(held) == ECANCELED);  // Its first block went through; the others were not started.
  CHECK(held.bytes_done() == kBlockBytes);
  CHECK(watched.expired());
}

void registration_in_the_middle(const Bench& bench) {
  aio::Queue queue(bench.options(), nullptr);
  const auto fd = bench.file();
  const int file = queue.register_file(fd.get());
  const auto memory = aio::Mapping::anonymous(8 * kMiB, true);
  std::vector<aio::Ticket> tickets;
  for (unsigned i = 0; i < 8; ++i) {
    tickets.push_back(submit(queue, Operation::write, file, i * kMiB, memory->data() + i * kMiB, kMiB));
    queue.register_memory(memory->data() + i * kMiB, kMiB);
    queue.unregister_file(queue.register_file(fd.get()));
  }
  for (const aio::Ticket& ticket : tickets) CHECK(finish(ticket) == 0);
}

void fork_in_the_middle(const Bench& bench) {
  aio::Queue queue(bench.options(), nullptr);
  const auto fd = bench.file();
  const int file = queue.register_file(fd.get());
  const auto memory = aio::Mapping::anonymous(2 * kMiB, true);
  for (unsigned i = 0; i < 10; ++i) {
    fill(memory->data(), kMiB, i);
    const auto write = submit(queue, Operation::write, file, 0, memory->data(), kMiB);
    const pid_t child = ::fork();
    if (child == 0) ::_exit(queue.forked() && fd.get() >= 0 && ::fcntl(fd.get(), F_GETFD) < 0 ? 0 : 1);
    CHECK(finish(write) == 0);
    int status = -1;
    CHECK(::waitpid(child, &status, 0) == child && status == 0);
    CHECK(finish(submit(queue, Operation::read, file, 0, memory->data() + kMiB, kMiB)) == 0);
    CHECK(std::memcmp(memory->data(), memory->data() + kMiB, kMiB) == 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string directory = argc > 1 ? argv[1] : ".";
  const std::string obstacle = aio::uring_obstacle();
  if (!obstacle.empty()) std::printf("io_uring is not tested: %s\n", obstacle.c_str());
  for (const Backend backend : {Backend::io_uring, Backend::threads}) {
    if (backend == Backend::io_uring && !obstacle.empty()) continue;
    const Bench bench{backend, directory};
    round_trip(bench);
    crowd(bench);
    parked(bench);
    registration_in_the_middle(bench);
    fork_in_the_middle(bench);
    std::printf("%s: all checks held\n", backend == Backend::io_uring ? "io_uring" : "threads");
  }
  return 0;
}
