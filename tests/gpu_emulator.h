// What src/device.cu needs of CUDA, for a compiler of the host: a launch is a loop over all its threads.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __shared__ static

struct Index {
  unsigned x;
};
inline Index blockIdx, blockDim, threadIdx;

struct [[gnu::may_alias]] alignas(8) uint2 {
  unsigned x, y;
};
struct [[gnu::may_alias]] alignas(16) uint4 {
  unsigned x, y, z, w;
};

// The threads of one block, each with a stack of its own: they run one after the other, up to the next barrier.
class Block {
 public:
  void run(unsigned num_threads, const std::function<void()>& thread) {
    thread_ = &thread;
    threads_.resize(num_threads);
    stacks_.resize(num_threads * kStackBytes);
    for (unsigned k = 0; k < num_threads; ++k) {
      getcontext(&threads_[k]);
      threads_[k].uc_stack.ss_sp = &stacks_[k * kStackBytes];
      threads_[k].uc_stack.ss_size = kStackBytes;
      threads_[k].uc_link = &round_;
      makecontext(&threads_[k], [] { block().begin(); }, 0);
    }
    unsigned num_ended = 0;
    for (bool forward = true; num_ended == 0; forward = !forward) {  // in turns, so that no order is relied on
      for (unsigned k = 0; k < num_threads; ++k) {
        threadIdx.x = forward ? k : num_threads - 1 - k;
        at_barrier_ = false;
        swapcontext(&round_, &threads_[threadIdx.x]);
        num_ended += !at_barrier_;
      }
    }
    if (num_ended != num_threads) {
      std::fputs("a barrier that some threads of a block do not come to\n", stderr);
      std::abort();
    }
  }
  void wait() {
    at_barrier_ = true;
    swapcontext(&threads_[threadIdx.x], &round_);
  }
  static Block& block() {
    static Block only;
    return only;
  }

 private:
  static constexpr std::size_t kStackBytes = 64 << 10;
  void begin() { (*thread_)(); }

  const std::function<void()>* thread_ = nullptr;
  std::vector<ucontext_t> threads_;
  std::vector<char> stacks_;
  ucontext_t round_;
  bool at_barrier_ = false;
};

inline void __syncthreads() { Block::block().wait(); }
