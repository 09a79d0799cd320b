#include "engine.h"

namespace aio {

namespace {

// O_DIRECT refuses odd lengths, so an attempt that falls short asks for whole sectors and reports less.
constexpr std::uint32_t kSectorBytes = 512;

bool falls_short(const Block& block) { return block.fault.short_by > 0 && block.fault.short_by < block.remaining_bytes; }

}  // namespace

Attempted attempt(const Block& block) {
  if (block.fault.error != 0) return {true, -block.fault.error, 0};
  if (!falls_short(block)) return {false, 0, block.remaining_bytes};
  const std::uint32_t wanted = block.remaining_bytes - block.fault.short_by;
  return {false, 0, std::min(block.remaining_bytes, (wanted + kSectorBytes - 1) / kSectorBytes * kSectorBytes)};
}

std::int32_t reported(const Block& block, std::int32_t res) {
  if (res <= 0 || !falls_short(block)) return res;
  return std::min(res, static_cast<std::int32_t>(block.remaining_bytes - block.fault.short_by));
}

}  // namespace aio
