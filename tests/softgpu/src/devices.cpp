// SPDX-License-Identifier: MIT
// The devices that are pretended, and which of them is current.
#include "host.h"

namespace sg {

static const Limits known_limits[] = {
    {75, 1024, 16, 64 << 10, 64 << 10, 0, "T4"},
    {80, 2048, 32, 164 << 10, 163 << 10, 1024, "A100"},
    {86, 1536, 16, 100 << 10, 99 << 10, 1024, "A10"},
    {89, 1536, 24, 100 << 10, 99 << 10, 1024, "L4"},
    {90, 2048, 32, 228 << 10, 227 << 10, 1024, "H200"},
    {100, 2048, 32, 228 << 10, 227 << 10, 1024, "B200"},
    {120, 1536, 24, 100 << 10, 99 << 10, 1024, "RTX 5090"},
};
const Limits* limits_of(int capability) {
  for (const Limits& l : known_limits)
    if (l.capability == capability) return &l;
  return nullptr;
}
const Limits& limits() { return *limits_of(settings().capability); }

static thread_local int device_in_use = 0;
int current_device() { return device_in_use; }

static void check_device(int device) {
  if (device < 0 || device >= settings().devices)
    throw Error{kInvalidDevice, format("there is no device %d", device)};
}

static int attribute(int number) {
  const Limits& l = limits();
  const std::map<int, int> known = {
      {1, kThreadsPerBlock},    // of a block
      {8, kStaticShared},       // bytes of a block
      {10, 32},                 // lanes of a warp
      {16, settings().sms},     // multiprocessors
      {38, 60 << 20},           // bytes of the L2 cache
      {39, l.threads_per_sm},   // threads of a multiprocessor
      {75, l.capability / 10},  // compute capability
      {76, l.capability % 10},
      {81, l.shared_per_sm},      // bytes of shared memory of a multiprocessor
      {97, l.optin_shared},       // and of a block that opts in
      {106, l.blocks_per_sm},     // blocks of a multiprocessor
      {111, l.reserved_shared},   // bytes of shared memory that are not the block's
      {120, l.capability >= 90},  // whether there are clusters
  };
  auto found = known.find(number);
  if (found == known.end())
    throw Error{kInvalidValue, format("the attribute %d of a device is not known", number)};
  return found->second;
}

}  // namespace sg

using namespace sg;

extern "C" {

int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = settings().devices, 0; }
int cuDeviceGetName(char* name, int size, int device) {
  return answer([&] {
    check_device(device);
    snprintf(name, size_t(size), "software GPU (as an NVIDIA %s)", limits().name);
  });
}
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = 141ull << 30, 0; }
int cuDeviceGetAttribute(int* value, int number, int device) {
  return answer([&] {
    check_device(device);
    *value = attribute(number);
  });
}

// A context is the device's only one; its handle is the device's number, and one.
int cuDevicePrimaryCtxRetain(u64* context, int device) {
  return answer([&] {
    check_device(device);
    *context = u64(device) + 1;
  });
}
int cuCtxSetCurrent(u64 context) {
  return answer([&] {
    check_device(int(context) - 1);
    device_in_use = int(context) - 1;
  });
}
int cuCtxGetDevice(int* device) { return *device = device_in_use, 0; }

}  // extern "C"
