// The Python face: addresses and sizes in; arguments were checked in __init__.py. Kernels on more than a block run without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "aio_ext/src/without_gil.h"
#include "beside.h"
#include "dispatch.h"
#include "pool.h"
#include "queue.h"

namespace py = pybind11;

namespace {

using namespace offload;
using Address = std::uintptr_t;
using Addresses = std::array<Address, kStatesMax>;

std::byte* pointer(Address address) { return reinterpret_cast<std::byte*>(address); }
float* floats(Address address) { return reinterpret_cast<float*>(address); }

std::size_t num_blocks(std::size_t numel) { return (numel + kBlock - 1) / kBlock; }

// Calls body(begin, end) for a block of [0, numel).
template <class Body>
auto of_block(std::size_t numel, Body body) {
  return [=](std::size_t block) { body(block * kBlock, std::min(numel, (block + 1) * kBlock)); };
}

// Calls body(begin, end) for every block of [0, numel). One block takes a few microseconds: less than it may take to get
// the GIL back from a thread that computes.
template <class Body>
void for_blocks(std::size_t numel, std::size_t num_threads, const Body& body) {
  std::optional<aio::WithoutGil> released;
  if (numel > kBlock) released.emplace();
  parallel_for(num_blocks(numel), num_threads, of_block(numel, std::cref(body)));
}

Arrays make_arrays(Address grad, int grad_dtype, Address weight, Address rest, Address master, int weight_format,
                   const Addresses& states, const Addresses& scales, int state_dtype, std::uint32_t seed) {
  return {
      .grad = pointer(grad),
      .weight = pointer(weight),
      .rest = pointer(rest),
      .master = pointer(master),
      .states = {pointer(states[0]), pointer(states[1]), pointer(states[2])},
      .scales = {floats(scales[0]), floats(scales[1]), floats(scales[2])},
      .grad_dtype = static_cast<Dtype>(grad_dtype),
      .weight_format = static_cast<WeightFormat>(weight_format),
      .state_dtype = static_cast<Dtype>(state_dtype),
      .seed = seed,
  };
}

template <class Rule>
void define_update(py::module_& m, const char* name, Update<Rule> Table::*kernel) {
  using Constants = std::array<float, sizeof(Rule) / sizeof(float)>;
  m.def(name, [kernel](const Constants& constants, std::size_t numel, Address grad, int grad_dtype, Address weight,
                       Address rest, Address master, int weight_format,
                       const Addresses& states, const Addresses& scales, int state_dtype, std::uint32_t seed,
                       std::ptrdiff_t weight_shift, std::ptrdiff_t states_shift, std::size_t num_threads,
                       Queue* queue) -> std::shared_ptr<Work> {
    const Arrays arrays = make_arrays(grad, grad_dtype, weight, rest, master, weight_format, states, scales,
                                      state_dtype, seed);
    const auto rule = std::bit_cast<Rule>(constants);
    const auto run = table_in_use().*kernel;
    const Shifts shifts{weight_shift, states_shift};
    const auto body = [=](std::size_t begin, std::size_t end) {
      if (!shifts) return run(rule, arrays, begin, end);
      for (; begin < end; begin += Piece::kElements) {
        const std::size_t stop = std::min(begin + Piece::kElements, end);
        const Piece piece(arrays, shifts, begin, stop);
        run(rule, piece.arrays(), 0, stop - begin);
        piece.send();
      }
    };
    if (queue != nullptr) return queue->submit(num_blocks(numel), num_threads, of_block(numel, body));
    for_blocks(numel, num_threads, body);
    return nullptr;
  });
}

// Adds up squares(begin, end) over all blocks, in order.
template <class Squares>
double sum_over_blocks(std::size_t numel, std::size_t num_threads, const Squares& squares) {
  std::vector<double> sums((numel + kBlock - 1) / kBlock);
  for_blocks(numel, num_threads, [&](std::size_t begin, std::size_t end) {
    sums[begin / kBlock] = squares(begin, end);
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

// A block's squares are taken while it is in cache.
void define_map(py::module_& m, const char* name, Map Table::*kernel) {
  m.def(name, [kernel](std::size_t numel, Address destination, int destination_dtype, Address source, int source_dtype,
                       std::size_t num_threads) {
    const auto run = table_in_use().*kernel;
    const auto squares = table_in_use().sum_squares;
    const auto to = static_cast<Dtype>(destination_dtype), from = static_cast<Dtype>(source_dtype);
    return sum_over_blocks(numel, num_threads, [&](std::size_t begin, std::size_t end) {
      run(pointer(destination), to, pointer(source), from, begin, end);
      return squares(pointer(destination), to, begin, end);
    });
  });
}

void define_master(py::module_& m, const char* name, void (*Table::*kernel)(const Arrays&, std::size_t, std::size_t)) {
  m.def(name, [kernel](std::size_t numel, Address master, Address weight, Address rest, std::size_t num_threads) {
    Arrays arrays;
    arrays.master = pointer(master);
    arrays.weight = pointer(weight);
    arrays.rest = pointer(rest);
    const auto run = table_in_use().*kernel;
    for_blocks(numel, num_threads, [&](std::size_t begin, std::size_t end) { run(arrays, begin, end); });
  });
}

void stream(std::size_t numel, Address grad, int grad_dtype, Address weight, Address rest, Address master,
            int weight_format, const Addresses& states, int state_dtype, std::size_t num_threads) {
  const Arrays arrays = make_arrays(grad, grad_dtype, weight, rest, master, weight_format, states, {}, state_dtype, 0);
  const auto run = table_in_use().stream;
  for_blocks(numel, num_threads, [&](std::size_t begin, std::size_t end) { run(arrays, begin, end); });
}

double sum_squares(std::size_t numel, Address source, int dtype, std::size_t num_threads) {
  const auto run = table_in_use().sum_squares;
  return sum_over_blocks(numel, num_threads, [&](std::size_t begin, std::size_t end) {
    return run(pointer(source), static_cast<Dtype>(dtype), begin, end);
  });
}

void round_randomly(std::size_t numel, Address destination, Address numbers, std::uint32_t seed, std::size_t num_threads) {
  const auto run = table_in_use().round_randomly;
  for_blocks(numel, num_threads, [&](std::size_t begin, std::size_t end) {
    run(pointer(destination), pointer(numbers), seed, begin, end);
  });
}

void encode(std::size_t numel, Address codes, Address scales, Address numbers, bool is_signed, std::size_t num_threads) {
  const auto run = table_in_use().encode;
  for_blocks(numel, num_threads, [&](std::size_t begin, std::size_t end) {
    run(pointer(codes), floats(scales), pointer(numbers), is_signed, begin, end);
  });
}

void decode(std::size_t numel, Address numbers, Address codes, Address scales, bool is_signed, std::size_t num_threads) {
  const auto run = table_in_use().decode;
  for_blocks(numel, num_threads, [&](std::size_t begin, std::size_t end) {
    run(pointer(numbers), pointer(codes), floats(scales), is_signed, begin, end);
  });
}

void dequantize(std::size_t numel, Address numbers, int dtype, Address codes, Address scales, std::size_t per_scale,
                Address pairs, std::size_t num_threads) {
  const auto run = table_in_use().dequantize;
  for_blocks(numel, num_threads, [&](std::size_t begin, std::size_t end) {
    run(pointer(numbers), static_cast<Dtype>(dtype), pointer(codes), floats(scales), per_scale, floats(pairs), begin, end);
  });
}

void twist(Address words, std::size_t times) {
  const aio::WithoutGil released;
  table_in_use().twist(reinterpret_cast<std::uint32_t*>(words), times);
}

std::vector<std::string> isas_supported() {
  std::vector<std::string> names;
  for (const Table* table : tables_supported()) names.emplace_back(table->name);
  return names;
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("done", &Work::done)
      .def("wait", &Work::wait, py::call_guard<aio::WithoutGil>())
      .def("seconds", &Work::seconds)
      .def("seconds_since", &Work::seconds_since);
  py::class_<Queue>(m, "Queue").def(py::init<>());
#define OFFLOAD_UPDATE(name, ...) define_update(m, #name, &Table::name);
  OFFLOAD_RULES(OFFLOAD_UPDATE)
#undef OFFLOAD_UPDATE
  define_map(m, "accumulate", &Table::accumulate);
  define_map(m, "convert", &Table::convert);
  define_master(m, "split_master", &Table::split);
  define_master(m, "join_master", &Table::join);
  m.def("sum_squares", &sum_squares);
  m.def("round_randomly", &round_randomly);
  m.def("encode", &encode);
  m.def("decode", &decode);
  m.def("dequantize", &dequantize);
  m.def("twist", &twist);
  m.def("stream", &stream);
  m.def("isas_supported", &isas_supported);
  m.def("isa", [] { return table_in_use().name; });
  m.def("use_isa", &use_table);
}
