// SPDX-License-Identifier: MIT
// The devices that are pretended, and which of them is current.
#include <string.h>

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
  switch (number) {
    case 1:
      return kThreadsPerBlock;
    case 2:
    case 3:
      return 1024;  // the most threads of a block, by axis
    case 4:
      return 64;
    case 5:
      return 2147483647;  // the most blocks of a grid, by axis
    case 6:
    case 7:
      return 65535;
    case 8:
      return kStaticShared;
    case 9:
      return 65536;  // constant memory
    case 10:
      return 32;  // lanes of a warp
    case 12:
    case 82:
      return 65536;  // registers of a block, of a multiprocessor
    case 16:
      return settings().sms;
    case 38:
      return 60 << 20;  // L2 cache
    case 39:
      return l.threads_per_sm;
    case 75:
      return l.capability / 10;
    case 76:
      return l.capability % 10;
    case 81:
      return l.shared_per_sm;
    case 97:
      return l.optin_shared;
    case 106:
      return l.blocks_per_sm;
    case 111:
      return l.reserved_shared;
    case 120:
      return l.capability >= 90;  // launches of clusters
    default:
      throw Error{kInvalidValue, format("the attribute %d of a device is not known", number)};
  }
}

}  // namespace sg

using namespace sg;

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorName(int code, const char** name) {
  static const std::map<int, const char*> names = {
      {0, "CUDA_SUCCESS"},
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
      {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
      {kNoBinary, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {218, "CUDA_ERROR_INVALID_PTX"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
      {kNotFound, "CUDA_ERROR_NOT_FOUND"},
      {kNotReady, "CUDA_ERROR_NOT_READY"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"},
      {716, "CUDA_ERROR_MISALIGNED_ADDRESS"},
      {719, "CUDA_ERROR_LAUNCH_FAILED"},
      {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED"},
      {801, "CUDA_ERROR_NOT_SUPPORTED"},
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {kCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
      {kCaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
      {kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
      {kCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
      {kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT"},
      {kInvalidCluster, "CUDA_ERROR_INVALID_CLUSTER_SIZE"},
  };
  auto found = names.find(code);
  return *name = found == names.end() ? "CUDA_ERROR_UNKNOWN" : found->second, 0;
}

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
