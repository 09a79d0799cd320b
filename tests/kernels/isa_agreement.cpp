// Compares the kernels of one instruction set, TABLE, with the scalar ones, without Python: so that it can be cross-compiled
// and run under an emulator (see test_emulated_isas.py). Prints what differs; exit status 1 if anything does.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "table.h"

namespace {

using namespace offload;

std::uint32_t random_bits(std::uint64_t& state) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<std::uint32_t>(state >> 32);
}

// Mostly numbers around 0.01, a tenth of them any bits at all, some of them exact ties, infinities and NaNs.
std::uint32_t awkward_bits(std::uint64_t& state) {
  const std::uint32_t bits = random_bits(state), kind = random_bits(state) % 20;
  if (kind < 2) return bits;
  if (kind == 2) return (bits & 0xffff0000) | 0x8000;
  if (kind == 3) return (bits & 0x80000000) | 0x7f800000 | (bits % 2 ? bits & 0x7fffff : 0);
  if (kind == 4) return bits & 0x807fffff;
  if (kind == 5) return bits & 0x80000000;
  return 0x3c000000 + (bits & 0x80ffffff);
}

struct Storage {
  std::vector<std::uint32_t> words;
  explicit Storage(std::size_t numel, std::uint64_t seed) : words(numel + 16) {
    for (auto& word : words) word = awkward_bits(seed);
  }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(words.data()); }
};

struct Run {
  std::vector<Storage> storage;
  std::vector<float> scales[kStatesMax];
  Arrays arrays;

  Run(std::size_t numel, Dtype grad, WeightFormat format, Dtype state) {
    for (std::uint64_t k = 0; k < 7; ++k) storage.emplace_back(numel, k + 1);
    arrays.grad = storage[0].bytes();
    arrays.weight = storage[1].bytes();
    arrays.rest = storage[2].bytes();
    arrays.master = storage[3].bytes();
    for (std::size_t s = 0; s < kStatesMax; ++s) {
      arrays.states[s] = storage[4 + s].bytes();
      scales[s].assign(numel / kCodeBlock + 1, 0.01f);
      arrays.scales[s] = scales[s].data();
    }
    arrays.grad_dtype = grad;
    arrays.weight_format = format;
    arrays.state_dtype = state;
    arrays.seed = 0x12345679;
  }

  bool operator==(const Run& other) const {
    for (std::size_t k = 0; k < storage.size(); ++k) {
      if (storage[k].words != other.storage[k].words) return false;
    }
    for (std::size_t s = 0; s < kStatesMax; ++s) {
      if (std::memcmp(scales[s].data(), other.scales[s].data(), 4 * scales[s].size()) != 0) return false;
    }
    return true;
  }
};

int differences = 0;

template <class Body>
void compare(const char* name, std::size_t numel, Dtype grad, WeightFormat format, Dtype state, const Body& body) {
  Run ours(numel, grad, format, state), scalar(numel, grad, format, state);
  body(TABLE, ours.arrays);
  body(table_scalar, scalar.arrays);
  if (ours == scalar) return;
  std::printf("%s differs: numel %zu, grad %d, weight format %d, state %d\n", name, numel, static_cast<int>(grad),
              static_cast<int>(format), static_cast<int>(state));
  ++differences;
}

template <class Rule>
void compare_rule(const char* name, const Rule& rule, Update<Rule> Table::*kernel) {
  for (const std::size_t numel : {1, 15, 31, 33, 256, 300}) {
    for (int grad = 0; grad < 3; ++grad) {
      for (int format = 0; format < 6; ++format) {
        for (const Dtype state : {Dtype::f32, Dtype::bf16, Dtype::int8}) {
          compare(name, numel, static_cast<Dtype>(grad), static_cast<WeightFormat>(format), state,
                  [&](const Table& table, const Arrays& arrays) { (table.*kernel)(rule, arrays, 0, numel); });
        }
      }
    }
  }
}

}  // namespace

int main() {
  compare_rule("adamw", Adam<false, true>{0.5f, 0.99f, 0.1f, 0.999f, 0.001f, 3.0f, 1e-8f, -1e-3f}, &Table::adamw);
  compare_rule("adam_amsgrad", Adam<true, false>{-2.0f, 0.01f, 0.1f, 0.999f, 0.001f, 3.0f, 1e-8f, -1e-3f},
               &Table::adam_amsgrad);
  compare_rule("adagrad", Adagrad{0.5f, 0.01f, 1e-10f, -1e-3f}, &Table::adagrad);
  compare_rule("lion", Lion{0.5f, 0.99f, 0.1f, 0.01f, -1e-3f}, &Table::lion);
  compare_rule("sgd", Sgd{0.5f, 0.01f, -1e-3f}, &Table::sgd);
  compare_rule("sgd_nesterov", SgdMomentum<true>{0.5f, 0.01f, 0.9f, 1.0f, -1e-3f}, &Table::sgd_nesterov);
  for (std::size_t numel = 0; numel < 100; ++numel) {
    for (const Dtype to : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
      for (const Dtype from : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
        compare("accumulate", numel, from, WeightFormat::f32, to, [&](const Table& table, const Arrays& a) {
          table.accumulate(a.master, to, a.grad, from, 0, numel);
        });
        compare("convert", numel, from, WeightFormat::f32, to, [&](const Table& table, const Arrays& a) {
          table.convert(a.master, to, a.grad, from, 0, numel);
        });
      }
      compare("round_randomly", numel, Dtype::f32, WeightFormat::f32, Dtype::bf16, [&](const Table& table, const Arrays& a) {
        table.round_randomly(a.states[0], a.grad, 7, 0, numel);
      });
      std::uint64_t seed = numel;
      std::vector<std::uint32_t> finite(numel + 1);
      for (auto& word : finite) word = 0x3c003c00 + (random_bits(seed) & 0x80ff80ff);
      const auto* source = reinterpret_cast<const std::byte*>(finite.data());
      if (TABLE.sum_squares(source, to, 0, numel) != table_scalar.sum_squares(source, to, 0, numel)) {
        std::printf("sum_squares differs: numel %zu, dtype %d\n", numel, static_cast<int>(to));
        ++differences;
      }
    }
    compare("split", numel, Dtype::f32, WeightFormat::split, Dtype::f32,
            [&](const Table& table, const Arrays& arrays) { table.split(arrays, 0, numel); });
    compare("join", numel, Dtype::f32, WeightFormat::split, Dtype::f32,
            [&](const Table& table, const Arrays& arrays) { table.join(arrays, 0, numel); });
  }
  for (const std::size_t numel : {1, 15, 33, 255, 256, 300, 515}) {
    for (const bool is_signed : {false, true}) {
      compare("encode", numel, Dtype::f32, WeightFormat::f32, Dtype::int8, [&](const Table& table, const Arrays& a) {
        table.encode(a.states[0], a.scales[0], a.master, is_signed, 0, numel);
      });
      compare("decode", numel, Dtype::f32, WeightFormat::f32, Dtype::int8, [&](const Table& table, const Arrays& a) {
        table.decode(a.master, a.states[0], a.scales[0], is_signed, 0, numel);
      });
    }
    std::vector<float> pairs(512), scales(numel);
    for (std::size_t i = 0; i < pairs.size(); ++i) pairs[i] = static_cast<float>(i) - 200.5f;
    for (std::size_t i = 0; i < numel; ++i) scales[i] = 1.0f / static_cast<float>(i + 3);
    for (const Dtype to : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
      compare("dequantize", numel, Dtype::f32, WeightFormat::f32, Dtype::int8, [&](const Table& table, const Arrays& a) {
        table.dequantize(a.master, to, a.states[0], scales.data(), 32, pairs.data(), 0, numel);
      });
    }
  }
  std::printf("%s: %d differences\n", TABLE.name, differences);
  return differences != 0;
}
