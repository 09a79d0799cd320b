// States in 8-bit codes, with a scale for each kCodeBlock elements: the power of two below the block's largest magnitude.
// A block is decoded and updated into the first-level cache, and encoded from there once its largest magnitudes are known.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "arrays.h"
#include "sweep.h"

namespace offload::OFFLOAD_ISA {

constexpr std::size_t kNoiseLanes = 16;  // elements with different random bits: as many as the widest vector has

// What is known of a block between decoding and encoding.
struct CodeBlock {
  alignas(64) float states[kStatesMax][kCodeBlock];
  float largest[kStatesMax] = {};  // magnitudes; a NaN counts as larger than any number
};

template <class V, bool is_signed>
[[gnu::always_inline]] inline typename V::F32 load_code(const std::byte* codes, std::size_t i, float scale) {
  if constexpr (is_signed) return V::load_signed_code(codes, i, V::set(scale), V::set(0x1p-14f * scale));
  else return V::load_unsigned_code(codes, i, V::set(scale));
}

// Updates elements [begin, end) of the block that starts at element `start`; its new states go to `block`.
template <class V, Dtype grad_dtype, WeightFormat format, class Rule>
[[gnu::always_inline]] inline void update_block(const Rule& rule, const Arrays& arrays, std::size_t start, std::size_t begin,
                                                std::size_t end, CodeBlock& block) {
  using F32 = typename V::F32;
  const std::size_t b = start / kCodeBlock;
  float scales[kStatesMax];
  for_states<Rule>([&](auto s) __attribute__((always_inline)) { scales[s] = arrays.scales[s][b]; });
  F32 largest[kStatesMax] = {V::set(0), V::set(0), V::set(0)};
  F32 poison = V::set(0);  // becomes NaN with the first weight that is not finite
  const auto first = [=](auto, std::size_t i) __attribute__((always_inline)) {
    Operands<V> x;
    for_states<Rule>([&](auto s) __attribute__((always_inline)) {
      x.states[s] = load_code<V, Rule::state_signed[s]>(arrays.states[s], start + i, scales[s]);
    });
    load_and_advance<V, grad_dtype, format>(rule, arrays, start + i, x);
    return x;
  };
  const auto second = [=, &block, &largest, &poison](auto, std::size_t i, auto& x) __attribute__((always_inline)) {
    const auto weight = rule.template apply<V>(x);
    poison = V::fma(weight, V::set(0), poison);
    store_weight<V, format>(arrays, start + i, weight);
    for_states<Rule>([&](auto s) __attribute__((always_inline)) {
      largest[s] = V::larger_magnitude(largest[s], x.states[s]);
      V::store_f32(reinterpret_cast<std::byte*>(block.states[s]), i, x.states[s]);
    });
  };
  for_each_overlapped<V>(begin, end, first, second);
  if (V::has_nan(poison)) [[unlikely]] {
    for (std::size_t i = start + begin; i < start + end; ++i) {
      store_weight<Scalar, format>(arrays, i, Scalar::canonical(load_weight<Scalar, format>(arrays, i)));
    }
  }
  for_states<Rule>([&](auto s) __attribute__((always_inline)) {
    block.largest[s] = Scalar::larger_magnitude(block.largest[s], V::largest_lane(largest[s]));
  });
}

// Encodes values[0, n). A block whose largest magnitude is not finite becomes NaN, so that it shows; one that is all but zero
// (below 2^-125, where a scale would not be a normal number) becomes zero.
template <class V, bool is_signed>
[[gnu::always_inline]] inline void encode(const float* values, std::size_t n, float largest,
                                          const std::uint32_t (&noise)[kNoiseLanes], std::byte* codes, float* scale) {
  const auto largest_bits = std::bit_cast<std::uint32_t>(largest);
  if (largest_bits >= 0x7f800000 || largest_bits < 0x01000000) [[unlikely]] {
    *scale = largest_bits >= 0x7f800000 ? Scalar::canonical(largest - largest) : 0.0f;
    std::memset(codes, 0, n);
    return;
  }
  // largest / scale is in [1.87, 3.7499): with what is added to signed numbers it stays below 3.75, the largest code.
  *scale = std::bit_cast<float>(((largest_bits + 0x00100200) & 0x7f800000) - 0x00800000);
  const float inverse = 1.0f / *scale;
  const auto* source = reinterpret_cast<const std::byte*>(values);
  const auto code = [&](auto v, std::size_t i, std::size_t lane) __attribute__((always_inline)) {
    using W = decltype(v);
    const auto x = W::load_f32(source, i);
    const auto random = W::load_u32(noise, lane);
    if constexpr (is_signed) return W::signed_code(x, W::set(inverse), random);
    else return W::unsigned_code(x, W::set(inverse), random);
  };
  std::size_t i = 0;
  for (; i + 4 * V::width <= n; i += 4 * V::width) {
    typename V::U32 four[4];
    for (std::size_t k = 0; k < 4; ++k) {
      // A constant for vectors, since 4 of them are a multiple of the lanes: random bits stay in registers.
      const std::size_t lane = (V::width == 1 ? i + k : k * V::width) % kNoiseLanes;
      four[k] = code(V{}, i + k * V::width, lane);
    }
    if constexpr (is_signed) V::store_signed_codes(codes, i, four);
    else V::store_unsigned_codes(codes, i, four);
  }
  for (; i < n; ++i) Scalar::store_code(codes, i, code(Scalar{}, i, i % kNoiseLanes));
}

// Random bits of a block, 20 for each lane: from what the block holds and from the step. Lanes are a golden section apart.
inline void fill(std::uint32_t (&noise)[kNoiseLanes], const float (&largest)[kStatesMax], std::uint32_t seed) {
  std::uint32_t random = seed;
  for (const float x : largest) {
    random = (random ^ std::bit_cast<std::uint32_t>(x)) * 0x9e3779b1;
    random ^= random >> 15;
  }
  for (std::uint32_t lane = 0; lane < kNoiseLanes; ++lane) noise[lane] = (random + lane * 0x9e3779b9) >> 12;
}

template <class V, class Rule>
void update_codes(const Rule& rule, const Arrays& arrays, std::size_t begin, std::size_t end) {
  with_weight_formats(arrays, [&](auto grad_dtype, auto format) {
    for (std::size_t start = begin; start < end; start += kCodeBlock) {
      const std::size_t n = end - start < kCodeBlock ? end - start : kCodeBlock, whole = n - n % V::width;
      CodeBlock block;
      update_block<V, grad_dtype(), format()>(rule, arrays, start, 0, whole, block);
      if (whole < n) update_block<Scalar, grad_dtype(), format()>(rule, arrays, start, whole, n, block);
      std::uint32_t noise[kNoiseLanes];
      fill(noise, block.largest, arrays.seed);
      for_states<Rule>([&](auto s) __attribute__((always_inline)) {
        encode<V, Rule::state_signed[s]>(block.states[s], n, block.largest[s], noise, arrays.states[s] + start,
                                         &arrays.scales[s][start / kCodeBlock]);
      });
    }
  });
}

}  // namespace offload::OFFLOAD_ISA
