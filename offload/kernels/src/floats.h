// State of floating-point arithmetic in the threads that run kernels.
#pragma once

#include <cfenv>

namespace offload {

// Round to nearest, keep denormals, raise nothing: whatever the thread was set to (torch.set_flush_denormal, say).
class DefaultFloats {
 public:
  DefaultFloats() { std::fegetenv(&before_), std::fesetenv(FE_DFL_ENV); }
  ~DefaultFloats() { std::fesetenv(&before_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace offload
