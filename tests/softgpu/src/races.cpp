// SPDX-License-Identifier: MIT
// Finds races with vector clocks. In a race, two threads access the same memory, at least one of
// them writes, and nothing orders them. Barriers order the threads that arrive. Blocks of different
// clusters are unordered. Races are found in any thread order.
#include <algorithm>

#include "threads.h"

namespace sg {
namespace {

u32 thread_in_cluster(const Warp& w, int lane) {
  return w.block->rank * running->launch.block + u32(w.first_thread + lane);
}

// The join of two clocks: the later epoch of each thread.
Clock joined(const Clock& a, const Clock& b) {
  if (!a || !b || a == b) return a ? a : b;
  auto out = std::make_shared<std::vector<u32>>(*a);
  for (size_t k = 0; k < out->size(); ++k) (*out)[k] = std::max((*out)[k], (*b)[k]);
  return out;
}

struct Checked {
  Warp& w;
  const Instruction& i;
  int lane;
  const Watched& memory;
  Access now;

  bool ordered(const Access& then) const {
    if (then.epoch == 0) return true;
    if (then.copying) return false;
    if (then.atomic && now.atomic) return true;
    if (then.cluster != now.cluster) return false;
    if (then.thread == now.thread) return true;
    const Clock& seen = w.clock[lane].seen;
    return seen && (*seen)[then.thread] >= then.epoch;
  }
  [[noreturn]] void race(const Access& then, const char* what) const;
  void check(const Access& then, const char* what) const {
    if (!ordered(then)) race(then, what);
  }
  void read(Cell&) const;
  void write(Cell&) const;
  void keep_read(Cell&) const;
  void keep_many(Cell&) const;
  void end_copy(Cell&) const;
};

void Checked::race(const Access& then, const char* what) const {
  const u32 threads = running->launch.block, blocks = running->function->cluster;
  const Module& m = *running->function->module;
  fail(w, i, lane, 719,
       format("a race for %s memory with thread %u of block %u, which %s there at PTX line %u: %s",
              memory.shared ? "shared" : "global", then.thread % threads,
              (then.cluster - 1) * blocks + then.thread / threads,
              then.copying ? "still copies" : what, then.line, m.line(int(then.line)).c_str()));
}

// Records each reader of the cell separately from now on.
void Checked::keep_many(Cell& c) const {
  Watch& watch = *running->watch;
  if (!c.readers) {
    c.readers = u32(watch.readers_used++);
    if (c.readers == watch.readers.size()) watch.readers.emplace_back();
    watch.readers[c.readers].assign(watch.cluster_threads, {});
    watch.readers[c.readers][c.read.thread] = {c.read.epoch, c.read.line};
  }
  watch.readers[c.readers][now.thread] = {now.epoch, now.line};
}

void Checked::keep_read(Cell& c) const {
  if (c.read.epoch && c.read.cluster != now.cluster) {
    c.foreign_read = c.read;
    c.readers = 0;
    c.read = now;
  } else if (!c.readers && (c.read.epoch == 0 || c.read.thread == now.thread || ordered(c.read))) {
    c.read = now;
  } else {
    keep_many(c);
  }
}

void Checked::read(Cell& c) const {
  check(c.write, "wrote");
  Error& unwritten = running->watch->unwritten;
  if (memory.shared && c.write.epoch == 0 && unwritten.text.empty())
    unwritten = error_at(w, i, lane, 719, "shared memory is read that nothing has written");
  keep_read(c);
}

void Checked::write(Cell& c) const {
  check(c.write, "wrote");
  check(c.read, "read");
  check(c.foreign_read, "read");
  if (c.readers && c.read.cluster == now.cluster) {
    const std::vector<ReadBy>& all = running->watch->readers[c.readers];
    for (u32 k = 0; k < all.size(); ++k)
      check({all[k].epoch, all[k].line, now.cluster, u16(k)}, "read");
  }
  c.write = now;
  c.read = c.foreign_read = {};
  c.readers = 0;
}

// The copy's write becomes a write of its thread, so that others may read it after a barrier.
void Checked::end_copy(Cell& c) const {
  if (c.write.copying && c.write.thread == now.thread) c.write = now;
}

// Splits the cells of a page into smaller ones.
void divide(Page& page, u32 bytes) {
  const u32 parts = page.cell_bytes ? page.cell_bytes / bytes : 0;
  std::vector<Cell> cells(Page::kBytes / bytes);
  if (parts)
    for (size_t k = 0; k < cells.size(); ++k) cells[k] = page.cells[k / parts];
  page.cells.swap(cells);
  page.cell_bytes = bytes;
}

Page& page_of(Watched& memory, u64 address, u32 bytes) {
  const u64 first = memory.begin / Page::kBytes;
  if (memory.pages.empty()) memory.pages.resize(memory.end / Page::kBytes - first + 1);
  std::unique_ptr<Page>& page = memory.pages[address / Page::kBytes - first];
  if (!page) page = std::make_unique<Page>();
  // Each cluster reuses the same shared memory.
  if (memory.shared && page->cluster != running->watch->cluster) {
    page->cluster = running->watch->cluster;
    std::fill(page->cells.begin(), page->cells.end(), Cell{});
  }
  if (page->cell_bytes == 0 || bytes < page->cell_bytes) divide(*page, bytes);
  return *page;
}

}  // namespace

void SyncPoint::arrive(Warp& w, int lane) {
  if (!running->watch->races) return;
  ThreadClock& clock = w.clock[lane];
  arrived.push_back({thread_in_cluster(w, lane), clock.epoch++});
  if (clock.seen && (seen.empty() || seen.back() != clock.seen)) seen.push_back(clock.seen);
}

Clock SyncPoint::end() {
  if (!running->watch->races) return nullptr;
  Clock before;
  for (const Clock& clock : seen) before = joined(before, clock);
  auto all = before ? std::make_shared<std::vector<u32>>(*before)
                    : std::make_shared<std::vector<u32>>(running->watch->cluster_threads);
  for (const auto& [thread, epoch] : arrived) (*all)[thread] = epoch;
  seen.clear();
  arrived.clear();
  return all;
}

void set_clock(Warp& w, int lane, const Clock& clock) {
  if (running->watch->races) w.clock[lane].seen = clock;
}

void join_clock(Warp& w, int lane, const Clock& clock) {
  if (!running->watch->races) return;
  // Many threads have the same clock, so the last join is cached.
  static thread_local Clock last_seen, last_clock, last_joined;
  Clock& seen = w.clock[lane].seen;
  if (seen != last_seen || clock != last_clock) {
    last_seen = seen, last_clock = clock;
    last_joined = joined(seen, clock);
  }
  seen = last_joined;
}

void check_races(Warp& w, const Instruction& i, int lane, Watched& memory, u64 address, u32 bytes,
                 AccessKind kind) {
  Page& page = page_of(memory, address, bytes);
  Access now{w.clock[lane].epoch, u32(i.line), running->watch->cluster,
             u16(thread_in_cluster(w, lane))};
  now.atomic = kind == AccessKind::kSynchronizes;
  now.copying = kind == AccessKind::kCopyBegins;
  const Checked access{w, i, lane, memory, now};
  const u64 first = address % Page::kBytes / page.cell_bytes;
  for (u64 k = first; k < first + bytes / page.cell_bytes; ++k) {
    Cell& c = page.cells[k];
    if (kind == AccessKind::kRead || kind == AccessKind::kCopyReads)
      access.read(c);
    else if (kind == AccessKind::kCopyEnds)
      access.end_copy(c);
    else
      access.write(c);
  }
}

void end_message(Watched& memory, u64 address, u32 bytes) {
  if (!running->watch->races) return;
  Page& page = page_of(memory, address, bytes);
  const u64 first = address % Page::kBytes / page.cell_bytes;
  for (u64 k = first; k < first + bytes / page.cell_bytes; ++k) page.cells[k].write.copying = false;
}

}  // namespace sg
