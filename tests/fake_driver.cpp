// The entry points of CUDA's driver that the engine calls, without a GPU: they refuse what the driver refuses, and keep an
// account. A launch is handed to a function of the test. Handles are addresses of what they stand for.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

enum Status {
  kSuccess = 0, kInvalidValue = 1, kNotInitialized = 3, kInvalidDevice = 101, kInvalidImage = 200, kInvalidContext = 201,
  kInvalidHandle = 400, kNotFound = 500,
  kCaptured = 900, kAlreadyRegistered = 712, kNotRegistered = 713,
};

struct Context { int device; };
struct Module { Context* context; std::string image; };
struct Function { Context* context; Module* module; std::string name; };
struct Stream { Context* context; };

using OnLaunch = int (*)(int device, const char* function, const char* image, std::size_t image_bytes, unsigned blocks,
                         unsigned threads, void** arguments);

struct State {
  bool initialized = false;
  int num_devices = 1, num_retained = 0, sticky = kSuccess;
  std::vector<std::unique_ptr<Context>> contexts;
  std::set<void*> live;  // modules, functions and streams
  std::map<std::uintptr_t, std::size_t> registered;
  std::map<std::string, int> planted;
  std::vector<std::string> calls;
  OnLaunch on_launch = nullptr;
  bool is_captured = false;  // another thread captures a graph, in the mode "global"
};

std::recursive_mutex mutex;
State state;
thread_local int capture_mode = 0;  // "global"
thread_local std::vector<Context*> stack;  // the contexts of a thread: the last one is current

enum class Needs { nothing, context, gpu };  // gpu: a context whose GPU has not failed

// Notes the call. What it returns first: nothing is done then.
int enter(const std::string& name, Needs needs) {
  state.calls.push_back(name);
  if (const auto planted = state.planted.find(name); planted != state.planted.end()) return planted->second;
  if (!state.initialized) return kNotInitialized;
  if (needs != Needs::nothing && stack.empty()) return kInvalidContext;
  if (needs == Needs::gpu && state.sticky != kSuccess) return state.sticky;
  return kSuccess;
}

bool is_mapped(std::uintptr_t address, std::size_t nbytes) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), start = address / page * page;
  return msync(reinterpret_cast<void*>(start), address + nbytes - start, MS_ASYNC) == 0;
}

// The length of an ELF file: the end of its last part. A test's own images are text behind the magic number.
std::size_t image_length(const char* image) {
  if (image[4] == ';') return std::strlen(image);
  std::uint64_t table;
  std::uint16_t size, count;
  std::memcpy(&table, image + 0x28, 8);
  std::memcpy(&size, image + 0x3a, 2);
  std::memcpy(&count, image + 0x3c, 2);
  std::uint64_t end = table + std::uint64_t{size} * count;
  for (int k = 0; k < count; ++k) {
    std::uint32_t kind;
    std::uint64_t place[2];
    std::memcpy(&kind, image + table + size * k + 4, 4);
    std::memcpy(place, image + table + size * k + 0x18, 16);
    if (kind != 8 && place[0] + place[1] > end) end = place[0] + place[1];  // 8: it takes no room
  }
  return end;
}

}  // namespace

#define ENTER(name, needs) \
  const std::lock_guard lock(mutex); \
  if (const int status = enter(name, needs); status != kSuccess) return status

// Of calls that might wait for the GPU: what a capture of another thread makes of them.
#define ENTER_UNSAFE(name) \
  ENTER(name, Needs::gpu); \
  if (state.is_captured && capture_mode == 0) return kCaptured

extern "C" {

int cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER("cuThreadExchangeStreamCaptureMode", Needs::nothing);
  if (*mode < 0 || *mode > 2) return kInvalidValue;
  std::swap(*mode, capture_mode);
  return kSuccess;
}

int cuInit(unsigned flags) {
  const std::lock_guard lock(mutex);
  state.calls.push_back("cuInit");
  state.initialized = true;
  return flags == 0 ? kSuccess : kInvalidValue;
}

int cuDeviceGet(int* device, int ordinal) {
  ENTER("cuDeviceGet", Needs::nothing);
  if (ordinal < 0 || ordinal >= state.num_devices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER("cuDeviceGetAttribute", Needs::nothing);
  if (device < 0 || device >= state.num_devices) return kInvalidDevice;
  *value = attribute == 75 ? 9 : 0;
  return attribute == 75 || attribute == 76 ? kSuccess : kInvalidValue;
}

int cuDevicePrimaryCtxRetain(Context** context, int device) {
  ENTER("cuDevicePrimaryCtxRetain", Needs::nothing);
  if (device < 0 || device >= state.num_devices) return kInvalidDevice;
  ++state.num_retained;
  *context = state.contexts[device].get();
  return kSuccess;
}

int cuCtxPushCurrent_v2(Context* context) {
  ENTER("cuCtxPushCurrent_v2", Needs::nothing);
  for (const auto& known : state.contexts) {
    if (known.get() == context && state.num_retained > 0) return stack.push_back(context), kSuccess;
  }
  return kInvalidContext;
}

int cuCtxPopCurrent_v2(Context** context) {
  ENTER("cuCtxPopCurrent_v2", Needs::context);
  *context = stack.back();
  stack.pop_back();
  return kSuccess;
}

int cuModuleLoadData(Module** module, const char* image) {
  ENTER_UNSAFE("cuModuleLoadData");
  if (image == nullptr || std::memcmp(image, "\x7f" "ELF", 4) != 0) return kInvalidImage;
  *module = new Module{stack.back(), std::string(image, image_length(image))};
  state.live.insert(*module);
  return kSuccess;
}

int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  ENTER("cuModuleGetFunction", Needs::gpu);
  if (!state.live.count(module) || module->context != stack.back()) return kInvalidHandle;
  if (module->image.find(name) == std::string::npos) return kNotFound;
  *function = new Function{stack.back(), module, name};
  state.live.insert(*function);
  return kSuccess;
}

int cuLaunchKernel(Function* function, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                   unsigned threads_y, unsigned threads_z, unsigned shared_bytes, Stream* stream, void** arguments,
                   void** extra) {
  ENTER("cuLaunchKernel", Needs::gpu);
  if (!state.live.count(function) || function->context != stack.back()) return kInvalidHandle;
  if (stream != nullptr && (!state.live.count(stream) || stream->context != stack.back())) return kInvalidHandle;
  if (blocks == 0 || blocks > 0x7fffffff || threads == 0 || threads > 1024 || blocks_y != 1 || blocks_z != 1 ||
      threads_y != 1 || threads_z != 1 || shared_bytes > 48 << 10 || (arguments == nullptr) == (extra == nullptr)) {
    return kInvalidValue;
  }
  const std::string& image = function->module->image;
  state.sticky = state.on_launch(stack.back()->device, function->name.c_str(), image.data(), image.size(), blocks,
                                 threads, arguments);
  return state.sticky;
}

int cuMemcpyAsync(void* target, const void* source, std::size_t nbytes, Stream* stream) {
  ENTER("cuMemcpyAsync", Needs::gpu);
  if (stream != nullptr && (!state.live.count(stream) || stream->context != stack.back())) return kInvalidHandle;
  std::memcpy(target, source, nbytes);
  return kSuccess;
}

int cuMemHostRegister_v2(void* address, std::size_t nbytes, unsigned flags) {
  ENTER_UNSAFE("cuMemHostRegister_v2");
  const auto start = reinterpret_cast<std::uintptr_t>(address);
  if (nbytes == 0 || flags > 0xf || !is_mapped(start, nbytes)) return kInvalidValue;
  for (const auto& [other, length] : state.registered) {
    if (start < other + length && other < start + nbytes) return kAlreadyRegistered;
  }
  state.registered[start] = nbytes;
  return kSuccess;
}

int cuMemHostUnregister(void* address) {
  ENTER_UNSAFE("cuMemHostUnregister");
  return state.registered.erase(reinterpret_cast<std::uintptr_t>(address)) ? kSuccess : kNotRegistered;
}

int cuGetErrorString(int status, const char** text) {
  static const std::map<int, const char*> texts = {
      {kInvalidValue, "invalid argument"}, {kNotInitialized, "initialization error"}, {2, "out of memory"},
      {kInvalidDevice, "invalid device ordinal"}, {kInvalidImage, "device kernel image is invalid"},
      {kInvalidContext, "invalid device context"}, {kInvalidHandle, "invalid resource handle"},
      {kNotFound, "named symbol not found"}, {700, "an illegal memory access was encountered"},
      {kAlreadyRegistered, "part or all of the requested memory range is already mapped"},
      {kNotRegistered, "pointer does not correspond to a registered memory region"}, {716, "misaligned address"},
  };
  const auto found = texts.find(status);
  *text = found == texts.end() ? nullptr : found->second;
  return found == texts.end() ? kInvalidValue : kSuccess;
}

// For tests.

void fake_begin(int num_devices, OnLaunch on_launch) {
  const std::lock_guard lock(mutex);
  state = State{};
  stack.clear();
  state.num_devices = num_devices;
  state.on_launch = on_launch;
  for (int device = 0; device < num_devices; ++device) state.contexts.push_back(std::make_unique<Context>(Context{device}));
}

Stream* fake_stream(int device) {
  const std::lock_guard lock(mutex);
  auto* const stream = new Stream{state.contexts[device].get()};
  state.live.insert(stream);
  return stream;
}

// A call gives back `status` from now on; 0: no longer.
void fake_plant(const char* name, int status) {
  const std::lock_guard lock(mutex);
  if (status == kSuccess) state.planted.erase(name);
  else state.planted[name] = status;
}

int fake_count(const char* name) {
  const std::lock_guard lock(mutex);
  int count = 0;
  for (const auto& call : state.calls) count += call == name;
  return count;
}

std::size_t fake_num_registered() {
  const std::lock_guard lock(mutex);
  return state.registered.size();
}

std::size_t fake_num_bound() { return stack.size(); }

void fake_capture(int is_captured) {
  const std::lock_guard lock(mutex);
  state.is_captured = is_captured != 0;
}

// What the runtime's calls that might wait for the GPU give back.
int fake_waits() {
  const std::lock_guard lock(mutex);
  return state.is_captured && capture_mode == 0 ? kCaptured : kSuccess;
}

int fake_capture_mode() { return capture_mode; }

}  // extern "C"
