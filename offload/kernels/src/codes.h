// States in 8-bit codes, with a scale for each kCodeBlock elements: the power of two below the block's largest magnitude.
// A block is updated in two passes: the first decodes and advances, into the first-level cache; the second applies and, as the
// largest magnitudes are known by then, encodes. Each pass needs few enough constants that they stay in registers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "arrays.h"
#include "sweep.h"

namespace offload::OFFLOAD_ISA {

constexpr std::size_t kNoiseLanes = 16;  // elements with different random bits: as many as the widest vector has
constexpr std::size_t kCodeVectors = 4;  // vectors that are encoded at once
constexpr std::size_t kPrefetch = 512;   // elements ahead

// A block between its two passes.
struct CodeBlock {
  alignas(64) float states[kStatesMax][kCodeBlock], grad[kCodeBlock];
  float largest[kStatesMax] = {};  // magnitudes; a NaN counts as larger than any number, and may have a sign
};

inline std::byte* bytes_of(float* numbers) { return reinterpret_cast<std::byte*>(numbers); }

// The number that code 0 stands for in a block of that scale; less itself where codes have signs. The bits of the number of
// code c are c << 20 more: so it is all that decoding and encoding have to know.
template <bool is_signed>
float least_of(float scale) {
  return scale * (is_signed ? 0x1p-14f : 0x1p-30f);
}

// A block whose largest magnitude is not finite becomes NaN, so that it shows; one of zeros stays zero. Else the power of two
// that is below the largest magnitude, but not so small that `least_of` would not be a normal number.
template <bool is_signed>
constexpr std::uint32_t smallest_scale_bits = is_signed ? 0x07800000 : 0x0f800000;

template <bool is_signed>
float scale_for(float largest) {
  const auto bits = std::bit_cast<std::uint32_t>(largest);
  if (bits >= 0x7f800000) return Scalar::canonical(largest - largest);
  if (bits == 0) return 0;
  // largest / scale is below 3.7499: with what is added to signed numbers it stays below 3.75, the largest code.
  constexpr std::uint32_t smallest = smallest_scale_bits<is_signed>;
  const std::uint32_t scale = ((bits + 0x00100200) & 0x7f800000) - 0x00800000;
  return std::bit_cast<float>(bits < smallest + 0x00800000 ? smallest : scale);
}

template <class V, bool is_signed>
[[gnu::always_inline]] inline typename V::F32 load_code(const std::byte* codes, std::size_t i, float scale) {
  if constexpr (is_signed) return V::load_signed_code(codes, i, least_of<true>(scale));
  else return V::load_unsigned_code(codes, i, least_of<false>(scale));
}

template <class V, bool is_signed>
[[gnu::always_inline]] inline typename V::U32 code_of(typename V::F32 x, float scale, typename V::U32 random) {
  if constexpr (is_signed) return V::signed_code(x, least_of<true>(scale), random);
  else return V::unsigned_code(x, least_of<false>(scale), random);
}

// The first pass, over elements [begin, end) of the block that starts at element `start`: new states go to `block`.
template <class V, Dtype grad_dtype, WeightFormat format, class Rule>
[[gnu::always_inline]] inline void advance_block(const Rule rule, const Arrays arrays, std::size_t start, std::size_t begin,
                                                 std::size_t end, CodeBlock& block) {
  float scales[kStatesMax];
  for_states<Rule>([&](auto s) __attribute__((always_inline)) { scales[s] = arrays.scales[s][start / kCodeBlock]; });
  typename V::F32 largest[kStatesMax] = {V::set(0), V::set(0), V::set(0)};
#pragma GCC unroll 2
  for (std::size_t i = begin; i < end; i += V::width) {
    Operands<V> x;
    for_states<Rule>([&](auto s) __attribute__((always_inline)) {
      x.states[s] = load_code<V, Rule::state_signed[s]>(arrays.states[s], start + i, scales[s]);
    });
    load_and_advance<V, grad_dtype, format>(rule, arrays, start + i, x);
    V::store_f32(bytes_of(block.grad), i, x.grad);
    for_states<Rule>([&](auto s) __attribute__((always_inline)) {
      largest[s] = V::larger_bits(largest[s], Rule::state_signed[s] ? V::magnitude(x.states[s]) : x.states[s]);
      V::store_f32(bytes_of(block.states[s]), i, x.states[s]);
    });
  }
  for_states<Rule>([&](auto s) __attribute__((always_inline)) {
    block.largest[s] = Scalar::larger_bits(block.largest[s], V::largest_lane(largest[s]));
  });
}

// A processor fetches by itself what follows on what it reads, but gradients are read in one pass and weights in the other: so
// each would be late, in turns. This asks for those of elements [i, i + count), if there are any: an address beyond does no
// harm. Split master has more arithmetic than memory traffic, and was slower with it.
template <std::size_t count, Dtype grad_dtype, WeightFormat format>
[[gnu::always_inline]] inline void prefetch([[maybe_unused]] const Arrays& arrays, [[maybe_unused]] std::size_t i) {
  if constexpr (format != WeightFormat::split && format != WeightFormat::bf16) {
    constexpr std::size_t line = 64, grad_bytes = size_of(grad_dtype);
#pragma GCC unroll 4
    for (std::size_t k = 0; k < count * grad_bytes; k += line) __builtin_prefetch(arrays.grad + i * grad_bytes + k);
#pragma GCC unroll 4
    for (std::size_t k = 0; k < count * 4; k += line) __builtin_prefetch(arrays.master + i * 4 + k, 1);
  }
}

// The second pass: weights, and the codes of the states in `block`; `vectors` at once. `random` seeds their rounding.
template <class V, std::size_t vectors, Dtype grad_dtype, WeightFormat format, class Rule>
[[gnu::always_inline]] inline void apply_block(const Rule rule, const Arrays arrays, std::size_t start, std::size_t begin,
                                               std::size_t end, CodeBlock& block, const float (&scales)[kStatesMax],
                                               std::uint32_t random) {
  typename V::F32 poison = V::set(0);  // becomes NaN with the first weight that is NaN
  for (std::size_t i = begin; i < end; i += vectors * V::width) {
    if constexpr (vectors > 1) prefetch<vectors * V::width, grad_dtype, format>(arrays, start + i + kPrefetch);
    typename V::U32 codes[kStatesMax][vectors];
#pragma GCC unroll 4
    for (std::size_t k = 0; k < vectors; ++k) {
      const std::size_t j = i + k * V::width;
      // j % kNoiseLanes, but known when this is compiled wherever it can be.
      const std::size_t lane = (vectors * V::width % kNoiseLanes == 0 ? j - i : j) % kNoiseLanes;
      Operands<V> x;
      x.weight = load_weight<V, format>(arrays, start + j);
      x.grad = V::load_f32(bytes_of(block.grad), j);
      for_states<Rule>([&](auto s) __attribute__((always_inline)) {
        x.states[s] = V::load_f32(bytes_of(block.states[s]), j);
        codes[s][k] = code_of<V, Rule::state_signed[s]>(x.states[s], scales[s], V::noise(random, lane));
      });
      const auto weight = rule.template apply<V>(x);
      poison = V::add(poison, weight);
      // (Any other format is written again below, canonical, from what it holds.)
      const auto written = format == WeightFormat::bf16 ? V::canonical(weight) : weight;
      store_weight<V, format>(arrays, start + j, written, V::set_bits(random));
    }
    for_states<Rule>([&](auto s) __attribute__((always_inline)) {
      if constexpr (vectors == 1) V::store_code(arrays.states[s], start + i, codes[s][0]);
      else if constexpr (Rule::state_signed[s]) V::store_signed_codes(arrays.states[s], start + i, codes[s]);
      else V::store_unsigned_codes(arrays.states[s], start + i, codes[s]);
    });
  }
  if (V::has_nan(poison)) [[unlikely]] {
    for (std::size_t i = start + begin; i < start + end; ++i) {
      store_weight<Scalar, format>(arrays, i, Scalar::canonical(load_weight<Scalar, format>(arrays, i)), random);
    }
  }
}

// A block's random bits come from what it holds and from the step.
inline std::uint32_t hash(const float (&largest)[kStatesMax], std::uint32_t seed) {
  std::uint32_t random = seed;
  for (const float x : largest) {
    random = (random ^ std::bit_cast<std::uint32_t>(Scalar::canonical(x))) * 0x9e3779b1;
    random ^= random >> 15;
  }
  return random;
}

template <class V, class Rule>
void update_codes(const Rule& rule, const Arrays& arrays, std::size_t begin, std::size_t end) {
  with_weight_formats(arrays, [&](auto grad_dtype, auto format) {
    for (std::size_t start = begin; start < end; start += kCodeBlock) {
      const std::size_t n = end - start < kCodeBlock ? end - start : kCodeBlock, whole = n - n % (kCodeVectors * V::width);
      CodeBlock block;
      advance_block<V, grad_dtype(), format()>(rule, arrays, start, 0, whole, block);
      if (whole < n) advance_block<Scalar, grad_dtype(), format()>(rule, arrays, start, whole, n, block);
      float scales[kStatesMax];
      for_states<Rule>([&](auto s) __attribute__((always_inline)) {
        scales[s] = scale_for<Rule::state_signed[s]>(block.largest[s]);
      });
      const std::uint32_t random = hash(block.largest, arrays.seed);
      apply_block<V, kCodeVectors, grad_dtype(), format()>(rule, arrays, start, 0, whole, block, scales, random);
      if (whole < n) apply_block<Scalar, 1, grad_dtype(), format()>(rule, arrays, start, whole, n, block, scales, random);
      for_states<Rule>([&](auto s) __attribute__((always_inline)) {
        arrays.scales[s][start / kCodeBlock] = scales[s];
        if (!(scales[s] > 0)) [[unlikely]] std::memset(arrays.states[s] + start, 0, n);
      });
    }
  });
}

// Codes of elements [begin, end) of the block of numbers that starts at element `start`; `vectors` at once.
template <class V, std::size_t vectors, bool is_signed>
[[gnu::always_inline]] inline void encode_block(std::byte* codes, const std::byte* numbers, std::size_t start,
                                                std::size_t begin, std::size_t end, float scale, std::uint32_t random) {
  for (std::size_t i = begin; i < end; i += vectors * V::width) {
    typename V::U32 found[vectors];
    for (std::size_t k = 0; k < vectors; ++k) {
      const std::size_t j = i + k * V::width;
      found[k] = code_of<V, is_signed>(V::load_f32(numbers, start + j), scale, V::noise(random, j % kNoiseLanes));
    }
    if constexpr (vectors == 1) V::store_code(codes, start + i, found[0]);
    else if constexpr (is_signed) V::store_signed_codes(codes, start + i, found);
    else V::store_unsigned_codes(codes, start + i, found);
  }
}

// The same for numbers that may have been codes before, whose values stay then. The largest of them gives their scale, or, of
// squares, half of it, in which all of them have a code, too. Only the number of the largest code would give twice the scale.
template <bool is_signed>
float scale_for_numbers(float largest) {
  const float scale = scale_for<is_signed>(largest), half = scale / 2;
  const float of_largest_code = 3.75f * half - (is_signed ? least_of<true>(half) : 0);
  const bool is_smallest = std::bit_cast<std::uint32_t>(scale) <= smallest_scale_bits<is_signed>;
  return !is_smallest && largest == of_largest_code ? half : scale;
}

// Numbers that come from elsewhere become codes and scales, rounded as an update rounds them.
template <class V, bool is_signed>
void encode_codes(std::byte* codes, float* scales, const std::byte* numbers, std::size_t begin, std::size_t end) {
  for (std::size_t start = begin; start < end; start += kCodeBlock) {
    const std::size_t n = end - start < kCodeBlock ? end - start : kCodeBlock, whole = n - n % (kCodeVectors * V::width);
    typename V::F32 largest_f32 = V::set(0);
    for (std::size_t i = 0; i < whole; i += V::width) {
      largest_f32 = V::larger_bits(largest_f32, V::magnitude(V::load_f32(numbers, start + i)));
    }
    float largest[kStatesMax] = {V::largest_lane(largest_f32)};
    for (std::size_t i = whole; i < n; ++i) {
      largest[0] = Scalar::larger_bits(largest[0], Scalar::magnitude(Scalar::load_f32(numbers, start + i)));
    }
    const float scale = scale_for_numbers<is_signed>(largest[0]);
    const std::uint32_t random = hash(largest, 0);
    encode_block<V, kCodeVectors, is_signed>(codes, numbers, start, 0, whole, scale, random);
    encode_block<Scalar, 1, is_signed>(codes, numbers, start, whole, n, scale, random);
    scales[start / kCodeBlock] = scale;
    if (!(scale > 0)) std::memset(codes + start, 0, n);
  }
}

// The other way round, exactly.
template <class V, bool is_signed>
void decode_codes(std::byte* numbers, const std::byte* codes, const float* scales, std::size_t begin, std::size_t end) {
  for (std::size_t start = begin; start < end; start += kCodeBlock) {
    const float scale = scales[start / kCodeBlock];
    for_each<V>(start, end - start < kCodeBlock ? end : start + kCodeBlock,
                [=](auto v, std::size_t i) __attribute__((always_inline)) {
                  using W = decltype(v);
                  W::store_f32(numbers, i, W::canonical(load_code<W, is_signed>(codes, i, scale)));
                });
  }
}

}  // namespace offload::OFFLOAD_ISA
