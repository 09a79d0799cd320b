// States in 8-bit codes, a scale for each kCodeBlock elements: the block's largest magnitude stands for almost the largest code.
// A block is decoded, updated and encoded again while it is in the first-level cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "arrays.h"
#include "sweep.h"

namespace offload::OFFLOAD_ISA {

constexpr float kCodeMax = 1.8748f;  // see vec_scalar.h: below 1.875 - 2^-15

template <class V, bool is_signed>
typename V::F32 load_code(const std::byte* codes, std::size_t i) {
  if constexpr (is_signed) return V::load_signed_code(codes, i);
  else return V::load_unsigned_code(codes, i);
}

// Encodes values[0, n), which are left as they are. A block whose largest magnitude is not finite becomes NaN, so that it shows;
// one that is all but zero (below the least normal number) becomes zero.
template <class V, bool is_signed>
void encode(const float* values, std::size_t n, std::byte* codes, float* scale, std::uint32_t seed) {
  const auto* source = reinterpret_cast<const std::byte*>(values);
  float magnitude = 0;
  {
    typename V::F32 magnitudes = V::set(0);
    std::size_t i = 0;
    for (; i + V::width <= n; i += V::width) magnitudes = V::max_magnitude(magnitudes, V::load_f32(source, i));
    float lanes[V::width];
    V::store_f32(reinterpret_cast<std::byte*>(lanes), 0, magnitudes);
    for (const float lane : lanes) magnitude = Scalar::max_magnitude(magnitude, lane);
    for (; i < n; ++i) magnitude = Scalar::max_magnitude(magnitude, values[i]);
  }
  const bool finite = magnitude <= 0x1.fffffep127f;
  if (!finite || magnitude < 0x1p-126f) {
    *scale = finite ? 0.0f : Scalar::canonical(magnitude - magnitude);
    std::memset(codes, 0, n);
    return;
  }
  *scale = magnitude / kCodeMax;
  const float inverse = kCodeMax / magnitude;
  for_each<V>(0, n, [=](auto v, std::size_t i) __attribute__((always_inline)) {
    using W = decltype(v);
    const auto x = W::load_f32(source, i);
    if constexpr (is_signed) W::store_signed_code(codes, i, x, W::set(inverse), seed);
    else W::store_unsigned_code(codes, i, x, W::set(inverse), seed);
  });
}

template <class V, class Rule>
void update_codes(const Rule& rule, const Arrays& arrays, std::size_t begin, std::size_t end) {
  with_weight_formats(arrays, [&](auto grad_dtype, auto format) {
    alignas(64) float decoded[kStatesMax][kCodeBlock];
    for (std::size_t first = begin; first < end; first += kCodeBlock) {
      const std::size_t n = end - first < kCodeBlock ? end - first : kCodeBlock;
      float scales[kStatesMax];
      for_states<Rule>([&](auto s) __attribute__((always_inline)) { scales[s] = arrays.scales[s][first / kCodeBlock]; });
      float(*const decoded_by_state)[kCodeBlock] = decoded;
      for_each<V>(0, n, [=](auto v, std::size_t i) __attribute__((always_inline)) {
        using W = decltype(v);
        typename W::F32 states[kStatesMax];
        for_states<Rule>([&](auto s) __attribute__((always_inline)) {
          const auto unit = load_code<W, Rule::state_signed[s]>(arrays.states[s], first + i);
          states[s] = W::mul(unit, W::set(scales[s]));
        });
        step<W, grad_dtype(), format()>(rule, arrays, first + i, states);
        for_states<Rule>([&](auto s) __attribute__((always_inline)) { W::store_f32(reinterpret_cast<std::byte*>(decoded_by_state[s]), i, states[s]); });
      });
      for_states<Rule>([&](auto s) __attribute__((always_inline)) {
        encode<V, Rule::state_signed[s]>(decoded[s], n, arrays.states[s] + first, &arrays.scales[s][first / kCodeBlock],
                                         arrays.seed + 2 * static_cast<std::uint32_t>(s));
      });
    }
  });
}

}  // namespace offload::OFFLOAD_ISA
