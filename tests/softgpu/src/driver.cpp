// SPDX-License-Identifier: MIT
// The driver API, as a library that pretends to be libcuda.so.1.
#include <cuda.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <set>
#include <unordered_map>

#include "softgpu.h"

namespace sg {

const Settings& settings() {
  static const Settings& made = *new Settings([] {
    Settings s;
    auto text = [](const char* name) -> std::string {
      const char* v = getenv(name);
      return v ? v : "";
    };
    s.trace = text("SOFTGPU_TRACE") == "1";
    if (!text("SOFTGPU_DEVICES").empty()) s.devices = atoi(text("SOFTGPU_DEVICES").c_str());
    if (!text("SOFTGPU_SMS").empty()) s.sms = atoi(text("SOFTGPU_SMS").c_str());
    if (!text("SOFTGPU_SCHEDULE").empty()) s.schedule = text("SOFTGPU_SCHEDULE");
    s.async_early = text("SOFTGPU_ASYNC") == "early";
    s.dump = text("SOFTGPU_DUMP");
    s.races = text("SOFTGPU_RACES") == "1";
    s.stats = text("SOFTGPU_STATS") == "1";
    if (!text("SOFTGPU_SEED").empty()) s.seed = strtoull(text("SOFTGPU_SEED").c_str(), nullptr, 10);
    return s;
  }());
  return made;
}

static std::string vformat(const char* text, va_list list) {
  va_list again;
  va_copy(again, list);
  std::string out(vsnprintf(nullptr, 0, text, list), '\0');
  vsnprintf(out.data(), out.size() + 1, text, again);
  va_end(again);
  return out;
}
std::string format(const char* text, ...) {
  va_list list;
  va_start(list, text);
  std::string out = vformat(text, list);
  va_end(list);
  return out;
}
void say(const char* text, ...) {
  va_list list;
  va_start(list, text);
  fprintf(stderr, "softgpu: %s\n", vformat(text, list).c_str());
  va_end(list);
  fflush(stderr);
}
void trace(const char* text, ...) {
  if (!settings().trace) return;
  va_list list;
  va_start(list, text);
  fprintf(stderr, "softgpu: %s\n", vformat(text, list).c_str());
  va_end(list);
}

std::map<u64, Range>& ranges = *new std::map<u64, Range>;  // never destroyed
u64 ranges_epoch = 1;
static u64 used_bytes[64];

const Range* range_of(u64 address) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return nullptr;
  --after;
  return address < after->second.end ? &after->second : nullptr;
}

// Device memory has a page before and after it that nobody may touch, and begins as NaNs.
u64 allocate(size_t bytes, int device, int kind) {
  const size_t page = 4096, room = (std::max<size_t>(bytes, 1) + page - 1) / page * page;
  u8* at = static_cast<u8*>(mmap(nullptr, room + 2 * page, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (at == MAP_FAILED) return 0;
  mprotect(at, page, PROT_NONE);
  mprotect(at + page + room, page, PROT_NONE);
  at += page;
  if (kind == 0 || kind == 3) memset(at, 0xff, bytes);
  const u64 begin = reinterpret_cast<u64>(at);
  ranges[begin] = {begin, begin + bytes, device, kind};
  used_bytes[device] += bytes;
  ++ranges_epoch;
  return begin;
}
bool release(u64 address) {
  auto found = ranges.find(address);
  if (found == ranges.end()) return false;
  const size_t page = 4096, bytes = found->second.end - address;
  munmap(reinterpret_cast<void*>(address - page),
         (std::max<size_t>(bytes, 1) + page - 1) / page * page + 2 * page);
  used_bytes[found->second.device] -= bytes;
  ranges.erase(found);
  ++ranges_epoch;
  return true;
}

}  // namespace sg

using namespace sg;

static auto& lock = *new std::recursive_mutex;
#define HOLD std::lock_guard<std::recursive_mutex> hold(lock)
#define LOG(...) trace(__VA_ARGS__)

struct CUctx_st {
  int device;
  unsigned flags = 0;
};
static CUctx_st contexts[64];
static int retained[64];
static thread_local std::vector<CUcontext> stack;
static const u64 kMemory = 141ull << 30;

struct CUstream_st {
  int device;
  unsigned flags;
  int priority;
  u64 id;
};
struct CUevent_st {
  timespec at;
  bool recorded;
};
static CUcontext current() { return stack.empty() ? nullptr : stack.back(); }
static int current_device() { return current() ? current()->device : 0; }

namespace sg {
static int sg_primary_context(void** context, int device) {
  contexts[device].device = device;
  *context = &contexts[device];
  return 0;
}
static void sg_device_place(int device, unsigned char uuid[16], int* domain, int* bus, int* slot) {
  for (int i = 0; i < 16; ++i) uuid[i] = (unsigned char)(0x50 + 7 * i + device);
  *domain = 0, *bus = 2 + device, *slot = 0;
}
}  // namespace sg

static auto& told = *new std::set<std::string>;
static CUresult unknown(const char* name) {
  HOLD;
  if (told.insert(name).second) say("%s is not supported", name);
  return CUDA_ERROR_NOT_SUPPORTED;
}
static CUresult report(const Error& error) {
  say("%s", error.text.c_str());
  return CUresult(error.code);
}

// A function that calls unknown(name), written into a page of its own.
static void* stub_of(const std::string& name) {
  static auto& made = *new std::unordered_map<std::string, void*>;
  static u8* page = nullptr;
  static size_t used = 0;
  HOLD;
  auto found = made.find(name);
  if (found != made.end()) return found->second;
  const size_t size = 32, all = 1 << 18;
  if (!page)
    page = static_cast<u8*>(
        mmap(nullptr, all, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (used + size > all) abort();
  u8* at = page + used;
  used += size;
  const u64 text = reinterpret_cast<u64>(strdup(name.c_str()));
  const u64 to = reinterpret_cast<u64>(&unknown);
  u8 code[] = {0x48, 0xbf, 0, 0, 0, 0, 0, 0, 0, 0, 0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};
  memcpy(code + 2, &text, 8);
  memcpy(code + 12, &to, 8);
  memcpy(at, code, sizeof code);
  made[name] = at;
  return at;
}

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* v) {
  *v = CUDA_VERSION;
  return CUDA_SUCCESS;
}
// The tables beyond the documented interface are left out: see README.md.
CUresult cuGetExportTable(const void**, const CUuuid*) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuGetErrorName(CUresult e, const char** s) {
  switch (int(e)) {
    case 0:
      *s = "CUDA_SUCCESS";
      break;
    case 1:
      *s = "CUDA_ERROR_INVALID_VALUE";
      break;
    case 2:
      *s = "CUDA_ERROR_OUT_OF_MEMORY";
      break;
    case 200:
      *s = "CUDA_ERROR_INVALID_IMAGE";
      break;
    case 201:
      *s = "CUDA_ERROR_INVALID_CONTEXT";
      break;
    case 218:
      *s = "CUDA_ERROR_INVALID_PTX";
      break;
    case 400:
      *s = "CUDA_ERROR_INVALID_HANDLE";
      break;
    case 500:
      *s = "CUDA_ERROR_NOT_FOUND";
      break;
    case 700:
      *s = "CUDA_ERROR_ILLEGAL_ADDRESS";
      break;
    case 701:
      *s = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
      break;
    case 716:
      *s = "CUDA_ERROR_MISALIGNED_ADDRESS";
      break;
    case 719:
      *s = "CUDA_ERROR_LAUNCH_FAILED";
      break;
    case 801:
      *s = "CUDA_ERROR_NOT_SUPPORTED";
      break;
    case 912:
      *s = "CUDA_ERROR_INVALID_CLUSTER_SIZE";
      break;
    default:
      *s = "CUDA_ERROR";
      break;
  }
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult e, const char** s) { return cuGetErrorName(e, s); }

// Devices.
CUresult cuDeviceGetCount(int* n) {
  *n = settings().devices;
  return CUDA_SUCCESS;
}
static bool no_device(int d) { return d < 0 || d >= settings().devices; }
CUresult cuDeviceGet(CUdevice* d, int i) {
  if (no_device(i)) return CUDA_ERROR_INVALID_DEVICE;
  *d = i;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int size, CUdevice) {
  snprintf(name, size, "softgpu H200");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid* id, CUdevice d) {
  int a, b, c;
  sg_device_place(d, reinterpret_cast<unsigned char*>(id->bytes), &a, &b, &c);
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t* n, CUdevice) {
  *n = kMemory;
  return CUDA_SUCCESS;
}
CUresult cuDeviceComputeCapability(int* a, int* b, CUdevice) {
  *a = 9, *b = 0;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice d) {
  if (no_device(d)) return CUDA_ERROR_INVALID_DEVICE;
  static const auto& known = *new std::map<int, int>{
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kThreadsPerBlock},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, kStaticShared},
      {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
      {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
      {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, settings().sms},
      {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
      {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
      {CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0},
      {CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0},
      {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3201000},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6144},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 62914560},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, kThreadsPerSm},
      {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
      {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, kSharedPerSm},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
      {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 0},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, kOptinShared},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, kBlocksPerSm},
      {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, kReservedShared},
      {CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 1},
      {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 0},
  };
  auto found = known.find(int(a));
  *v = found == known.end() ? 0 : found->second;
  if (a == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) *v = 2 + d;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char* s, int n, CUdevice d) {
  snprintf(s, n, "0000:%02x:00.0", 2 + d);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetByPCIBusId(CUdevice* d, const char* s) {
  int domain = 0, bus = 0, slot = 0;
  if (sscanf(s, "%x:%x:%x", &domain, &bus, &slot) < 2 || no_device(bus - 2))
    return CUDA_ERROR_INVALID_VALUE;
  *d = bus - 2;
  return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) {
  *can = 0;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
  if (no_device(d)) return CUDA_ERROR_INVALID_DEVICE;
  HOLD;
  ++retained[d];
  return CUresult(sg_primary_context(reinterpret_cast<void**>(c), d));
}
CUresult cuDevicePrimaryCtxRelease(CUdevice d) {
  --retained[d];
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxSetFlags(CUdevice d, unsigned f) {
  contexts[d].flags = f;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned* f, int* on) {
  *f = contexts[d].flags, *on = retained[d] > 0;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxReset(CUdevice) { return CUDA_SUCCESS; }

// Contexts.
CUresult cuCtxGetCurrent(CUcontext* c) {
  *c = current();
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext c) {
  if (!stack.empty()) stack.pop_back();
  if (c) stack.push_back(c);
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext c) {
  stack.push_back(c);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* c) {
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (c) *c = stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* d) {
  if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
  *d = current()->device;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetFlags(unsigned* f) {
  *f = current() ? current()->flags : 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t* v, CUlimit l) {
  *v = l == CU_LIMIT_STACK_SIZE ? 1024 : l == CU_LIMIT_MALLOC_HEAP_SIZE ? 8 << 20 : 1 << 20;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuCtxGetStreamPriorityRange(int* low, int* high) {
  *low = 0, *high = -5;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetApiVersion(CUcontext, unsigned* v) {
  *v = 3020;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCacheConfig(CUfunc_cache* c) {
  *c = CU_FUNC_CACHE_PREFER_NONE;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCacheConfig(CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuCtxEnablePeerAccess(CUcontext, unsigned) { return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED; }

// Memory.
CUresult cuMemGetInfo(size_t* left, size_t* all) {
  HOLD;
  *all = kMemory;
  *left = kMemory - used_bytes[current_device()];
  return CUDA_SUCCESS;
}
static CUresult alloc(CUdeviceptr* p, size_t n, int kind) {
  HOLD;
  if (n == 0) return CUDA_ERROR_INVALID_VALUE;
  if (used_bytes[current_device()] + n > kMemory) return CUDA_ERROR_OUT_OF_MEMORY;
  *p = allocate(n, current_device(), kind);
  LOG("alloc %zu at %llx", n, *p);
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAlloc(CUdeviceptr* p, size_t n) { return alloc(p, n, 0); }
CUresult cuMemAllocManaged(CUdeviceptr* p, size_t n, unsigned) { return alloc(p, n, 3); }
CUresult cuMemAllocAsync(CUdeviceptr* p, size_t n, CUstream) { return alloc(p, n, 0); }
CUresult cuMemAllocPitch(CUdeviceptr* p, size_t* pitch, size_t width, size_t height, unsigned) {
  *pitch = (width + 511) / 512 * 512;
  return alloc(p, *pitch * height, 0);
}
CUresult cuMemFree(CUdeviceptr p) {
  HOLD;
  LOG("free %llx", p);
  return !p || release(p) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemFreeAsync(CUdeviceptr p, CUstream) { return cuMemFree(p); }
CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* n, CUdeviceptr p) {
  HOLD;
  const Range* r = range_of(p);
  if (!r) return CUDA_ERROR_NOT_FOUND;
  if (begin) *begin = r->begin;
  if (n) *n = r->end - r->begin;
  return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void** p, size_t n, unsigned) {
  return alloc(reinterpret_cast<CUdeviceptr*>(p), n, 1);
}
CUresult cuMemAllocHost(void** p, size_t n) {
  return alloc(reinterpret_cast<CUdeviceptr*>(p), n, 1);
}
CUresult cuMemFreeHost(void* p) { return cuMemFree(reinterpret_cast<CUdeviceptr>(p)); }
CUresult cuMemHostGetDevicePointer(CUdeviceptr* p, void* host, unsigned) {
  *p = reinterpret_cast<CUdeviceptr>(host);
  return CUDA_SUCCESS;
}
CUresult cuMemHostGetFlags(unsigned* f, void*) {
  *f = 0;
  return CUDA_SUCCESS;
}
CUresult cuMemHostRegister(void*, size_t, unsigned) { return CUDA_SUCCESS; }
CUresult cuMemHostUnregister(void*) { return CUDA_SUCCESS; }

// A copy or a fill of device memory outside what is allocated is an error here, too.
static bool device_ok(CUdeviceptr p, size_t n, const char* what) {
  HOLD;
  const Range* r = range_of(p);
  if (n == 0 || (r && p + n <= r->end)) return true;
  say("%s: %llx and %zu bytes are outside of any allocation", what, p, n);
  return false;
}
static CUresult copy(u64 to, u64 from, size_t n, bool to_device, bool from_device) {
  LOG("copy %zu bytes to %llx from %llx", n, (unsigned long long)to, (unsigned long long)from);
  if ((to_device && !device_ok(to, n, "copy to")) ||
      (from_device && !device_ok(from, n, "copy from")))
    return CUDA_ERROR_INVALID_VALUE;
  memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), n);
  return CUDA_SUCCESS;
}
CUresult cuMemcpy(CUdeviceptr d, CUdeviceptr s, size_t n) { return copy(d, s, n, false, false); }
CUresult cuMemcpyAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream) {
  return copy(d, s, n, false, false);
}
CUresult cuMemcpyPeer(CUdeviceptr d, CUcontext, CUdeviceptr s, CUcontext, size_t n) {
  return copy(d, s, n, true, true);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr d, CUcontext, CUdeviceptr s, CUcontext, size_t n, CUstream) {
  return copy(d, s, n, true, true);
}
CUresult cuMemcpyHtoD(CUdeviceptr d, const void* s, size_t n) {
  return copy(d, u64(s), n, true, false);
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr d, const void* s, size_t n, CUstream) {
  return copy(d, u64(s), n, true, false);
}
CUresult cuMemcpyDtoH(void* d, CUdeviceptr s, size_t n) { return copy(u64(d), s, n, false, true); }
CUresult cuMemcpyDtoHAsync(void* d, CUdeviceptr s, size_t n, CUstream) {
  return copy(u64(d), s, n, false, true);
}
CUresult cuMemcpyDtoD(CUdeviceptr d, CUdeviceptr s, size_t n) { return copy(d, s, n, true, true); }
CUresult cuMemcpyDtoDAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream) {
  return copy(d, s, n, true, true);
}
static CUresult copy_2d(const CUDA_MEMCPY2D* c) {
  if (c->srcMemoryType == CU_MEMORYTYPE_ARRAY || c->dstMemoryType == CU_MEMORYTYPE_ARRAY)
    return unknown("cuMemcpy2D of arrays");
  const u8* s = c->srcMemoryType == CU_MEMORYTYPE_HOST ? static_cast<const u8*>(c->srcHost)
                                                       : reinterpret_cast<const u8*>(c->srcDevice);
  u8* d = c->dstMemoryType == CU_MEMORYTYPE_HOST ? static_cast<u8*>(c->dstHost)
                                                 : reinterpret_cast<u8*>(c->dstDevice);
  for (size_t y = 0; y < c->Height; ++y)
    memmove(d + (c->dstY + y) * c->dstPitch + c->dstXInBytes,
            s + (c->srcY + y) * c->srcPitch + c->srcXInBytes, c->WidthInBytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpy2D(const CUDA_MEMCPY2D* c) { return copy_2d(c); }
CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D* c) { return copy_2d(c); }
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* c, CUstream) { return copy_2d(c); }

}  // extern "C"
template <class T>
static CUresult fill(CUdeviceptr p, T v, size_t n) {
  LOG("fill %zu of %zu bytes at %llx", n, sizeof(T), p);
  if (!device_ok(p, n * sizeof(T), "fill")) return CUDA_ERROR_INVALID_VALUE;
  std::fill_n(reinterpret_cast<T*>(p), n, v);
  return CUDA_SUCCESS;
}
template <class T>
static CUresult fill_2d(CUdeviceptr p, size_t pitch, T v, size_t w, size_t h) {
  for (size_t y = 0; y < h; ++y)
    if (CUresult e = fill<T>(p + y * pitch, v, w)) return e;
  return CUDA_SUCCESS;
}
extern "C" {
CUresult cuMemsetD8(CUdeviceptr p, unsigned char v, size_t n) { return fill<u8>(p, v, n); }
CUresult cuMemsetD16(CUdeviceptr p, unsigned short v, size_t n) { return fill<u16>(p, v, n); }
CUresult cuMemsetD32(CUdeviceptr p, unsigned v, size_t n) { return fill<u32>(p, v, n); }
CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream) {
  return fill<u8>(p, v, n);
}
CUresult cuMemsetD16Async(CUdeviceptr p, unsigned short v, size_t n, CUstream) {
  return fill<u16>(p, v, n);
}
CUresult cuMemsetD32Async(CUdeviceptr p, unsigned v, size_t n, CUstream) {
  return fill<u32>(p, v, n);
}
CUresult cuMemsetD2D8(CUdeviceptr p, size_t pitch, unsigned char v, size_t w, size_t h) {
  return fill_2d<u8>(p, pitch, v, w, h);
}
CUresult cuMemsetD2D8Async(CUdeviceptr p, size_t pitch, unsigned char v, size_t w, size_t h,
                           CUstream) {
  return fill_2d<u8>(p, pitch, v, w, h);
}
CUresult cuMemsetD2D32(CUdeviceptr p, size_t pitch, unsigned v, size_t w, size_t h) {
  return fill_2d<u32>(p, pitch, v, w, h);
}
CUresult cuMemsetD2D32Async(CUdeviceptr p, size_t pitch, unsigned v, size_t w, size_t h, CUstream) {
  return fill_2d<u32>(p, pitch, v, w, h);
}

static CUresult attribute(void* out, CUpointer_attribute a, CUdeviceptr p, bool must) {
  HOLD;
  const Range* r = range_of(p);
  switch (int(a)) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<void**>(out) = r ? &contexts[r->device] : nullptr;
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(out) = !r             ? 0
                                     : r->kind == 1 ? CU_MEMORYTYPE_HOST
                                                    : CU_MEMORYTYPE_DEVICE;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<u64*>(out) = r ? p : 0;
      break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *static_cast<u64*>(out) = r && r->kind != 0 ? p : 0;
      break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<unsigned*>(out) = r && r->kind == 3;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(out) = r ? r->device : -2;
      break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<u64*>(out) = r ? r->begin : 0;
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<u64*>(out) = r ? r->begin : 0;
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<u64*>(out) = r ? r->end - r->begin : 0;
      break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      *static_cast<unsigned*>(out) = r != nullptr;
      break;
    default:
      *static_cast<unsigned*>(out) = 0;
      break;
  }
  return r || !must ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuPointerGetAttribute(void* out, CUpointer_attribute a, CUdeviceptr p) {
  return attribute(out, a, p, true);
}
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute* a, void** out, CUdeviceptr p) {
  for (unsigned i = 0; i < n; ++i) attribute(out[i], a[i], p, false);
  return CUDA_SUCCESS;
}
CUresult cuPointerSetAttribute(const void*, CUpointer_attribute, CUdeviceptr) {
  return CUDA_SUCCESS;
}

// Streams and events: all work is done when a call returns.
static std::atomic<u64> stream_ids{10};
CUresult cuStreamCreateWithPriority(CUstream* s, unsigned f, int priority) {
  *s = new CUstream_st{current_device(), f, priority, stream_ids++};
  return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* s, unsigned f) { return cuStreamCreateWithPriority(s, f, 0); }
static bool is_handle(CUstream s) { return u64(s) > 2; }
CUresult cuStreamDestroy(CUstream s) {
  if (is_handle(s)) delete s;
  return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
CUresult cuStreamQuery(CUstream) { return CUDA_SUCCESS; }
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return CUDA_SUCCESS; }
CUresult cuStreamGetFlags(CUstream s, unsigned* f) {
  *f = is_handle(s) ? s->flags : 0;
  return CUDA_SUCCESS;
}
CUresult cuStreamGetPriority(CUstream s, int* p) {
  *p = is_handle(s) ? s->priority : 0;
  return CUDA_SUCCESS;
}
CUresult cuStreamGetId(CUstream s, unsigned long long* id) {
  *id = is_handle(s) ? s->id : u64(s) + 1;
  return CUDA_SUCCESS;
}
CUresult cuStreamGetDevice(CUstream s, CUdevice* d) {
  *d = is_handle(s) ? s->device : current_device();
  return CUDA_SUCCESS;
}
#undef cuStreamGetCtx
CUresult cuStreamGetCtx(CUstream s, CUcontext* c) {
  *c = is_handle(s) ? &contexts[s->device] : current();
  return CUDA_SUCCESS;
}
CUresult cuStreamGetCtx_v2(CUstream s, CUcontext* c, CUgreenCtx* g) {
  if (g) *g = nullptr;
  return cuStreamGetCtx(s, c);
}
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* s) {
  *s = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuStreamAddCallback(CUstream s, CUstreamCallback f, void* data, unsigned) {
  f(s, CUDA_SUCCESS, data);
  return CUDA_SUCCESS;
}
CUresult cuLaunchHostFunc(CUstream, CUhostFn f, void* data) {
  f(data);
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }
CUresult cuEventCreate(CUevent* e, unsigned) {
  *e = new CUevent_st{};
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent e) {
  delete e;
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent e, CUstream) {
  clock_gettime(CLOCK_MONOTONIC, &e->at);
  e->recorded = true;
  return CUDA_SUCCESS;
}
CUresult cuEventRecordWithFlags(CUevent e, CUstream s, unsigned) { return cuEventRecord(e, s); }
CUresult cuEventQuery(CUevent) { return CUDA_SUCCESS; }
CUresult cuEventSynchronize(CUevent) { return CUDA_SUCCESS; }
CUresult cuEventElapsedTime(float* ms, CUevent a, CUevent b) {
  if (!a->recorded || !b->recorded) return CUDA_ERROR_INVALID_HANDLE;
  *ms = float((b->at.tv_sec - a->at.tv_sec) * 1e3 + (b->at.tv_nsec - a->at.tv_nsec) * 1e-6);
  return CUDA_SUCCESS;
}

// Modules.
CUresult cuModuleLoadData(CUmodule* m, const void* image) {
  HOLD;
  const u8* b = static_cast<const u8*>(image);
  if (b[0] < 9 || b[0] > 126) {
    say("a module is not PTX text (its first bytes are %02x %02x %02x %02x)", b[0], b[1], b[2],
        b[3]);
    return CUDA_ERROR_INVALID_IMAGE;
  }
  try {
    *m = reinterpret_cast<CUmodule>(load_module(static_cast<const char*>(image), current_device()));
  } catch (const Error& error) {
    return report(error);
  }
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule* m, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(m, image);
}
CUresult cuModuleUnload(CUmodule m) {
  HOLD;
  unload(reinterpret_cast<Module*>(m));
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  *f = reinterpret_cast<CUfunction>(find_function(reinterpret_cast<Module*>(m), name));
  return *f ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuModuleGetGlobal(CUdeviceptr* p, size_t* n, CUmodule m, const char* name) {
  u64 at = 0;
  size_t size = 0;
  if (!find_global(reinterpret_cast<Module*>(m), name, &at, &size)) return CUDA_ERROR_NOT_FOUND;
  if (p) *p = at;
  if (n) *n = size;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* m) {
  *m = CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunctionCount(unsigned* n, CUmodule m) {
  *n = unsigned(functions_of(reinterpret_cast<Module*>(m)).size());
  return CUDA_SUCCESS;
}
CUresult cuLibraryLoadData(CUlibrary* l, const void* code, CUjit_option*, void**, unsigned,
                           CUlibraryOption*, void**, unsigned) {
  return cuModuleLoadData(reinterpret_cast<CUmodule*>(l), code);
}
CUresult cuLibraryUnload(CUlibrary l) { return cuModuleUnload(reinterpret_cast<CUmodule>(l)); }
CUresult cuLibraryGetModule(CUmodule* m, CUlibrary l) {
  *m = reinterpret_cast<CUmodule>(l);
  return CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel* k, CUlibrary l, const char* name) {
  return cuModuleGetFunction(reinterpret_cast<CUfunction*>(k), reinterpret_cast<CUmodule>(l), name);
}
CUresult cuLibraryGetGlobal(CUdeviceptr* p, size_t* n, CUlibrary l, const char* name) {
  return cuModuleGetGlobal(p, n, reinterpret_cast<CUmodule>(l), name);
}
CUresult cuKernelGetFunction(CUfunction* f, CUkernel k) {
  *f = reinterpret_cast<CUfunction>(k);
  return CUDA_SUCCESS;
}
struct Link {
  std::string text;
};
CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState* s) {
  *s = reinterpret_cast<CUlinkState>(new Link);
  return CUDA_SUCCESS;
}
CUresult cuLinkAddData(CUlinkState s, CUjitInputType type, void* data, size_t n, const char*,
                       unsigned, CUjit_option*, void**) {
  Link* link = reinterpret_cast<Link*>(s);
  if (type != CU_JIT_INPUT_PTX || !link->text.empty())
    return unknown("linking of more than one PTX");
  link->text.assign(static_cast<const char*>(data), strnlen(static_cast<const char*>(data), n));
  return CUDA_SUCCESS;
}
CUresult cuLinkComplete(CUlinkState s, void** cubin, size_t* n) {
  Link* link = reinterpret_cast<Link*>(s);
  *cubin = link->text.data();
  *n = link->text.size() + 1;
  return CUDA_SUCCESS;
}
CUresult cuLinkDestroy(CUlinkState s) {
  delete reinterpret_cast<Link*>(s);
  return CUDA_SUCCESS;
}

// Functions.
CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction f) {
  Function* g = reinterpret_cast<Function*>(f);
  switch (int(a)) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *v = max_threads(g) ? max_threads(g) : kThreadsPerBlock;
      break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *v = static_shared(g);
      break;
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
      *v = const_bytes(g);
      break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
      *v = local_bytes(g);
      break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *v = 32;
      break;  // not known without ptxas
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
      *v = 90;
      break;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *v = 90;
      break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *v = max_dynamic_shared(g);
      break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      *v = -1;
      break;
    case CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET:
      *v = 0;
      break;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH: {
      unsigned c[3] = {0, 0, 0};
      cluster_of(g, c);
      *v = int(c[int(a) - CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH]);
      break;
    }
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      *v = nonportable_cluster(g);
      break;
    default:
      *v = 0;
      break;
  }
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
  Function* g = reinterpret_cast<Function*>(f);
  LOG("cuFuncSetAttribute %s %d = %d", name_of(g).c_str(), int(a), v);
  switch (int(a)) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      if (v < 0 || v + static_shared(g) > kOptinShared) return CUDA_ERROR_INVALID_VALUE;
      max_dynamic_shared(g) = v;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      nonportable_cluster(g) = v;
      return CUDA_SUCCESS;
    default:
      say("cuFuncSetAttribute %d is not supported", int(a));
      return CUDA_ERROR_INVALID_VALUE;
  }
}
CUresult cuKernelGetAttribute(int* v, CUfunction_attribute a, CUkernel k, CUdevice) {
  return cuFuncGetAttribute(v, a, reinterpret_cast<CUfunction>(k));
}
CUresult cuKernelSetAttribute(CUfunction_attribute a, int v, CUkernel k, CUdevice) {
  return cuFuncSetAttribute(reinterpret_cast<CUfunction>(k), a, v);
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuFuncGetModule(CUmodule* m, CUfunction f) {
  *m = reinterpret_cast<CUmodule>(module_of(reinterpret_cast<Function*>(f)));
  return CUDA_SUCCESS;
}
CUresult cuFuncGetName(const char** s, CUfunction f) {
  *s = name_of(reinterpret_cast<Function*>(f)).c_str();
  return CUDA_SUCCESS;
}
CUresult cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }
CUresult cuFuncIsLoaded(CUfunctionLoadingState* s, CUfunction) {
  *s = CU_FUNCTION_LOADING_STATE_LOADED;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetParamInfo(CUfunction f, size_t i, size_t* offset, size_t* size) {
  auto all = params_of(reinterpret_cast<Function*>(f));
  if (i >= all.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = all[i].first;
  if (size) *size = all[i].second;
  return CUDA_SUCCESS;
}

static CUresult start(Function* f, Launch& l, void** values, void** extra) {
  HOLD;
  auto all = params_of(f);
  const size_t size = all.empty() ? 0 : all.back().first + all.back().second;
  std::vector<u8> bytes((size + 63) / 64 * 64 + 64, 0xcd);
  if (values) {
    for (size_t i = 0; i < all.size(); ++i) memcpy(&bytes[all[i].first], values[i], all[i].second);
  } else if (extra) {
    const void* from = nullptr;
    size_t given = 0;
    for (int i = 0; extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
      if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) from = extra[i + 1];
      if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE) given = *static_cast<size_t*>(extra[i + 1]);
    }
    if (given < size)
      return report({1, format("%s: %zu bytes of parameters, %zu expected", name_of(f).c_str(),
                               given, size)});
    memcpy(bytes.data(), from, size);
  } else if (!all.empty()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  LOG("launch %s grid %u,%u,%u block %u,%u,%u shared %u params %zu", name_of(f).c_str(), l.grid[0],
      l.grid[1], l.grid[2], l.block[0], l.block[1], l.block[2], l.dynamic_shared, size);
  try {
    launch(f, l, bytes.data(), size);
  } catch (const Error& error) {
    return report(error);
  }
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream, void** values,
                        void** extra) {
  Launch l{{gx, gy, gz}, {bx, by, bz}, shared};
  return start(reinterpret_cast<Function*>(f), l, values, extra);
}
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by, unsigned bz, unsigned shared, CUstream,
                                   void** values) {
  Launch l{{gx, gy, gz}, {bx, by, bz}, shared};
  l.cooperative = true;
  return start(reinterpret_cast<Function*>(f), l, values, nullptr);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** values, void** extra) {
  Launch l{{c->gridDimX, c->gridDimY, c->gridDimZ},
           {c->blockDimX, c->blockDimY, c->blockDimZ},
           c->sharedMemBytes};
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    const CUlaunchAttribute& a = c->attrs[i];
    if (a.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      l.cluster[0] = a.value.clusterDim.x, l.cluster[1] = a.value.clusterDim.y,
      l.cluster[2] = a.value.clusterDim.z;
    } else if (a.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
      l.cooperative = a.value.cooperative;
    }
  }
  return start(reinterpret_cast<Function*>(f), l, values, extra);
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction f, int block,
                                                     size_t shared) {
  const size_t each = static_shared(reinterpret_cast<Function*>(f)) + shared + kReservedShared;
  *n = std::min({kThreadsPerSm / std::max((block + 31) / 32 * 32, 32), kBlocksPerSm,
                 int(kSharedPerSm / each)});
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, CUfunction f, int block,
                                                              size_t shared, unsigned) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, shared);
}
CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction f, CUoccupancyB2DSize,
                                          size_t, int limit) {
  int most = max_threads(reinterpret_cast<Function*>(f));
  *block = std::min(most ? most : 1024, limit ? limit : 1024);
  *grid = settings().sms * std::max(1, kThreadsPerSm / *block);
  return CUDA_SUCCESS;
}
CUresult cuProfilerStart(void) { return CUDA_SUCCESS; }
CUresult cuProfilerStop(void) { return CUDA_SUCCESS; }

#undef cuGetProcAddress
CUresult cuGetProcAddress_v2(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
CUresult cuGetProcAddress(const char* name, void** f, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(name, f, version, flags, nullptr);
}
}  // extern "C"

#define E(name) {#name, reinterpret_cast<void*>(name)}
static const std::unordered_map<std::string, void*>& entries() {
  static const auto& all = *new std::unordered_map<std::string, void*>{
      E(cuInit),
      E(cuDriverGetVersion),
      E(cuGetExportTable),
      E(cuGetErrorName),
      E(cuGetErrorString),
      E(cuDeviceGetCount),
      E(cuDeviceGet),
      E(cuDeviceGetName),
      E(cuDeviceGetUuid),
      E(cuDeviceTotalMem),
      E(cuDeviceComputeCapability),
      E(cuDeviceGetAttribute),
      E(cuDeviceGetPCIBusId),
      E(cuDeviceGetByPCIBusId),
      E(cuDeviceCanAccessPeer),
      E(cuDevicePrimaryCtxRetain),
      E(cuDevicePrimaryCtxRelease),
      E(cuDevicePrimaryCtxSetFlags),
      E(cuDevicePrimaryCtxGetState),
      E(cuDevicePrimaryCtxReset),
      E(cuCtxGetCurrent),
      E(cuCtxSetCurrent),
      E(cuCtxPushCurrent),
      E(cuCtxPopCurrent),
      E(cuCtxGetDevice),
      E(cuCtxGetFlags),
      E(cuCtxSynchronize),
      E(cuCtxGetLimit),
      E(cuCtxSetLimit),
      E(cuCtxGetStreamPriorityRange),
      E(cuCtxGetApiVersion),
      E(cuCtxGetCacheConfig),
      E(cuCtxSetCacheConfig),
      E(cuCtxEnablePeerAccess),
      E(cuMemGetInfo),
      E(cuMemAlloc),
      E(cuMemAllocManaged),
      E(cuMemAllocAsync),
      E(cuMemAllocPitch),
      E(cuMemFree),
      E(cuMemFreeAsync),
      E(cuMemGetAddressRange),
      E(cuMemHostAlloc),
      E(cuMemAllocHost),
      E(cuMemFreeHost),
      E(cuMemHostGetDevicePointer),
      E(cuMemHostGetFlags),
      E(cuMemHostRegister),
      E(cuMemHostUnregister),
      E(cuMemcpy),
      E(cuMemcpyAsync),
      E(cuMemcpyPeer),
      E(cuMemcpyPeerAsync),
      E(cuMemcpyHtoD),
      E(cuMemcpyHtoDAsync),
      E(cuMemcpyDtoH),
      E(cuMemcpyDtoHAsync),
      E(cuMemcpyDtoD),
      E(cuMemcpyDtoDAsync),
      E(cuMemcpy2D),
      E(cuMemcpy2DUnaligned),
      E(cuMemcpy2DAsync),
      E(cuMemsetD8),
      E(cuMemsetD16),
      E(cuMemsetD32),
      E(cuMemsetD8Async),
      E(cuMemsetD16Async),
      E(cuMemsetD32Async),
      E(cuMemsetD2D8),
      E(cuMemsetD2D8Async),
      E(cuMemsetD2D32),
      E(cuMemsetD2D32Async),
      E(cuPointerGetAttribute),
      E(cuPointerGetAttributes),
      E(cuPointerSetAttribute),
      E(cuStreamCreateWithPriority),
      E(cuStreamCreate),
      E(cuStreamDestroy),
      E(cuStreamSynchronize),
      E(cuStreamQuery),
      E(cuStreamWaitEvent),
      E(cuStreamGetFlags),
      E(cuStreamGetPriority),
      E(cuStreamGetId),
      E(cuStreamGetDevice),
      E(cuStreamGetCtx),
      E(cuStreamIsCapturing),
      E(cuStreamAddCallback),
      E(cuLaunchHostFunc),
      E(cuThreadExchangeStreamCaptureMode),
      E(cuEventCreate),
      E(cuEventDestroy),
      E(cuEventRecord),
      E(cuEventRecordWithFlags),
      E(cuEventQuery),
      E(cuEventSynchronize),
      E(cuEventElapsedTime),
      E(cuModuleLoadData),
      E(cuModuleLoadDataEx),
      E(cuModuleUnload),
      E(cuModuleGetFunction),
      E(cuModuleGetGlobal),
      E(cuModuleGetLoadingMode),
      E(cuModuleGetFunctionCount),
      E(cuLibraryLoadData),
      E(cuLibraryUnload),
      E(cuLibraryGetModule),
      E(cuLibraryGetKernel),
      E(cuLibraryGetGlobal),
      E(cuKernelGetFunction),
      E(cuLinkCreate),
      E(cuLinkAddData),
      E(cuLinkComplete),
      E(cuLinkDestroy),
      E(cuFuncGetAttribute),
      E(cuFuncSetAttribute),
      E(cuKernelGetAttribute),
      E(cuKernelSetAttribute),
      E(cuFuncSetCacheConfig),
      E(cuFuncGetModule),
      E(cuFuncGetName),
      E(cuFuncLoad),
      E(cuFuncIsLoaded),
      E(cuFuncGetParamInfo),
      E(cuLaunchKernel),
      E(cuLaunchCooperativeKernel),
      E(cuLaunchKernelEx),
      E(cuOccupancyMaxActiveBlocksPerMultiprocessor),
      E(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags),
      E(cuOccupancyMaxPotentialBlockSize),
      E(cuProfilerStart),
      E(cuProfilerStop),
      {"cuGetProcAddress", reinterpret_cast<void*>(cuGetProcAddress_v2)},
  };
  return all;
}

extern "C" CUresult cuGetProcAddress_v2(const char* name, void** f, int version, cuuint64_t,
                                        CUdriverProcAddressQueryResult* result) {
  if (!*name) {
    *f = nullptr;
    return CUDA_SUCCESS;
  }
  auto found = entries().find(name);
  *f = found != entries().end() ? found->second : stub_of(name);
  if (!strcmp(name, "cuStreamGetCtx") && version >= 12050)
    *f = reinterpret_cast<void*>(cuStreamGetCtx_v2);
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
