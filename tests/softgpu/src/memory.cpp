// SPDX-License-Identifier: MIT
// Resolves addresses; runs loads, stores, and asynchronous copies to shared memory. Copies run in
// order when they are waited for, or at once if the settings say so. An access outside live memory
// is an error.
#include <algorithm>

#include "lanes.h"

namespace sg {
namespace {

using Number = unsigned long long;  // for format

[[noreturn]] void outside(Warp& w, const Instruction& i, int lane, u64 address, u32 bytes,
                          const char* what) {
  const auto after = ranges.upper_bound(address);
  const Range before = after == ranges.begin() ? Range{} : std::prev(after)->second;
  const std::string near = format("; the allocation at 0x%llx ends after %llu bytes",
                                  Number(before.begin), Number(before.end - before.begin));
  fail(w, i, lane, 700,
       format("%s of %u bytes at 0x%llx, outside of any allocation%s", what, bytes, Number(address),
              near.c_str()));
}

u8* global_at(Warp& w, const Instruction& i, int lane, u64 address, u32 bytes, bool write) {
  const char* what = write ? "write" : "read";
  const Range* r = range_of(address);
  if (!r || address + bytes > r->end) outside(w, i, lane, address, bytes, what);
  const int device = running->function->module->device;
  if (r->is_array && r->device != device)
    fail(w, i, lane, 700,
         format("%s of memory of device %d by a kernel on device %d", what, r->device, device));
  if (address % bytes)
    fail(w, i, lane, 716,
         format("%s of %u bytes at 0x%llx, which is misaligned", what, bytes, Number(address)));
  i.begin = r->begin, i.end = r->end, i.epoch = ranges_epoch;
  return reinterpret_cast<u8*>(address);
}

Block& block_of_address(Warp& w, const Instruction& i, int lane, u64 address, Space space) {
  const u32 rank = u32(address >> kRankShift) & 0xff;
  if (rank == 0) return *w.block;
  if (space == kShared && rank - 1 != w.block->rank)
    fail(w, i, lane, 700, "another block's shared memory is not reached by .shared");
  Block& b = w.block->cluster->blocks[rank - 1];
  if (b.live == 0)
    fail(w, i, lane, 700,
         format("the shared memory of block %u of the cluster, which has ended", rank - 1));
  return b;
}

u8* shared_at(Warp& w, const Instruction& i, int lane, u64 address, u32 bytes, Space space) {
  const Block& b = block_of_address(w, i, lane, address, space);
  const u64 offset = address & ((1u << kRankShift) - 1);
  if (offset < u64(kReservedShared) || offset + bytes > b.shared_bytes + kReservedShared ||
      address >> 32)
    fail(w, i, lane, 700,
         format("shared address 0x%llx and %u bytes lie outside of the block's %zu bytes",
                Number(address), bytes, b.shared_bytes));
  if (offset % bytes)
    fail(w, i, lane, 716,
         format("shared address 0x%llx is not a multiple of %u", Number(offset), bytes));
  return b.shared + (offset - kReservedShared);
}

u8* param_at(Warp& w, const Instruction& i, int lane, u64 offset, u32 bytes) {
  const u64 size = running->function->params_size;
  if (offset + bytes > size || offset % bytes)
    fail(w, i, lane, 700,
         format("parameters at 0x%llx: misaligned, or outside of %llu bytes", Number(offset),
                Number(size)));
  return const_cast<u8*>(running->params) + offset;
}

u8* pointer(Warp& w, const Instruction& i, int lane, u64 address, u32 bytes, Space space,
            bool write) {
  if (space == kParam) return param_at(w, i, lane, address, bytes);
  if (space == kShared || space == kSharedCluster)
    return shared_at(w, i, lane, address, bytes, space);
  return global_at(w, i, lane, address, bytes, write);
}

// Computes the pointers. Returns whether all lanes' accesses are aligned and within [begin, end).
bool locate_within(u32 lanes, const u64* addresses, u64 offset, u32 bytes, u64 begin, u64 end,
                   u64 to, Pointers& out) {
  if (end - begin < bytes) return false;
  const u64 last = end - begin - bytes;
  u64 wrong = 0;
  each_lane(lanes, [&](int lane) {
    const u64 address = addresses[lane] + offset;
    wrong |= u64(address - begin > last) | (address & (bytes - 1));
    out.at[lane] = reinterpret_cast<u8*>(address - begin + to);
  });
  return !wrong;
}

}  // namespace

void locate(Warp& w, const Instruction& i, u32 lanes, const u64* addresses, int64_t offset,
            u32 bytes, Space space, AccessKind kind, Pointers& out) {
  bool found = false;
  const Block* const block = w.block;
  if (space == kShared)
    found = locate_within(lanes, addresses, u64(offset), bytes, kReservedShared,
                          kReservedShared + block->shared_bytes,
                          reinterpret_cast<u64>(block->shared), out);
  else if (i.epoch == ranges_epoch)
    found = locate_within(lanes, addresses, u64(offset), bytes, i.begin, i.end, i.begin, out);
  if (!found)
    for_lanes(lanes, [&](int lane) {
      out.at[lane] = pointer(w, i, lane, addresses[lane] + u64(offset), bytes, space,
                             kind != AccessKind::kRead);
    });
  need_waited(w, i, lanes, out.at);
  if (__builtin_expect(running->watch != nullptr, 0)) observe(w, i, lanes, out.at, bytes, kind);
}

namespace {

template <class T>
void load(Warp& w, const Instruction& i, u32 lanes) {
  Pointers p;
  locate(w, i, lanes, w.row(i.source[0]), i.offset, u32(i.elements * sizeof(T)), i.space,
         AccessKind::kRead, p);
  for (int k = 0; k < i.elements; ++k) {
    u64* const dest = w.row(i.dest[k]);
    each_lane(lanes, [&](int lane) {
      T v;
      memcpy(&v, p.at[lane] + k * sizeof(T), sizeof(T));
      dest[lane] = to_bits(v);
    });
  }
}
template <class T>
void store(Warp& w, const Instruction& i, u32 lanes) {
  Pointers p;
  locate(w, i, lanes, w.row(i.source[0]), i.offset, u32(i.elements * sizeof(T)), i.space,
         AccessKind::kWrite, p);
  for (int k = 0; k < i.elements; ++k) {
    const u64* const source = w.row(i.source[1 + k]);
    for_lanes(lanes, [&](int lane) {
      const T v = T(source[lane]);
      memcpy(p.at[lane] + k * sizeof(T), &v, sizeof(T));
    });
  }
}
}  // namespace

Space space_of(const Opcode& op) {
  static const std::map<std::string, Space> names = {
      {"global", kGlobal}, {"shared", kShared}, {"shared::cta", kShared},
      {"const", kConst},   {"param", kParam},   {"shared::cluster", kSharedCluster}};
  for (const std::string& part : op.parts)
    if (const auto found = names.find(part); found != names.end()) return found->second;
  return kNoSpace;
}

namespace {

void copy_now(u8* to, const u64 from, u32 bytes) {
  memcpy(to, reinterpret_cast<const u8*>(from), bytes);
}

// Checks the addresses and records the copies. If copies are early, the data arrive now, but
// reading the data before the wait is still a race.
void begin_copies(Warp& w, const Instruction& i, u32 lanes) {
  const u32 bytes = u32(w.row(i.source[2])[0]);
  const u64 *const to = w.row(i.source[0]), *const from = w.row(i.source[1]);
  Pointers p;
  locate(w, i, lanes, from, 0, bytes, kGlobal, AccessKind::kRead, p);
  locate(w, i, lanes, to, i.offset, bytes, kShared, AccessKind::kCopyBegins, p);
  for_lanes(lanes, [&](int lane) {
    w.copies[lane].open.push_back({to[lane] + u64(i.offset), from[lane], bytes, &i});
    if (running->async_early) copy_now(p.at[lane], from[lane], bytes);
  });
}

void end_copy(Warp& w, int lane, const AsyncCopy& c) {
  u64 address[32];
  Pointers p;
  address[lane] = c.from;
  locate(w, *c.instruction, 1u << lane, address, 0, c.bytes, kGlobal, AccessKind::kCopyReads, p);
  address[lane] = c.to;
  locate(w, *c.instruction, 1u << lane, address, 0, c.bytes, kShared, AccessKind::kCopyEnds, p);
  if (!running->async_early) copy_now(p.at[lane], c.from, c.bytes);
}

void commit_copies(Warp& w, const Instruction&, u32 lanes) {
  for_lanes(lanes, [&](int lane) {
    AsyncCopies& c = w.copies[lane];
    c.groups.push_back(std::move(c.open));
    c.open.clear();
  });
}

void wait_for_groups(Warp& w, const Instruction& i, u32 lanes) {
  const size_t pending = size_t(w.row(i.source[0])[0]);
  for_lanes(lanes, [&](int lane) {
    AsyncCopies& c = w.copies[lane];
    for (; c.groups.size() > pending; c.groups.pop_front())
      for (const AsyncCopy& copy : c.groups.front()) end_copy(w, lane, copy);
  });
}

}  // namespace

bool choose_memory(Instruction& i, const Opcode& op) {
  if (op.has("async")) return choose_send(i, op);
  // Without a state space an address is generic. No instruction makes one of other memory.
  const bool is_generic = op.middle({"volatile", "v2", "v4"}).empty();
  i.space = is_generic ? kGlobal : space_of(op);
  static const std::map<std::string, Operation> loads = {
      {"8", load<u8>},   {"s8", load<int8_t>},   {"16", load<u16>}, {"s16", load<int16_t>},
      {"32", load<u32>}, {"s32", load<int32_t>}, {"64", load<u64>}};
  static const std::map<std::string, Operation> stores = {
      {"8", store<u8>}, {"16", store<u16>}, {"32", store<u32>}, {"64", store<u64>}};
  const std::string& type = op.type();
  const std::string bits = type.substr(std::min(type.find_first_of("0123456789"), type.size()));
  const int elements = op.has("v2") ? 2 : op.has("v4") ? 4 : 1;
  const bool stored = op.base() == "st";
  const auto& table = stored ? stores : loads;
  auto found = table.find(type[0] == 's' && !stored ? type : bits);
  if (found == table.end()) found = table.find(bits);
  if (found == table.end() || elements != i.elements || i.space == kNoSpace) return false;
  if (stored && (i.space == kParam || i.space == kConst)) return false;
  i.run = found->second;
  return true;
}

// A prefetch does not count as an access, but prefetching memory that is not allocated is an error.
bool choose_prefetch(Instruction& i, const Opcode& op) {
  i.run = [](Warp& w, const Instruction& i, u32 lanes) {
    Pointers p;
    for_lanes(lanes, [&](int lane) {
      p.at[lane] = global_at(w, i, lane, w.row(i.source[0])[lane] + u64(i.offset), 1, false);
    });
    need_waited(w, i, lanes, p.at);
  };
  return op.has("global") && op.has("L2");
}

bool choose_async_copy(Instruction& i, const Opcode& op) {
  if (!op.has("async") || op.has("bulk") || op.has("L2::cache_hint")) return false;
  i.run = op.has("commit_group") && i.sources == 0  ? commit_copies
          : op.has("wait_group") && i.sources == 1  ? wait_for_groups
          : op.type() == "global" && i.sources == 3 ? begin_copies
                                                    : nullptr;
  return i.run != nullptr;
}

}  // namespace sg
