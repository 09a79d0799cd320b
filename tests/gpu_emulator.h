// What src/device.cu needs of CUDA, for a compiler of the host: a launch is a loop over all its threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__

struct Index {
  unsigned x;
};
inline Index blockIdx, blockDim, threadIdx;
