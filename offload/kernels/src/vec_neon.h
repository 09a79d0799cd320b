// Four elements at a time: NEON of 64-bit Arm.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "arrays.h"

namespace offload::OFFLOAD_ISA {

struct Neon {
  static constexpr std::size_t width = 4;
  using F32 = float32x4_t;
  using U32 = uint32x4_t;
  struct F64 {
    float64x2_t low, high;
  };

  static F32 set(float x) { return vdupq_n_f32(x); }

  // Memory.

  static F32 load_f32(const std::byte* base, std::size_t i) {
    return vld1q_f32(reinterpret_cast<const float*>(base + 4 * i));
  }
  static void store_f32(std::byte* base, std::size_t i, F32 x) { vst1q_f32(reinterpret_cast<float*>(base + 4 * i), x); }

  static F32 load_bf16(const std::byte* base, std::size_t i) { return value(vshll_n_u16(load_16x4(base, i), 16)); }
  static void store_bf16(std::byte* base, std::size_t i, F32 x) {
    const uint32x4_t b = bits(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(b, 16), vdupq_n_u32(1));
    store_16x4(base, i, vshrn_n_u32(vaddq_u32(vaddq_u32(b, vdupq_n_u32(0x7fff)), odd), 16));
  }
  static void store_bf16(std::byte* base, std::size_t i, F32 x, U32 random) {
    store_16x4(base, i, vshrn_n_u32(vaddq_u32(bits(x), vandq_u32(random, vdupq_n_u32(0xffff))), 16));
  }

  static F32 load_f16(const std::byte* base, std::size_t i) {
    return vcvt_f32_f16(vreinterpret_f16_u16(load_16x4(base, i)));
  }
  static void store_f16(std::byte* base, std::size_t i, F32 x) {
    store_16x4(base, i, vreinterpret_u16_f16(vcvt_f16_f32(x)));
  }

  static F32 load_split(const std::byte* weight, const std::byte* rest, std::size_t i) {
    const int32x4_t low = vmovl_s16(vreinterpret_s16_u16(load_16x4(rest, i)));
    return value(vaddq_u32(vshll_n_u16(load_16x4(weight, i), 16), vreinterpretq_u32_s32(low)));
  }
  static void store_split(std::byte* weight, std::byte* rest, std::size_t i, F32 x) {
    const uint32x4_t b = bits(x);
    store_16x4(rest, i, vmovn_u32(b));
    store_16x4(weight, i, vshrn_n_u32(vaddq_u32(b, vdupq_n_u32(0x8000)), 16));
  }

  // Random bits.

  static U32 set_bits(std::uint32_t b) { return vdupq_n_u32(b); }
  static U32 bits(F32 x) { return vreinterpretq_u32_f32(x); }
  static U32 mixed(U32 random, U32 b) {
    const U32 product = vmulq_u32(veorq_u32(random, b), vdupq_n_u32(0x9e3779b1));
    return veorq_u32(product, vshrq_n_u32(product, 15));
  }
  static U32 upper_half(U32 b) { return vshrq_n_u32(b, 16); }

  // Codes.

  static F32 load_signed_code(const std::byte* base, std::size_t i, float least) {
    const uint32x4_t code = load_8x4(base, i), sign = vshlq_n_u32(vandq_u32(code, vdupq_n_u32(0x80)), 24);
    const uint32x4_t b = vaddq_u32(vshlq_n_u32(vandq_u32(code, vdupq_n_u32(0x7f)), 20), bits(set(least)));
    return add(value(vorrq_u32(b, sign)), value(veorq_u32(bits(set(-least)), sign)));
  }
  static F32 load_unsigned_code(const std::byte* base, std::size_t i, float least) {
    return value(vaddq_u32(vshlq_n_u32(load_8x4(base, i), 20), bits(set(least))));
  }
  static U32 noise(std::uint32_t random, std::size_t lane) {
    const uint32x4_t lanes = vaddq_u32(uint32x4_t{0, 1, 2, 3}, vdupq_n_u32(static_cast<std::uint32_t>(lane)));
    return vshrq_n_u32(vmlaq_u32(vdupq_n_u32(random), lanes, vdupq_n_u32(0x9e3779b9)), 12);
  }
  static U32 signed_code(F32 x, float least, U32 random) {
    const uint32x4_t b = bits(add(vabsq_f32(x), set(least))), minus_least = vsubq_u32(random, bits(set(least)));
    return vsliq_n_u32(vshrq_n_u32(vaddq_u32(b, minus_least), 20), vshrq_n_u32(bits(x), 31), 7);
  }
  // May be out of range: store_unsigned_codes clamps.
  static U32 unsigned_code(F32 x, float least, U32 random) {
    const uint32x4_t minus_least = vsubq_u32(random, bits(set(least)));
    return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(vaddq_u32(bits(x), minus_least)), 20));
  }
  static void store_signed_codes(std::byte* base, std::size_t i, const U32 (&codes)[4]) {
    const uint16x8_t low = vcombine_u16(vmovn_u32(codes[0]), vmovn_u32(codes[1]));
    const uint16x8_t high = vcombine_u16(vmovn_u32(codes[2]), vmovn_u32(codes[3]));
    vst1q_u8(reinterpret_cast<std::uint8_t*>(base + i), vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
  }
  static void store_unsigned_codes(std::byte* base, std::size_t i, const U32 (&codes)[4]) {
    int16x4_t narrow[4];
    for (std::size_t k = 0; k < 4; ++k) narrow[k] = vqmovn_s32(vreinterpretq_s32_u32(codes[k]));
    const uint8x8_t low = vqmovun_s16(vcombine_s16(narrow[0], narrow[1]));
    vst1q_u8(reinterpret_cast<std::uint8_t*>(base + i), vcombine_u8(low, vqmovun_s16(vcombine_s16(narrow[2], narrow[3]))));
  }

  // Arithmetic.

  static F32 add(F32 a, F32 b) { return vaddq_f32(a, b); }
  static F32 sub(F32 a, F32 b) { return vsubq_f32(a, b); }
  static F32 mul(F32 a, F32 b) { return vmulq_f32(a, b); }
  static F32 div(F32 a, F32 b) { return vdivq_f32(a, b); }
  static F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
  static F32 sqrt(F32 x) { return vsqrtq_f32(x); }
  static F32 max(F32 a, F32 b) { return vbslq_f32(vorrq_u32(vcgtq_f32(a, b), is_nan(a)), a, b); }
  static F32 sign(F32 x) { return vbslq_f32(vcgtzq_f32(x), set(1.0f), vbslq_f32(vcltzq_f32(x), set(-1.0f), x)); }
  static F32 magnitude(F32 x) { return vabsq_f32(x); }
  static F32 larger_bits(F32 a, F32 b) { return value(vmaxq_u32(bits(a), bits(b))); }
  static float largest_lane(F32 x) { return vgetq_lane_f32(value(vdupq_n_u32(vmaxvq_u32(bits(x)))), 0); }
  static F32 either(F32 a, F32 b) { return value(vorrq_u32(bits(a), bits(b))); }

  static F64 zero_f64() { return {vdupq_n_f64(0), vdupq_n_f64(0)}; }
  static F64 add_square(F64 sum, F32 x) {
    const float64x2_t low = vcvt_f64_f32(vget_low_f32(x)), high = vcvt_high_f64_f32(x);
    return {vfmaq_f64(sum.low, low, low), vfmaq_f64(sum.high, high, high)};
  }
  static void store_f64(double* lanes, F64 sum) {
    vst1q_f64(lanes, sum.low);
    vst1q_f64(lanes + 2, sum.high);
  }

  static bool has_nan(F32 x) { return vmaxvq_u32(is_nan(x)) != 0; }
  static F32 canonical(F32 x) { return vbslq_f32(is_nan(x), value(vdupq_n_u32(0x7fc00000)), x); }

 private:
  static F32 value(uint32x4_t b) { return vreinterpretq_f32_u32(b); }
  static uint32x4_t is_nan(F32 x) { return vmvnq_u32(vceqq_f32(x, x)); }
  static uint32x4_t load_8x4(const std::byte* base, std::size_t i) {
    std::uint32_t four;
    std::memcpy(&four, base + i, 4);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
  }
  static uint16x4_t load_16x4(const std::byte* base, std::size_t i) {
    return vld1_u16(reinterpret_cast<const std::uint16_t*>(base + 2 * i));
  }
  static void store_16x4(std::byte* base, std::size_t i, uint16x4_t x) {
    vst1_u16(reinterpret_cast<std::uint16_t*>(base + 2 * i), x);
  }
};

}  // namespace offload::OFFLOAD_ISA
