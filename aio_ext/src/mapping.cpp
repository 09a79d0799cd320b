#include "mapping.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <stdexcept>
#include <system_error>

#include "owned_fd.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace aio {
namespace {

// Live mappings by their last address, so that the one containing an address is one lookup away. Never destroyed.
struct Live {
  std::mutex mutex;
  std::map<const std::byte*, std::weak_ptr<Mapping>> by_end;
};

Live& live() {
  static Live* const instance = [] {
    static Live* made = new Live;
    // A child must not inherit the lock from a thread that it does not have.
    pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); }, [] { made->mutex.unlock(); });
    return made;
  }();
  return *instance;
}

std::size_t round_up(std::size_t n, std::size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

[[noreturn]] void throw_errno(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

std::byte* reserve_addresses(std::size_t nbytes) {
  void* p = ::mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw_errno("reserving addresses");
  return static_cast<std::byte*>(p);
}

std::size_t checked(std::size_t nbytes) {
  if (nbytes == 0 || nbytes > (std::size_t{1} << 46)) throw std::invalid_argument("nbytes must be in [1, 2^46]");
  return round_up(nbytes, kHugePageBytes);
}

std::shared_ptr<Mapping> enlist(std::shared_ptr<Mapping> mapping) {
  Live& l = live();
  const std::lock_guard lock(l.mutex);
  l.by_end[mapping->data() + mapping->nbytes()] = mapping;
  return mapping;
}

// Reserves the range with a guard page or more on both sides: overruns trap, and no neighbour merges into its smaps entry.
std::shared_ptr<Mapping> reserve(std::size_t nbytes) {
  const std::size_t reserved_bytes = nbytes + 2 * kHugePageBytes;
  std::byte* reserved = reserve_addresses(reserved_bytes);
  const auto start = round_up(reinterpret_cast<std::uintptr_t>(reserved) + 4096, kHugePageBytes);
  return std::make_shared<Mapping>(reserved, reserved_bytes, reinterpret_cast<std::byte*>(start), nbytes);
}

}  // namespace

std::shared_ptr<Mapping> Mapping::anonymous(std::size_t nbytes, bool huge_pages) {
  nbytes = checked(nbytes);
  auto mapping = reserve(nbytes);
  void* const data = mapping->data();
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  if (!huge_pages || ::mmap(data, nbytes, PROT_READ | PROT_WRITE, kFlags | MAP_HUGETLB, -1, 0) == MAP_FAILED) {
    if (::mmap(data, nbytes, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED) throw_errno("mapping memory");
    ::madvise(data, nbytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);  // Advice: smaps tells whether it was taken.
  }
  if (::madvise(data, nbytes, MADV_DONTFORK) != 0) throw_errno("madvise(MADV_DONTFORK)");
  ::madvise(data, nbytes, MADV_DONTDUMP);
  return enlist(std::move(mapping));
}

std::shared_ptr<Mapping> Mapping::pattern(std::size_t nbytes, std::uint16_t value) {
  nbytes = checked(nbytes);
  const OwnedFd page_fd(::memfd_create("aio_ext pattern", MFD_CLOEXEC));
  if (page_fd.get() < 0) throw_errno("memfd_create");
  if (::ftruncate(page_fd.get(), kHugePageBytes) != 0) throw_errno("sizing the pattern page");
  void* const page = ::mmap(nullptr, kHugePageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd.get(), 0);
  if (page == MAP_FAILED) throw_errno("mapping the pattern page");
  std::fill_n(static_cast<std::uint16_t*>(page), kHugePageBytes / sizeof(value), value);
  ::munmap(page, kHugePageBytes);

  auto mapping = reserve(nbytes);
  for (std::size_t at = 0; at < nbytes; at += kHugePageBytes) {
    void* const shown = ::mmap(mapping->data() + at, kHugePageBytes, PROT_READ, MAP_SHARED | MAP_FIXED, page_fd.get(), 0);
    if (shown == MAP_FAILED) throw_errno("repeating the pattern page (limit: sysctl vm.max_map_count)");
  }
  return enlist(std::move(mapping));
}

std::shared_ptr<Mapping> Mapping::containing(const std::byte* data, std::size_t nbytes) {
  std::shared_ptr<Mapping> mapping;  // Outlives the lock: if this is the last lease, its destructor takes the lock.
  Live& l = live();
  const std::lock_guard lock(l.mutex);
  const auto it = l.by_end.upper_bound(data);
  if (it == l.by_end.end()) return nullptr;
  mapping = it->second.lock();
  const bool inside = mapping && data >= mapping->data() && nbytes <= static_cast<std::size_t>(it->first - data);
  return inside ? mapping : nullptr;
}

Mapping::~Mapping() {
  {
    Live& l = live();
    const std::lock_guard lock(l.mutex);
    const auto it = l.by_end.find(data_ + nbytes_);
    if (it != l.by_end.end() && it->second.expired()) l.by_end.erase(it);
  }
  if (fork_generation_ == fork_generation()) ::munmap(reserved_, reserved_bytes_);
}

void Mapping::populate() {
  if (::madvise(data_, nbytes_, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) throw_errno("populating memory");
  for (std::size_t at = 0; at < nbytes_; at += 4096) {  // Kernels before 5.14.
    auto* const byte = reinterpret_cast<volatile unsigned char*>(data_ + at);
    *byte = *byte;
  }
}

}  // namespace aio
