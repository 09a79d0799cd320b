// Compiled once for each instruction set, OFFLOAD_ISA, with OFFLOAD_VEC naming its struct in vec_<isa>.h. Whatever depends on it lives in a namespace of that
// name or in a template over its vector type, so the linker can never put one instruction set's code in another's place.
#include <algorithm>
#include <cstring>

#include "codes.h"
#include "mersenne.h"
#include "sweep.h"
#include "table.h"

#define OFFLOAD_TEXT(x) #x
#define OFFLOAD_QUOTE(x) OFFLOAD_TEXT(x)
#define OFFLOAD_PASTE(a, b) a##b
#define OFFLOAD_JOIN(a, b) OFFLOAD_PASTE(a, b)
#include OFFLOAD_QUOTE(OFFLOAD_JOIN(vec_, OFFLOAD_ISA).h)

namespace offload {
namespace OFFLOAD_ISA {
namespace {

using Vec = OFFLOAD_VEC;

template <class Rule>
void update(const Rule& rule, const Arrays& arrays, std::size_t begin, std::size_t end) {
  if (arrays.state_dtype == Dtype::int8) return update_codes<Vec>(rule, arrays, begin, end);
  with_formats(arrays, [&](auto grad_dtype, auto format, auto state_dtype) {
    const auto first = [=](auto v, std::size_t i) __attribute__((always_inline)) {
      return begin_update<decltype(v), grad_dtype(), format(), state_dtype()>(rule, arrays, i);
    };
    const auto second = [=](auto v, std::size_t i, auto& x) __attribute__((always_inline)) {
      finish_update<decltype(v), format(), state_dtype()>(rule, arrays, i, x);
    };
    for_each_overlapped<Vec>(begin, end, first, second);
  });
}

void accumulate(std::byte* destination, Dtype destination_dtype, const std::byte* source, Dtype source_dtype,
                std::size_t begin, std::size_t end) {
  with_constant(destination_dtype, [&](auto to) {
    with_constant(source_dtype, [&](auto from) {
      for_each<Vec>(begin, end, [=](auto v, std::size_t i) __attribute__((always_inline)) {
        using V = decltype(v);
        store<V, to()>(destination, i, V::canonical(V::add(load<V, to()>(destination, i), load<V, from()>(source, i))));
      });
    });
  });
}

void convert(std::byte* destination, Dtype destination_dtype, const std::byte* source, Dtype source_dtype,
             std::size_t begin, std::size_t end) {
  with_constant(destination_dtype, [&](auto to) {
    with_constant(source_dtype, [&](auto from) {
      for_each<Vec>(begin, end, [=](auto v, std::size_t i) __attribute__((always_inline)) {
        using V = decltype(v);
        store<V, to()>(destination, i, V::canonical(load<V, from()>(source, i)));
      });
    });
  });
}

double sum_squares(const std::byte* source, Dtype dtype, std::size_t begin, std::size_t end) {
  return with_constant(dtype, [&](auto from) {
    typename Vec::F64 sums[kLanes / Vec::width];
    for (auto& sum : sums) sum = Vec::zero_f64();
    std::size_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      std::size_t j = i;
      for (auto& sum : sums) sum = Vec::add_square(sum, load<Vec, from()>(source, j)), j += Vec::width;
    }
    double lanes[kLanes];
    for (std::size_t j = 0; j < kLanes; j += Vec::width) Vec::store_f64(lanes + j, sums[j / Vec::width]);
    for (double& lane : lanes) {
      if (i < end) lane = Scalar::add_square(lane, load<Scalar, from()>(source, i++));
    }
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
      for (std::size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
    return lanes[0];
  });
}

void split(const Arrays& arrays, std::size_t begin, std::size_t end) {
  for_each<Vec>(begin, end, [=](auto v, std::size_t i) __attribute__((always_inline)) {
    using V = decltype(v);
    V::store_split(arrays.weight, arrays.rest, i, V::canonical(V::load_f32(arrays.master, i)));
  });
}

void join(const Arrays& arrays, std::size_t begin, std::size_t end) {
  for_each<Vec>(begin, end, [=](auto v, std::size_t i) __attribute__((always_inline)) {
    using V = decltype(v);
    V::store_f32(arrays.master, i, V::canonical(V::load_split(arrays.weight, arrays.rest, i)));
  });
}

// Numbers that become a state or a weight in bf16 by a step that is not a rule's.
void round_randomly(std::byte* destination, const std::byte* numbers, std::uint32_t seed, std::size_t begin, std::size_t end) {
  for_each<Vec>(begin, end, [=](auto v, std::size_t i) __attribute__((always_inline)) {
    using V = decltype(v);
    const auto x = V::canonical(V::load_f32(numbers, i));
    V::store_bf16(destination, i, x, V::mixed(V::mixed(V::set_bits(seed), V::bits(x)), V::set_bits(0)));
  });
}

void encode(std::byte* codes, float* scales, const std::byte* numbers, bool is_signed, std::size_t begin, std::size_t end) {
  if (is_signed) encode_codes<Vec, true>(codes, scales, numbers, begin, end);
  else encode_codes<Vec, false>(codes, scales, numbers, begin, end);
}

void decode(std::byte* numbers, const std::byte* codes, const float* scales, bool is_signed, std::size_t begin,
            std::size_t end) {
  if (is_signed) decode_codes<Vec, true>(numbers, codes, scales, begin, end);
  else decode_codes<Vec, false>(numbers, codes, scales, begin, end);
}

// Numbers of two 4-bit codes a byte: `pairs` has both for each of the 256 bytes. They are looked up a block at a time, into the
// first-level cache, which is as fast as vectors would be; multiplying and rounding is not.
void dequantize(std::byte* numbers, Dtype dtype, const std::byte* codes, const float* scales, std::size_t per_scale,
                const float* pairs, std::size_t begin, std::size_t end) {
  constexpr std::size_t block = 256;
  with_constant(dtype, [&](auto to) {
    alignas(64) float values[block + 2];
    for (std::size_t start = begin; start < end;) {
      const std::size_t of_scale = (start / per_scale + 1) * per_scale;
      const std::size_t stop = std::min({end, start + block, of_scale}), first = start & ~std::size_t{1};
      for (std::size_t i = first; i < stop; i += 2) {
        std::memcpy(values + (i - first), pairs + 2 * static_cast<std::size_t>(codes[i / 2]), 2 * sizeof(float));
      }
      const std::byte* looked_up = bytes_of(values + (start - first));
      const float scale = scales[start / per_scale];
      for_each<Vec>(0, stop - start, [=](auto v, std::size_t i) __attribute__((always_inline)) {
        using V = decltype(v);
        store<V, to()>(numbers, start + i, V::canonical(V::mul(V::load_f32(looked_up, i), V::set(scale))));
      });
      start = stop;
    }
  });
}

// The bytes that an update with two states moves, by the widest loads and stores, and no arithmetic: the ceiling that benchmarks
// compare with. An incomplete last pair of vectors is left out.
void stream(const Arrays& arrays, std::size_t begin, std::size_t end) {
  with_formats(arrays, [&](auto grad_dtype, auto format, auto state_dtype) {
    using V = Vec;
    const auto at = [](Dtype dtype, std::size_t i, std::size_t k) { return i * size_of(dtype) / 4 + k * V::width; };
    const auto touch = [=](std::byte* base, Dtype dtype, std::size_t i, typename V::F32 grad) {
      for (std::size_t k = 0; k < size_of(dtype) / 2; ++k) {
        V::store_f32(base, at(dtype, i, k), V::either(V::load_f32(base, at(dtype, i, k)), grad));
      }
    };
    const Arrays a = arrays;
    for (std::size_t i = begin; i + 2 * V::width <= end; i += 2 * V::width) {
      typename V::F32 grad = V::load_f32(a.grad, at(grad_dtype(), i, 0));
      if constexpr (grad_dtype() == Dtype::f32) grad = V::either(grad, V::load_f32(a.grad, at(grad_dtype(), i, 1)));
      if constexpr (format() == WeightFormat::split) {
        touch(a.weight, Dtype::bf16, i, grad);
        touch(a.rest, Dtype::bf16, i, grad);
      } else if constexpr (format() == WeightFormat::bf16) {
        touch(a.weight, Dtype::bf16, i, grad);
      } else {
        touch(a.master, Dtype::f32, i, grad);
      }
      touch(a.states[0], state_dtype(), i, grad);
      touch(a.states[1], state_dtype(), i, grad);
    }
  });
}

}  // namespace
}  // namespace OFFLOAD_ISA

const Table OFFLOAD_JOIN(table_, OFFLOAD_ISA) = {
    .name = OFFLOAD_QUOTE(OFFLOAD_ISA),
#define OFFLOAD_UPDATE(rule, ...) .rule = OFFLOAD_ISA::update<rules::rule>,
    OFFLOAD_RULES(OFFLOAD_UPDATE)
#undef OFFLOAD_UPDATE
    .accumulate = OFFLOAD_ISA::accumulate,
    .convert = OFFLOAD_ISA::convert,
    .sum_squares = OFFLOAD_ISA::sum_squares,
    .split = OFFLOAD_ISA::split,
    .join = OFFLOAD_ISA::join,
    .round_randomly = OFFLOAD_ISA::round_randomly,
    .encode = OFFLOAD_ISA::encode,
    .decode = OFFLOAD_ISA::decode,
    .dequantize = OFFLOAD_ISA::dequantize,
    .twist = OFFLOAD_ISA::twist,
    .stream = OFFLOAD_ISA::stream,
};

}  // namespace offload
