// One pass over the arrays of a kernel: every number is read once and written once.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "arrays.h"
#include "rules.h"
#include "vec_scalar.h"

namespace offload::OFFLOAD_ISA {

// What a loop calls is marked always_inline: only then do states and constants stay in registers (without: half the speed).
// Calls body(V{}, i) for whole vectors of [begin, end), then for single elements. Bodies capture by value: what is stored
// cannot alias a copy, so constants and addresses stay in registers.
template <class V, class Body>
void for_each(std::size_t begin, std::size_t end, const Body body) {
  std::size_t i = begin;
  for (; i + V::width <= end; i += V::width) body(V{}, i);
  for (; i < end; ++i) body(Scalar{}, i);
}

// The same for work in two halves: second(V{}, i, x) finishes what x = first(V{}, i) began, after first has begun the next
// vector. A processor looks ahead a few vectors at most, so without this the latency of a long calculation shows.
template <class V, class First, class Second>
[[gnu::always_inline]] inline void for_each_overlapped(std::size_t begin, std::size_t end, const First first,
                                                       const Second second) {
  std::size_t i = begin;
  if (i + V::width <= end) {
    auto x = first(V{}, i);
    for (; i + 2 * V::width <= end; i += V::width) {
      auto next = first(V{}, i + V::width);
      second(V{}, i, x);
      x = next;
    }
    second(V{}, i, x);
    i += V::width;
  }
  for (; i < end; ++i) {
    auto x = first(Scalar{}, i);
    second(Scalar{}, i, x);
  }
}

// Calls body with an enum value turned into a compile-time constant.
template <class Body>
decltype(auto) with_constant(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::bf16: return body(std::integral_constant<Dtype, Dtype::bf16>{});
    case Dtype::f16: return body(std::integral_constant<Dtype, Dtype::f16>{});
    default: return body(std::integral_constant<Dtype, Dtype::f32>{});
  }
}

template <class Body>
decltype(auto) with_constant(WeightFormat format, Body body) {
  switch (format) {
    case WeightFormat::bf16: return body(std::integral_constant<WeightFormat, WeightFormat::bf16>{});
    case WeightFormat::split: return body(std::integral_constant<WeightFormat, WeightFormat::split>{});
    case WeightFormat::out_f32: return body(std::integral_constant<WeightFormat, WeightFormat::out_f32>{});
    case WeightFormat::out_bf16: return body(std::integral_constant<WeightFormat, WeightFormat::out_bf16>{});
    case WeightFormat::out_f16: return body(std::integral_constant<WeightFormat, WeightFormat::out_f16>{});
    default: return body(std::integral_constant<WeightFormat, WeightFormat::f32>{});
  }
}

// Calls body with each state's index as a compile-time constant.
template <class Rule, class Body, std::size_t... s>
[[gnu::always_inline]] inline void for_states([[maybe_unused]] Body body, std::index_sequence<s...>) {
  (body(std::integral_constant<std::size_t, s>{}), ...);
}
template <class Rule, class Body>
[[gnu::always_inline]] inline void for_states(Body body) {
  for_states<Rule>(body, std::make_index_sequence<Rule::num_states>{});
}

template <class V, Dtype dtype>
typename V::F32 load(const std::byte* base, std::size_t i) {
  if constexpr (dtype == Dtype::f32) return V::load_f32(base, i);
  else if constexpr (dtype == Dtype::bf16) return V::load_bf16(base, i);
  else return V::load_f16(base, i);
}

template <class V, Dtype dtype>
void store(std::byte* base, std::size_t i, typename V::F32 x) {
  if constexpr (dtype == Dtype::f32) V::store_f32(base, i, x);
  else if constexpr (dtype == Dtype::bf16) V::store_bf16(base, i, x);
  else V::store_f16(base, i, x);
}

template <class V, WeightFormat format>
typename V::F32 load_weight(const Arrays& a, std::size_t i) {
  if constexpr (format == WeightFormat::split) return V::load_split(a.weight, a.rest, i);
  else if constexpr (format == WeightFormat::bf16) return V::load_bf16(a.weight, i);
  else return V::load_f32(a.master, i);
}

// The random bits of an element's rounding to bf16 come from what it has become and from the step, and from nothing else: they
// are the same wherever the element lies, whoever updates it, in whatever order. (States alone are not enough: where gradients are
// zero, many elements have the same ones, would round alike, and stay the same.)
template <class V, class Rule>
[[gnu::always_inline]] inline typename V::U32 random_bits(const Operands<V>& x, typename V::F32 weight,
                                                          std::uint32_t seed) {
  typename V::U32 random = V::set_bits(seed);
  for_states<Rule>([&](auto s) __attribute__((always_inline)) { random = V::mixed(random, V::bits(x.states[s])); });
  return V::mixed(random, V::bits(weight));
}

// The first state takes the lower half of the bits. All others take the upper half: a largest second moment is then never
// rounded to less than the second moment.
template <class V, Dtype dtype, std::size_t s>
[[gnu::always_inline]] inline void store_state(std::byte* base, std::size_t i, typename V::F32 x, typename V::U32 random) {
  if constexpr (dtype == Dtype::bf16) V::store_bf16(base, i, x, s == 0 ? random : V::upper_half(random));
  else store<V, dtype>(base, i, x);
}

// `random` is for a weight without any other master than itself: a further round makes its bits those of no state.
template <class V, WeightFormat format>
void store_weight(const Arrays& a, std::size_t i, typename V::F32 x, [[maybe_unused]] typename V::U32 random) {
  if constexpr (format == WeightFormat::split) return V::store_split(a.weight, a.rest, i, x);
  if constexpr (format == WeightFormat::bf16) return V::store_bf16(a.weight, i, x, V::mixed(random, V::bits(x)));
  V::store_f32(a.master, i, x);
  if constexpr (format == WeightFormat::out_f32) V::store_f32(a.weight, i, x);
  if constexpr (format == WeightFormat::out_bf16) V::store_bf16(a.weight, i, x);
  if constexpr (format == WeightFormat::out_f16) V::store_f16(a.weight, i, x);
}

template <class Body>
void with_weight_formats(const Arrays& arrays, Body body) {
  with_constant(arrays.grad_dtype, [&](auto grad_dtype) {
    with_constant(arrays.weight_format, [&](auto format) { body(grad_dtype, format); });
  });
}

template <class Body>
void with_formats(const Arrays& arrays, Body body) {
  with_weight_formats(arrays, [&](auto grad_dtype, auto format) {
    if (arrays.state_dtype == Dtype::bf16) body(grad_dtype, format, std::integral_constant<Dtype, Dtype::bf16>{});
    else body(grad_dtype, format, std::integral_constant<Dtype, Dtype::f32>{});
  });
}

// Loads all but the states, which are in place, and advances.
template <class V, Dtype grad_dtype, WeightFormat format, class Rule>
[[gnu::always_inline]] inline void load_and_advance(const Rule& rule, const Arrays& arrays, std::size_t i, Operands<V>& x) {
  x.grad = load<V, grad_dtype>(arrays.grad, i);
  x.weight = load_weight<V, format>(arrays, i);
  rule.template advance<V>(x);
}

// One update in the two halves of `for_each_overlapped`, for states that are numbers.
template <class V, Dtype grad_dtype, WeightFormat format, Dtype state_dtype, class Rule>
[[gnu::always_inline]] inline Operands<V> begin_update(const Rule& rule, const Arrays& arrays, std::size_t i) {
  Operands<V> x;
  for_states<Rule>([&](auto s) __attribute__((always_inline)) { x.states[s] = load<V, state_dtype>(arrays.states[s], i); });
  load_and_advance<V, grad_dtype, format>(rule, arrays, i, x);
  return x;
}

template <class V, WeightFormat format, Dtype state_dtype, class Rule>
[[gnu::always_inline]] inline void finish_update(const Rule& rule, const Arrays& arrays, std::size_t i, Operands<V>& x) {
  auto weight = rule.template apply<V>(x);
  if (V::has_nan(weight)) [[unlikely]] {  // only then can a state be NaN: see rules.h
    weight = V::canonical(weight);
    for_states<Rule>([&](auto s) __attribute__((always_inline)) { x.states[s] = V::canonical(x.states[s]); });
  }
  typename V::U32 random = V::set_bits(0);
  if constexpr (state_dtype == Dtype::bf16 || format == WeightFormat::bf16) {
    random = random_bits<V, Rule>(x, weight, arrays.seed);
  }
  store_weight<V, format>(arrays, i, weight, random);
  for_states<Rule>([&](auto s) __attribute__((always_inline)) {
    store_state<V, state_dtype, s>(arrays.states[s], i, x.states[s], random);
  });
}

}  // namespace offload::OFFLOAD_ISA
