// The kernels of a GPU: the scalar text, a few elements or a lane a thread, so that the bits are those of the CPU. Compiled at run
// time (offload/kernels/nvrtc.py) for one optimizer and its formats: OFFLOAD_RULE, OFFLOAD_GRAD, OFFLOAD_FORMAT, OFFLOAD_STATE.
// No multiplication and addition may be contracted, and division, square root and subnormal numbers must be IEEE's.
#include "sweep.h"

namespace {

using namespace offload;
using offload::OFFLOAD_ISA::Scalar;

constexpr Dtype kGrad = Dtype::OFFLOAD_GRAD, kState = Dtype::OFFLOAD_STATE;
constexpr WeightFormat kFormat = WeightFormat::OFFLOAD_FORMAT;
constexpr Dtype kWeight = kFormat == WeightFormat::out_f32 ? Dtype::f32 : Dtype::bf16;  // or fp16, as wide

constexpr std::size_t kEach = 4;  // consecutive elements that a thread updates: one access of 8 or 16 bytes an array

constexpr std::size_t kGroups = 4;  // blocks of kBlock elements that a block of threads adds up, each in kLanes threads
constexpr std::size_t kPieces = 8;  // of 16 bytes, that a thread has on their way while it adds up those before
constexpr std::size_t kPieceBytes = sizeof(uint4);
constexpr std::size_t kStagedBytes = kLanes * kPieces * kPieceBytes;  // of a group, at a time
constexpr std::size_t kStagedElements = kStagedBytes / size_of(kGrad);
static_assert(kBlock % kStagedElements == 0);

constexpr std::size_t kRangeThreads = 256;  // that work on one parameter's blocks

// The elements of one parameter in a flat gradient, and the first of its blocks among those of all parameters.
struct Range {
  std::int64_t start, numel, first_block;
};

// Bytes between an address and the last one before it at which one access takes kEach elements; of null, none.
std::size_t past_access(const std::byte* address, Dtype dtype) {
  return reinterpret_cast<std::size_t>(address) % (kEach * size_of(dtype));
}

bool is_aligned(const Arrays& arrays) {
  std::size_t bytes = past_access(arrays.grad, kGrad) | past_access(arrays.weight, kWeight) |
                      past_access(arrays.rest, Dtype::bf16) | past_access(arrays.master, Dtype::f32);
  for (std::size_t s = 0; s < OFFLOAD_RULE::num_states; ++s) bytes |= past_access(arrays.states[s], kState);
  return bytes == 0;
}

// kEach elements by one access, from an array to local memory. Word by word there: a compiler keeps words in registers.
template <Dtype dtype>
void load_each(std::byte* to, const std::byte* from) {
  if constexpr (size_of(dtype) == 4) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    std::memcpy(to, &words.x, 4);
    std::memcpy(to + 4, &words.y, 4);
    std::memcpy(to + 8, &words.z, 4);
    std::memcpy(to + 12, &words.w, 4);
  } else {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    std::memcpy(to, &words.x, 4);
    std::memcpy(to + 4, &words.y, 4);
  }
}

// The same back.
template <Dtype dtype>
void store_each(std::byte* to, const std::byte* from) {
  const auto word = [from](std::size_t k) {
    unsigned bits;
    std::memcpy(&bits, from + 4 * k, 4);
    return bits;
  };
  if constexpr (size_of(dtype) == 4) *reinterpret_cast<uint4*>(to) = {word(0), word(1), word(2), word(3)};
  else *reinterpret_cast<uint2*>(to) = {word(0), word(1)};
}

// kEach elements of each array, for the scalar text to work on.
struct Each {
  alignas(16) std::byte grad[4 * kEach], weight[4 * kEach], rest[4 * kEach], master[4 * kEach];
  alignas(16) std::byte states[kStatesMax][4 * kEach];
};

// All loads stand before all work, so that a thread waits for memory once.
void update_each(const OFFLOAD_RULE& rule, const Arrays& arrays, std::size_t i) {
  Each each;
  Arrays here;
  here.grad = each.grad;
  here.weight = each.weight;
  here.rest = each.rest;
  here.master = each.master;
  here.seed = arrays.seed;
  load_each<kGrad>(each.grad, arrays.grad + i * size_of(kGrad));
  if constexpr (kFormat == WeightFormat::split) {
    load_each<Dtype::bf16>(each.weight, arrays.weight + 2 * i);
    load_each<Dtype::bf16>(each.rest, arrays.rest + 2 * i);
  } else if constexpr (kFormat == WeightFormat::bf16) {
    load_each<Dtype::bf16>(each.weight, arrays.weight + 2 * i);
  } else {
    load_each<Dtype::f32>(each.master, arrays.master + 4 * i);
  }
  for (std::size_t s = 0; s < OFFLOAD_RULE::num_states; ++s) {
    here.states[s] = each.states[s];
    load_each<kState>(each.states[s], arrays.states[s] + i * size_of(kState));
  }
  Operands<Scalar> x[kEach];
  for (std::size_t k = 0; k < kEach; ++k) {
    x[k] = OFFLOAD_ISA::begin_update<Scalar, kGrad, kFormat, kState>(rule, here, k);
  }
  for (std::size_t k = 0; k < kEach; ++k) {
    OFFLOAD_ISA::finish_update<Scalar, kFormat, kState>(rule, here, k, x[k]);
  }
  if constexpr (kFormat == WeightFormat::split) store_each<Dtype::bf16>(arrays.rest + 2 * i, each.rest);
  else if constexpr (kFormat != WeightFormat::bf16) store_each<Dtype::f32>(arrays.master + 4 * i, each.master);
  if constexpr (kFormat != WeightFormat::f32) store_each<kWeight>(arrays.weight + i * size_of(kWeight), each.weight);
  for (std::size_t s = 0; s < OFFLOAD_RULE::num_states; ++s) {
    store_each<kState>(arrays.states[s] + i * size_of(kState), each.states[s]);
  }
}

// The last range that begins at or before a block: those without elements have no block.
Range range_of(const Range* ranges, std::size_t num_ranges, std::size_t block) {
  std::size_t range = 0;
  for (std::size_t end = num_ranges; end - range > 1;) {
    const std::size_t middle = (range + end) / 2;
    (ranges[middle].first_block <= static_cast<std::int64_t>(block) ? range : end) = middle;
  }
  return ranges[range];
}

// The lanes of a block, added as a tree.
double tree(const double* lanes) {
  double sums[kLanes];
  for (std::size_t j = 0; j < kLanes; ++j) sums[j] = lanes[j];
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0];
}

}  // namespace

// One step over `numel` elements, kEach a thread.
extern "C" __global__ void update(const OFFLOAD_RULE rule, const Arrays arrays, const std::size_t numel) {
  const std::size_t begin = (std::size_t{blockIdx.x} * blockDim.x + threadIdx.x) * kEach, end = begin + kEach;
  if (end <= numel && is_aligned(arrays)) {
    update_each(rule, arrays, begin);
  } else {
#pragma unroll 1
    for (std::size_t i = begin; i < (end < numel ? end : numel); ++i) {
      auto x = OFFLOAD_ISA::begin_update<Scalar, kGrad, kFormat, kState>(rule, arrays, i);
      OFFLOAD_ISA::finish_update<Scalar, kFormat, kState>(rule, arrays, i, x);
    }
  }
}

// A sum of squares in two launches. The first: each lane of each block of all parameters, to lanes[block][lane]. The additions
// of a lane wait for each other. So kLanes threads bring a block to shared memory, by the widest loads and a piece ahead, and
// each adds up its lane there. What is missing at a parameter's end is zero, which changes no sum.
extern "C" __global__ void square_lanes(const std::byte* const source, const Range* const ranges,
                                        const std::size_t num_ranges, const std::size_t num_blocks,
                                        double* const lanes) {
  __shared__ uint4 staged[kGroups][kLanes * kPieces + 4];  // 64 bytes apart, so that groups use different banks
  __shared__ std::size_t num_chunks[kGroups];
  const std::size_t group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const std::size_t block = blockIdx.x * kGroups + group;
  const std::byte* first = source;
  std::size_t numel = 0;
  if (block < num_blocks) {
    const Range range = range_of(ranges, num_ranges, block);
    const std::size_t begin = (block - static_cast<std::size_t>(range.first_block)) * kBlock;
    const std::size_t rest = static_cast<std::size_t>(range.numel) - begin;
    first += (static_cast<std::size_t>(range.start) + begin) * size_of(kGrad);
    numel = rest < kBlock ? rest : kBlock;
  }
  num_chunks[group] = (numel + kStagedElements - 1) / kStagedElements;
  __syncthreads();
  std::size_t most_chunks = 0;
  for (std::size_t g = 0; g < kGroups; ++g) most_chunks = most_chunks < num_chunks[g] ? num_chunks[g] : most_chunks;

  const bool aligned = reinterpret_cast<std::size_t>(first) % kPieceBytes == 0;
  const auto is_whole = [&](std::size_t chunk) { return aligned && (chunk + 1) * kStagedElements <= numel; };
  auto* const here = reinterpret_cast<std::byte*>(staged[group]);
  uint4 next[kPieces];
  const auto load_next = [&](std::size_t chunk) {
    const auto* const pieces = reinterpret_cast<const uint4*>(first + chunk * kStagedBytes);
    for (std::size_t k = 0; k < kPieces; ++k) next[k] = pieces[k * kLanes + lane];
  };
  double sum = 0;
  if (is_whole(0)) load_next(0);
  for (std::size_t chunk = 0; chunk < most_chunks; ++chunk) {
    if (is_whole(chunk)) {
      for (std::size_t k = 0; k < kPieces; ++k) staged[group][k * kLanes + lane] = next[k];
    } else {
#pragma unroll 1
      for (std::size_t k = lane; k < kStagedElements; k += kLanes) {
        const std::size_t i = chunk * kStagedElements + k;
        const float x = i < numel ? OFFLOAD_ISA::load<Scalar, kGrad>(first, i) : 0;
        OFFLOAD_ISA::store<Scalar, kGrad>(here, k, x);
      }
    }
    __syncthreads();
    if (is_whole(chunk + 1)) load_next(chunk + 1);
#pragma unroll 16
    for (std::size_t i = lane; i < kStagedElements; i += kLanes) {
      sum = Scalar::add_square(sum, OFFLOAD_ISA::load<Scalar, kGrad>(here, i));
    }
    __syncthreads();
  }
  if (block < num_blocks) lanes[block * kLanes + lane] = sum;
}

// The second: the blocks of each parameter in order, to sums[parameter]. A block of threads for each parameter.
extern "C" __global__ void square_ranges(const Range* const ranges, const double* const lanes, double* const sums) {
  __shared__ double trees[kRangeThreads];
  const Range range = ranges[blockIdx.x];
  const std::size_t num_blocks = (static_cast<std::size_t>(range.numel) + kBlock - 1) / kBlock;
  const double* const first = lanes + static_cast<std::size_t>(range.first_block) * kLanes;
  double total = 0;
  for (std::size_t begin = 0; begin < num_blocks; begin += kRangeThreads) {
    const std::size_t rest = num_blocks - begin;
    if (threadIdx.x < rest) trees[threadIdx.x] = tree(first + (begin + threadIdx.x) * kLanes);
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 16
      for (std::size_t k = 0; k < (rest < kRangeThreads ? rest : kRangeThreads); ++k) total += trees[k];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}
