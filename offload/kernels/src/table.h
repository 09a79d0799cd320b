// The kernels of one instruction set. Each works on the elements [begin, end) of its arrays, on the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arrays.h"
#include "rules.h"

namespace offload {

template <class Rule>
using Update = void (*)(const Rule&, const Arrays&, std::size_t begin, std::size_t end);
using Map = void (*)(std::byte* destination, Dtype destination_dtype, const std::byte* source, Dtype source_dtype,
                     std::size_t begin, std::size_t end);
using Encode = void (*)(std::byte* codes, float* scales, const std::byte* numbers, bool is_signed, std::size_t begin,
                        std::size_t end);
using Decode = void (*)(std::byte* numbers, const std::byte* codes, const float* scales, bool is_signed, std::size_t begin,
                        std::size_t end);
using Dequantize = void (*)(std::byte* numbers, Dtype dtype, const std::byte* codes, const float* scales,
                            std::size_t per_scale, const float* pairs, std::size_t begin, std::size_t end);

struct Table {
  const char* name;
#define OFFLOAD_UPDATE(name, ...) Update<rules::name> name;
  OFFLOAD_RULES(OFFLOAD_UPDATE)
#undef OFFLOAD_UPDATE
  Map accumulate;
  Map convert;
  double (*sum_squares)(const std::byte* source, Dtype dtype, std::size_t begin, std::size_t end);
  void (*split)(const Arrays& arrays, std::size_t begin, std::size_t end);  // master -> weight and rest
  void (*join)(const Arrays& arrays, std::size_t begin, std::size_t end);   // weight and rest -> master
  void (*round_randomly)(std::byte* destination, const std::byte* numbers, std::uint32_t seed, std::size_t begin,
                         std::size_t end);  // fp32 to bf16
  Encode encode;
  Decode decode;
  Dequantize dequantize;
  void (*twist)(std::uint32_t* words, std::size_t times);  // of a Mersenne Twister, 624 words
  void (*stream)(const Arrays& arrays, std::size_t begin, std::size_t end);
};

extern const Table table_scalar, table_avx2, table_avx512, table_neon;  // those that this build has

}  // namespace offload
