#include "fault_plan.h"

namespace aio {

void FaultPlan::strike(std::uint64_t nth, const Fault& fault) {
  const std::lock_guard lock(mutex_);
  at_[nth] = fault;
}

void FaultPlan::strike_range(std::uint64_t begin, std::uint64_t end, const Fault& fault) {
  const std::lock_guard lock(mutex_);
  ranges_.push_back({begin, end, fault});
}

void FaultPlan::strike_at_random(std::uint64_t seed, const FaultRates& rates) {
  const std::lock_guard lock(mutex_);
  random_.seed(seed);
  rates_ = rates;
}

std::vector<FaultPlan::Attempt> FaultPlan::log() const {
  const std::lock_guard lock(mutex_);
  return log_;
}

Fault FaultPlan::next(const Attempt& attempt) {
  const std::lock_guard lock(mutex_);
  if (logging_.load()) log_.push_back(attempt);
  if (const auto it = at_.find(count_++); it != at_.end()) return it->second;
  for (const Range& range : ranges_) {
    if (attempt.offset < range.end && range.begin < attempt.offset + attempt.nbytes) return range.fault;
  }
  Fault fault;
  const auto chance = [this](double rate) {
    return rate > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < rate;
  };
  if (chance(rates_.delay)) fault.delay_us = static_cast<std::uint32_t>(random_() % (rates_.delay_us_max + 1));
  if (chance(rates_.error) && !rates_.errors.empty()) fault.error = rates_.errors[random_() % rates_.errors.size()];
  if (chance(rates_.shortfall) && attempt.nbytes > 1) {
    fault.short_by = 1 + static_cast<std::uint32_t>(random_() % (attempt.nbytes - 1));
  }
  return fault;
}

}  // namespace aio
