#include "dispatch.h"

#include <atomic>
#include <stdexcept>

namespace offload {

std::vector<const Table*> tables_supported() {
  std::vector<const Table*> tables;
#if defined(__aarch64__)
  tables.push_back(&table_neon);  // part of every 64-bit Arm
#elif defined(__x86_64__)
  // Asks the operating system, too: without its support for the wider registers these are false. Every processor with
  // AVX2 and FMA has F16C.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    tables.push_back(&table_avx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&table_avx2);
#endif
  tables.push_back(&table_scalar);
  return tables;
}

namespace {

std::atomic<const Table*>& in_use() {
  static std::atomic<const Table*> table = tables_supported().front();
  return table;
}

}  // namespace

const Table& table_in_use() { return *in_use(); }

void use_table(const std::string& name) {
  std::string names;
  for (const Table* table : tables_supported()) {
    if (table->name == name) return void(in_use() = table);
    names += names.empty() ? table->name : std::string(", ") + table->name;
  }
  throw std::invalid_argument("instruction set '" + name + "' cannot run here; this processor and build have: " + names);
}

}  // namespace offload
