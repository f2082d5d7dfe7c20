// SPDX-License-Identifier: MIT
// Finds what addresses point at, loads and stores. Whatever is not in live memory is an error.
#include <algorithm>

#include "lanes.h"

namespace sg {
namespace {

using Number = unsigned long long;  // for format

[[noreturn]] void outside(Warp& w, const Instruction& i, int lane, u64 address, u32 bytes,
                          const char* what) {
  const Range* range = range_of(address);
  std::string near;
  if (range) {
    near = format("; the allocation at 0x%llx ends after %llu bytes", Number(range->begin),
                  Number(range->end - range->begin));
  } else {
    for (u64 back = 1; !range && back < 65536; back *= 2) range = range_of(address - back);
    if (range)
      near = format("; 0x%llx ends before it, after %llu bytes", Number(range->begin),
                    Number(range->end - range->begin));
  }
  fail(w, i, lane, 700,
       format("%s of %u bytes at 0x%llx, outside of any allocation%s", what, bytes, Number(address),
              near.c_str()));
}

u8* global_at(Warp& w, const Instruction& i, int lane, u64 address, u32 bytes, bool write) {
  const char* what = write ? "write" : "read";
  const Range* r = range_of(address);
  if (!r || address + bytes > r->end) outside(w, i, lane, address, bytes, what);
  const int device = running->function->module->device;
  if (r->kind == 0 && r->device != device)
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

u8* private_at(Warp& w, const Instruction& i, int lane, u64 offset, u32 bytes, bool param,
               bool write) {
  const u64 size = param ? running->params_size : u64(running->function->local);
  const char* what = param ? "parameters" : "local memory";
  if (param && write) fail(w, i, lane, 700, "a kernel's parameter is written");
  if (offset + bytes > size)
    fail(w, i, lane, 700,
         format("%s at 0x%llx, outside of %llu bytes", what, Number(offset), Number(size)));
  if (offset % bytes)
    fail(w, i, lane, 716, format("%s at 0x%llx, which is misaligned", what, Number(offset)));
  return (param ? const_cast<u8*>(running->params) : w.local.data() + size * u64(lane)) + offset;
}

u8* pointer(Warp& w, const Instruction& i, int lane, u64 address, u32 bytes, Space space,
            bool write) {
  const u64 window = address & kWindowBits, rest = address & ~kWindowBits;
  if (space == kGlobal || space == kConst || (space == kGeneric && window == 0))
    return global_at(w, i, lane, address, bytes, write);
  if (space == kShared || space == kSharedCluster || (space == kGeneric && window == kSharedWindow))
    return shared_at(w, i, lane, rest, bytes, space == kShared ? kShared : kSharedCluster);
  return private_at(w, i, lane, rest, bytes, window == kParamWindow, write);
}

// Whether all lanes access what lies in [begin, end); if so, where that is.
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

Space space_of(const Opcode& op, Space of_symbol) {
  static const std::map<std::string, Space> names = {
      {"global", kGlobal},      {"shared", kShared},
      {"shared::cta", kShared}, {"shared::cluster", kSharedCluster},
      {"local", kLocal},        {"const", kConst},
      {"param", kParam},        {"param::entry", kParam},
      {"param::func", kParam}};
  for (const std::string& part : op.parts) {
    const auto found = names.find(part);
    // A called function's parameters are local memory.
    if (found != names.end())
      return found->second == kParam && of_symbol == kLocal ? kLocal : found->second;
  }
  return kGeneric;
}

}  // namespace

bool choose_memory(Instruction& i, const Opcode& op) {
  i.space = space_of(op, i.space);
  static const std::map<std::string, Operation> signed_loads = {
      {"s8", load<int8_t>}, {"s16", load<int16_t>}, {"s32", load<int32_t>}};
  static const std::map<int, std::pair<Operation, Operation>> by_bits = {
      {8, {load<u8>, store<u8>}},
      {16, {load<u16>, store<u16>}},
      {32, {load<u32>, store<u32>}},
      {64, {load<u64>, store<u64>}}};
  const std::string& type = op.type();
  const int bits = atoi(type.c_str() + std::min(type.find_first_of("0123456789"), type.size()));
  const auto found = by_bits.find(bits);
  const int elements = op.has("v2") ? 2 : op.has("v4") ? 4 : op.has("v8") ? 8 : 1;
  if (found == by_bits.end() || elements != i.elements) return false;
  i.bytes = u8(bits / 8);
  const auto special = signed_loads.find(type);
  if (op.base() == "st")
    i.run = found->second.second;
  else
    i.run = special != signed_loads.end() ? special->second : found->second.first;
  return true;
}

}  // namespace sg
