// What a kernel works on: plain addresses, and how the numbers behind them are written down.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2, int8 = 3 };  // int8: codes of states, see vec_scalar.h

constexpr std::size_t size_of(Dtype dtype) {
  return dtype == Dtype::f32 ? 4 : dtype == Dtype::int8 ? 1 : 2;
}

// How the fp32 master weight is kept, and what else is written beside it.
enum class WeightFormat : int {
  f32 = 0,       // `master` alone: the weight is its own master
  split = 1,     // `weight` (bf16, upper half) + `rest` (16 bits, lower half): see vec_*.h, load_split
  out_f32 = 2,   // `master`, and a rounded copy goes to `weight`, which is never read
  out_bf16 = 3,
  out_f16 = 4,
  bf16 = 5,      // `weight` alone: bf16, rounded at random, and its own master
};

constexpr std::size_t kStatesMax = 3;
constexpr std::size_t kCodeBlock = 256;  // elements that share one scale, where states are codes

// Work is handed to threads in blocks of this many elements, and a sum of squares is the sum over blocks, each taken in
// kLanes lanes (element i in lane i % kLanes): the same additions for every vector width and number of threads.
constexpr std::size_t kBlock = 16384;
constexpr std::size_t kLanes = 16;
static_assert(kBlock % kCodeBlock == 0);

// The arrays of one update. What a format does not use is null.
struct Arrays {
  const std::byte* grad = nullptr;
  std::byte* weight = nullptr;
  std::byte* rest = nullptr;
  std::byte* master = nullptr;
  std::byte* states[kStatesMax] = {};
  float* scales[kStatesMax] = {};  // one for each kCodeBlock elements of a state in codes

  Dtype grad_dtype = Dtype::f32;
  WeightFormat weight_format = WeightFormat::f32;
  Dtype state_dtype = Dtype::f32;  // f32, bf16 or int8
  std::uint32_t seed = 0;          // of random rounding, to codes and to bf16
};

}  // namespace offload
