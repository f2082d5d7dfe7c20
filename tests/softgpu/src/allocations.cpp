// SPDX-License-Identifier: MIT
// Device memory: memory of the process, of which it is known what is allocated.
#include <string.h>
#include <sys/mman.h>

#include <algorithm>

#include "host.h"

namespace sg {

std::map<u64, Range>& ranges = *new std::map<u64, Range>;  // never destroyed
u64 ranges_epoch = 1;
static const u64 kMemory = 141ull << 30, kPage = 4096;
static u64 used_bytes[64];

const Range* range_of(u64 address) {
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return nullptr;
  --after;
  return address < after->second.end ? &after->second : nullptr;
}

static size_t pages(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
}

// Memory has a page before and after it that nobody may touch, and begins as NaNs.
u64 allocate(size_t bytes, int device, int kind) {
  const size_t room = pages(bytes);
  u8* at = static_cast<u8*>(mmap(nullptr, room + 2 * kPage, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (at == MAP_FAILED) return 0;
  mprotect(at, kPage, PROT_NONE);
  mprotect(at + kPage + room, kPage, PROT_NONE);
  at += kPage;
  if (kind == 0) memset(at, 0xff, bytes);
  const u64 begin = reinterpret_cast<u64>(at);
  ranges[begin] = {begin, begin + bytes, device, kind};
  used_bytes[device] += bytes;
  ++ranges_epoch;
  return begin;
}
bool release(u64 address) {
  auto found = ranges.find(address);
  if (found == ranges.end()) return false;
  const size_t bytes = found->second.end - address;
  munmap(reinterpret_cast<void*>(address - kPage), pages(bytes) + 2 * kPage);
  used_bytes[found->second.device] -= bytes;
  ranges.erase(found);
  ++ranges_epoch;
  return true;
}

}  // namespace sg

using namespace sg;

extern "C" {

int cuMemGetInfo_v2(size_t* left, size_t* all) {
  return answer([&] {
    *all = kMemory;
    *left = kMemory - used_bytes[current_device()];
  });
}
int cuMemAlloc_v2(u64* address, size_t bytes) {
  return answer([&] {
    const int device = current_device();
    if (bytes == 0) throw Error{kInvalidValue, "no bytes are allocated"};
    if (used_bytes[device] + bytes <= kMemory) *address = allocate(bytes, device, 0);
    if (!*address) throw Error{kOutOfMemory, format("%zu bytes are not left", bytes)};
  });
}
// The memory is gone when the stream comes to it: who uses it later, or elsewhere, is found out.
int cuMemFreeAsync(u64 address, u64 stream) {
  return answer([&] {
    auto found = ranges.find(address);
    if (found == ranges.end()) throw Error{kInvalidValue, "what is freed was not allocated"};
    give(stream_of(stream), [address] { release(address); }, true);
  });
}
int cuPointerGetAttribute(void* out, int attribute, u64 address) {
  return answer([&] {
    const Range* r = range_of(address);
    if (!r || attribute != 9) throw Error{kInvalidValue, "a pointer to no memory of a device"};
    *static_cast<int*>(out) = r->device;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
  });
}

}  // extern "C"
