// The kernels of a GPU: the scalar text, an element or a lane a thread, so that the bits are those of the CPU. Compiled at run
// time (offload/kernels/nvrtc.py) for one optimizer and its formats: OFFLOAD_RULE, OFFLOAD_GRAD, OFFLOAD_FORMAT, OFFLOAD_STATE.
// No multiplication and addition may be contracted, and division, square root and subnormal numbers must be IEEE's.
#include "sweep.h"

namespace {

using namespace offload;
using offload::OFFLOAD_ISA::Scalar;

constexpr std::size_t kEach = 4;  // elements that a thread has under way at a time

// The place of the thread among all threads of the launch.
std::size_t thread_index() { return std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; }

// The elements of one parameter in a flat gradient, and the first of its blocks among those of all parameters.
struct Range {
  std::int64_t start, numel, first_block;
};

}  // namespace

// One step over `numel` elements. Threads of a block stand side by side in each of kEach rows; all rows are loaded before the
// first is stored, so that a thread waits for memory once. (The last block has rows, or parts of them, without elements.)
extern "C" __global__ void update(const OFFLOAD_RULE rule, const Arrays arrays, const std::size_t numel) {
  constexpr Dtype grad = Dtype::OFFLOAD_GRAD, state = Dtype::OFFLOAD_STATE;
  constexpr WeightFormat format = WeightFormat::OFFLOAD_FORMAT;
  const std::size_t start = std::size_t{blockIdx.x} * blockDim.x * kEach;
  const auto place = [&](std::size_t k) { return start + k * blockDim.x + threadIdx.x; };
  if (start + kEach * blockDim.x <= numel) {
    Operands<Scalar> x[kEach];
    for (std::size_t k = 0; k < kEach; ++k) {
      x[k] = OFFLOAD_ISA::begin_update<Scalar, grad, format, state>(rule, arrays, place(k));
    }
    for (std::size_t k = 0; k < kEach; ++k) {
      OFFLOAD_ISA::finish_update<Scalar, format, state>(rule, arrays, place(k), x[k]);
    }
  } else {
    for (std::size_t i = place(0); i < numel; i += blockDim.x) {
      auto x = OFFLOAD_ISA::begin_update<Scalar, grad, format, state>(rule, arrays, i);
      OFFLOAD_ISA::finish_update<Scalar, format, state>(rule, arrays, i, x);
    }
  }
}

// A sum of squares in three launches. The first: each lane of each block of all parameters, to lanes[block][lane].
extern "C" __global__ void square_lanes(const std::byte* const source, const Range* const ranges,
                                        const std::size_t num_ranges, const std::size_t num_blocks,
                                        double* const lanes) {
  const std::size_t thread = thread_index();
  const auto block = static_cast<std::int64_t>(thread / kLanes);
  if (thread >= num_blocks * kLanes) return;
  std::size_t range = 0;  // the last one that begins at or before the block: those without elements have no block
  for (std::size_t end = num_ranges; end - range > 1;) {
    const std::size_t middle = (range + end) / 2;
    (ranges[middle].first_block <= block ? range : end) = middle;
  }
  const auto begin = static_cast<std::size_t>(block - ranges[range].first_block) * kBlock;
  const auto numel = static_cast<std::size_t>(ranges[range].numel), rest = numel - begin;
  const std::size_t start = static_cast<std::size_t>(ranges[range].start) + begin;
  double sum = 0;
#pragma unroll 8  // the additions wait for each other, the loads need not
  for (std::size_t i = thread % kLanes; i < (rest < kBlock ? rest : kBlock); i += kLanes) {
    sum = Scalar::add_square(sum, OFFLOAD_ISA::load<Scalar, Dtype::OFFLOAD_GRAD>(source, start + i));
  }
  lanes[thread] = sum;
}

// The second: the lanes of each block, to its first lane.
extern "C" __global__ void square_blocks(const std::size_t num_blocks, double* const lanes) {
  const std::size_t block = thread_index();
  if (block >= num_blocks) return;
  double sums[kLanes];
  for (std::size_t j = 0; j < kLanes; ++j) sums[j] = lanes[block * kLanes + j];
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  lanes[block * kLanes] = sums[0];
}

// The third: the blocks of each parameter, in order, to sums[parameter].
extern "C" __global__ void square_ranges(const Range* const ranges, const std::size_t num_ranges,
                                         const double* const lanes, double* const sums) {
  const std::size_t range = thread_index();
  if (range >= num_ranges) return;
  const auto numel = static_cast<std::size_t>(ranges[range].numel);
  const double* const first = lanes + static_cast<std::size_t>(ranges[range].first_block) * kLanes;
  double total = 0;
#pragma unroll 16
  for (std::size_t block = 0; block < (numel + kBlock - 1) / kBlock; ++block) total += first[block * kLanes];
  sums[range] = total;
}
