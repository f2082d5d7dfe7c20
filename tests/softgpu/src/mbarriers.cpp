// SPDX-License-Identifier: MIT
// Barriers in shared memory, and asynchronous stores between the blocks of a cluster. A barrier of
// the receiving block counts the bytes of the stores.
#include <algorithm>

#include "lanes.h"

namespace sg {
namespace {

// Returns the barrier at an address, a new one for kWrite. The state of barriers is not kept in
// shared memory, because PTX does not define how an mbarrier is stored.
Mbarrier& mbarrier_at(Warp& w, const Instruction& i, int lane, u64 address, Space space,
                      AccessKind kind, Block** owner = nullptr) {
  u64 addresses[32];
  Pointers p;
  addresses[lane] = address;
  locate(w, i, 1u << lane, addresses, 0, 8, space, kind, p);
  for (Block& b : w.block->cluster->blocks) {
    const u64 offset = u64(p.at[lane] - b.shared);
    if (offset >= b.shared_bytes) continue;
    if (owner) *owner = &b;
    if (kind == AccessKind::kWrite) return b.mbarriers[offset] = {};
    if (const auto found = b.mbarriers.find(offset); found != b.mbarriers.end())
      return found->second;
  }
  fail(w, i, lane, 719, "no mbarrier is initialized at this address");
}
u64 address_in(Warp& w, const Instruction& i, int lane) {
  return w.row(i.source[0])[lane] + u64(i.offset);
}

// Ends the phase if all threads and bytes have arrived. Waiting threads then see the sent data.
void check_phase(Block& b, Mbarrier& m) {
  if (m.pending || m.bytes) return;
  for (const Message& message : m.messages) {
    memcpy(message.to, &message.value, message.bytes);
    if (running->watch) end_message(*b.watched, reinterpret_cast<u64>(message.to), message.bytes);
  }
  m.messages.clear();
  m.pending = m.count;
  ++m.phase;
  if (running->watch) m.clock = m.sync.end();
  for (Warp& w : b.warps)
    for_lanes(lanes_in(w, State::kAtMbarrier), [&](int lane) {
      if (w.mbarrier[lane] != &m) return;
      w.state[lane] = State::kRuns;
      m.is_waited_for = true;
      if (running->watch) join_clock(w, lane, m.clock);
    });
}

void begin(Warp& w, const Instruction& i, u32 lanes) {
  for_lanes(lanes, [&](int lane) {
    Mbarrier& m = mbarrier_at(w, i, lane, address_in(w, i, lane), i.space, AccessKind::kWrite);
    m.pending = m.count = int(w.row(i.source[1])[lane]);
  });
}

void arrive(Warp& w, const Instruction& i, u32 lanes) {
  for_lanes(lanes, [&](int lane) {
    Block* owner;
    Mbarrier& m =
        mbarrier_at(w, i, lane, address_in(w, i, lane), i.space, AccessKind::kSynchronizes, &owner);
    if (m.pending == 0) fail(w, i, lane, 719, "an mbarrier gets more arrivals than its count");
    --m.pending;
    m.bytes += i.sources > 1 ? int(w.row(i.source[1])[lane]) : 0;
    if (running->watch) m.sync.arrive(w, lane);
    check_phase(*owner, m);
  });
}

// The data arrive when the phase ends, or at once if copies are early.
void send(Warp& w, const Instruction& i, u32 lanes) {
  Pointers p;
  const u32 bytes = i.elements * i.bytes;
  locate(w, i, lanes, w.row(i.source[0]), i.offset, bytes, i.space, AccessKind::kCopyBegins, p);
  for_lanes(lanes, [&](int lane) {
    Block* owner;
    Mbarrier& m = mbarrier_at(w, i, lane, w.row(i.source[i.sources - 1])[lane], i.space,
                              AccessKind::kSynchronizes, &owner);
    if (u64(p.at[lane] - owner->shared) >= owner->shared_bytes)
      fail(w, i, lane, 719, "the mbarrier is not in the block to which the data are sent");
    for (int k = 0; k < i.elements; ++k) {
      u8* const to = p.at[lane] + k * i.bytes;
      m.messages.push_back({to, i.bytes, w.row(i.source[1 + k])[lane]});
      if (running->async_early) memcpy(to, &m.messages.back().value, i.bytes);
    }
    m.bytes -= int(bytes);
    m.is_waited_for = false;
    if (running->watch) m.sync.arrive(w, lane);
    check_phase(*owner, m);
  });
}

// The fence itself orders nothing: the cluster's next barrier makes the mbarriers visible.
void publish(Warp& w, const Instruction&, u32 lanes) { w.published |= lanes; }

}  // namespace

// try_wait waits until the phase has ended, without a time limit.
void wait_at_mbarrier(Warp& w, const Instruction& i, u32 lanes) {
  for_lanes(lanes, [&](int lane) {
    Mbarrier& m =
        mbarrier_at(w, i, lane, address_in(w, i, lane), i.space, AccessKind::kSynchronizes);
    w.row(i.dest[0])[lane] = 1;
    if (m.phase % 2 != (w.row(i.source[1])[lane] & 1)) {
      m.is_waited_for |= m.messages.empty();
      if (running->watch) join_clock(w, lane, m.clock);
    } else {
      w.state[lane] = State::kAtMbarrier;
      w.mbarrier[lane] = &m;
    }
  });
}

void check_messages(Warp& w, const Instruction& i, u32 lanes) {
  for (const auto& [offset, m] : w.block->mbarriers)
    if (!m.is_waited_for)
      fail(w, i, __builtin_ctz(lanes), 719, "a block ends without waiting for what is sent to it");
}

bool choose_mbarrier(Instruction& i, const Opcode& op) {
  i.space = space_of(op);
  if (i.space != kShared || op.type() != "b64") return false;
  if (op.has("try_wait") && op.has("parity")) {
    i.kind = kMbarrierWait;
    return i.sources >= 2;
  }
  i.run = op.has("init") && i.sources == 2 ? begin
          : op.has("arrive") && i.sources == 1 + op.has("expect_tx") && !i.dest[0] &&
                  !op.has("noComplete")
              ? arrive
              : nullptr;
  return i.run != nullptr;
}

bool choose_send(Instruction& i, const Opcode& op) {
  i.space = space_of(op);
  i.bytes = u8(atoi(op.type().c_str() + 1) / 8);
  i.run = send;
  const int elements = op.has("v4") ? 4 : op.has("v2") ? 2 : 1;
  return i.space == kSharedCluster && op.has("mbarrier::complete_tx::bytes") &&
         i.elements == elements && (i.bytes == 4 || i.bytes == 8);
}

// Other fences than mbarrier_init do nothing, because memory is accessed in order here.
bool choose_fence(Instruction& i, const Opcode& op) {
  i.run = op.has("mbarrier_init") ? publish : [](Warp&, const Instruction&, u32) {};
  return true;
}

}  // namespace sg
