// SPDX-License-Identifier: MIT
// Settings, errors, the simulated devices, and their memory. A device's memory is memory of the
// process, and the driver records each allocation.
#include <stdarg.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "host.h"

namespace sg {

std::recursive_mutex& host_lock = *new std::recursive_mutex;  // never destroyed
static thread_local std::string last_error;
void keep_error(const std::string& text) { last_error = text; }

std::string format(const char* text, ...) {
  char* buffer = nullptr;
  va_list list;
  va_start(list, text);
  const int size = vasprintf(&buffer, text, list);
  va_end(list);
  std::string out(buffer, size_t(size));
  free(buffer);
  return out;
}

static const Limits all_limits[] = {
    {75, 1024, 16, 64 << 10, 0, 4 << 20, "T4"},
    {80, 2048, 32, 164 << 10, 1024, 40 << 20, "A100"},
    {86, 1536, 16, 100 << 10, 1024, 6 << 20, "A10"},
    {89, 1536, 24, 100 << 10, 1024, 48 << 20, "L4"},
    {90, 2048, 32, 228 << 10, 1024, 60 << 20, "H200"},
    {100, 2048, 32, 228 << 10, 1024, 126 << 20, "B200"},
    {120, 1536, 24, 100 << 10, 1024, 96 << 20, "RTX 5090"},
};
const Limits& limits() { return all_limits[setting(kCapability)]; }

// The value is the index of one of `words` or, without words, a number within limits.
struct Value {
  const char* name;
  u64 value;
  std::vector<std::string> words = {};
  u64 least = 0, most = ~0ull;
};
static std::vector<Value>& values = *new std::vector<Value>{
    {"schedule", kLockstep, {"lockstep", "serial", "reverse", "random"}},
    {"seed", 1},
    {"races", 0, {"False", "True"}},
    {"counters", 0, {"False", "True"}},
    {"copies", 0, {"late", "early"}},
    {"streams", 0, {"now", "late", "late_reversed"}},
    {"multiprocessors", 132, {}, 1, 1000},
    {"devices", 1, {}, 1, 16},
    {"largest_cluster", 16, {}, 1, 16},
    {"capability", 4, {"75", "80", "86", "89", "90", "100", "120"}},
};
u64 setting(Setting s) { return values[s].value; }

static bool set(const std::string& name, const std::string& text) {
  const auto v = std::find_if(values.begin(), values.end(),
                              [&](const Value& each) { return each.name == name; });
  if (v == values.end()) return false;
  const auto word = std::find(v->words.begin(), v->words.end(), text);
  char* end;
  const bool is_word = word != v->words.end();
  const u64 n = is_word ? u64(word - v->words.begin()) : strtoull(text.c_str(), &end, 10);
  if (!is_word && (!v->words.empty() || !isdigit(u8(text[0])) || *end)) return false;
  if (n < v->least || n > v->most) return false;
  v->value = n;
  return true;
}
// Applies settings: name=value,name=value. Returns the first one that is wrong, or "".
static std::string set_all(std::string rest) {
  for (std::string one; !rest.empty(); rest.erase(0, one.size() + 1)) {
    one = rest.substr(0, rest.find(','));
    const size_t name = std::min(one.find('='), one.size() - 1);
    if (!set(one.substr(0, name), one.substr(name + 1))) return one;
  }
  return "";
}
static const bool environment_is_read = [] {
  const char* text = getenv("SOFTGPU_SETTINGS");
  if (const std::string wrong = set_all(text ? text : ""); !wrong.empty())
    fprintf(stderr, "softgpu: no setting %s\n", wrong.c_str());
  return true;
}();

std::map<u64, Range>& ranges = *new std::map<u64, Range>;  // never destroyed
u64 ranges_epoch = 1;
static const u64 kPage = 4096;

const Range* range_of(u64 address) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return nullptr;
  --after;
  return address < after->second.end ? &after->second : nullptr;
}

// An array begins as NaNs, with a guard page before and after it. Variables of modules have no
// guard pages: each guard page counts as a mapping, of which a process may have 65530.
u64 allocate(size_t bytes, int device, bool is_array) {
  const size_t room = (bytes + kPage - 1) / kPage * kPage;
  u8* at = static_cast<u8*>(mmap(nullptr, room + 2 * kPage, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (at == MAP_FAILED) return 0;
  if (is_array) {
    mprotect(at, kPage, PROT_NONE);
    mprotect(at + kPage + room, kPage, PROT_NONE);
    memset(at + kPage, 0xff, bytes);
  }
  at += kPage;
  const u64 begin = reinterpret_cast<u64>(at);
  ranges[begin] = {begin, begin + bytes, device, is_array};
  ++ranges_epoch;
  return begin;
}
static void release(const Range& r) {
  const u64 begin = r.begin, room = (r.end - begin + kPage - 1) / kPage * kPage;
  ranges.erase(begin);
  munmap(reinterpret_cast<void*>(begin - kPage), room + 2 * kPage);
  ++ranges_epoch;
}

static thread_local int device_in_use = 0;
static thread_local bool has_context = false;  // true once a context is made current
int current_device() { return device_in_use; }
void need_context() {
  if (!has_context) throw Error{kInvalidContext, "this thread has no current context"};
}

static void check_device(int device) {
  if (device < 0 || u64(device) >= setting(kDevices))
    throw Error{kInvalidDevice, format("there is no device %d", device)};
}

static int attribute(int number) {
  const Limits& l = limits();
  const std::map<int, int> known = {
      {8, kStaticShared},                    // shared bytes of a block
      {16, int(setting(kMultiprocessors))},  // multiprocessors
      {39, l.threads_per_sm},                // threads of a multiprocessor
      {38, l.l2_bytes},                      // bytes of the L2 cache
      {81, l.shared_per_sm},                 // shared bytes of a multiprocessor
      {97, largest_shared()},                // shared bytes of a block that opts in
      {75, l.capability / 10},               // compute capability
      {76, l.capability % 10},
  };
  auto found = known.find(number);
  if (found == known.end())
    throw Error{kInvalidValue, format("the attribute %d of a device is not known", number)};
  return found->second;
}

}  // namespace sg

using namespace sg;

extern "C" {
// Returns all settings as text.
const char* softgpu_settings() {
  HOLD;
  static thread_local std::string text;
  text.clear();
  for (const Value& v : values)
    text += (text.empty() ? "" : ",") + std::string(v.name) + "=" +
            (v.words.empty() ? std::to_string(v.value) : v.words[v.value]);
  return text.c_str();
}
// Applies settings given as text. Returns whether all are right.
int softgpu_set(const char* text) {
  HOLD;
  return set_all(text).empty();
}
const char* softgpu_error() { return last_error.c_str(); }
int softgpu_finish() { return status_of(finish); }

int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = int(setting(kDevices)), 0; }
int cuDeviceGetName(char* name, int size, int device) {
  return status_of([&] {
    check_device(device);
    snprintf(name, size_t(size), "software GPU (as an NVIDIA %s)", limits().name);
  });
}
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = 141ull << 30, 0; }
int cuDeviceGetAttribute(int* value, int number, int device) {
  return status_of([&] {
    check_device(device);
    *value = attribute(number);
  });
}

// A device has one context. Its handle is the device's number plus one.
int cuDevicePrimaryCtxRetain(u64* context, int device) {
  return status_of([&] {
    check_device(device);
    *context = u64(device) + 1;
  });
}
int cuCtxSetCurrent(u64 context) {
  return status_of([&] {
    check_device(int(context) - 1);
    device_in_use = int(context) - 1;
    has_context = true;
  });
}
// A thread without a context has the first device, as in the CUDA runtime.
int cuCtxGetDevice(int* device) { return *device = device_in_use, 0; }

int cuMemAlloc_v2(u64* address, size_t bytes) {
  return status_of([&] {
    if (bytes == 0) throw Error{kInvalidValue, "no bytes are allocated"};
    *address = allocate(bytes, current_device(), true);
    if (!*address) throw Error{kOutOfMemory, format("%zu bytes are not left", bytes)};
  });
}
// Frees the memory when the stream reaches this call. A later access on any stream is an error.
int cuMemFreeAsync(u64 address, u64 stream) {
  return status_of([&] {
    const auto found = ranges.find(address);
    if (found == ranges.end()) throw Error{kInvalidValue, "what is freed was not allocated"};
    enqueue(stream_of(stream), [range = found->second] { release(range); }, true);
  });
}
int cuPointerGetAttribute(void* out, int attribute, u64 address) {
  return status_of([&] {
    const Range* r = range_of(address);
    if (!r || attribute != 9) throw Error{kInvalidValue, "a pointer to no memory of a device"};
    *static_cast<int*>(out) = r->device;  // 9: CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
  });
}

}  // extern "C"
