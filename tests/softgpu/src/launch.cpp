// SPDX-License-Identifier: MIT
// Launches: the threads' state at the beginning, clusters one after the other.
#include <time.h>

#include <algorithm>

#include "special_registers.h"
#include "threads.h"

namespace sg {

thread_local Running* running = nullptr;

std::string place_of(const Warp& w, int lane) {
  const Launch& l = running->launch;
  const unsigned t = unsigned(w.first_thread + lane);
  const unsigned* const id = w.block->id;
  return format("kernel %s, block (%u,%u,%u) of (%u,%u,%u), thread (%u,%u,%u) of (%u,%u,%u)",
                running->function->name.c_str(), id[0], id[1], id[2], l.grid[0], l.grid[1],
                l.grid[2], t % l.block[0], t / l.block[0] % l.block[1], t / l.block[0] / l.block[1],
                l.block[0], l.block[1], l.block[2]);
}

Error error_at(const Warp& w, const Instruction& i, int lane, int code, const std::string& what) {
  return {code, format("%s: %s\n  PTX line %d: %s", place_of(w, lane).c_str(), what.c_str(), i.line,
                       running->function->module->line(i.line).c_str())};
}
void fail(const Warp& w, const Instruction& i, int lane, int code, const std::string& what) {
  throw error_at(w, i, lane, code, what);
}

namespace {

u64 product(const unsigned v[3]) { return u64(v[0]) * v[1] * v[2]; }

void make_warp(Block& b, int first_thread, int threads) {
  Function& f = *running->function;
  Warp& w = b.warps.emplace_back();
  w.block = &b;
  w.function = &f;
  w.first_thread = first_thread;
  const int left = threads - first_thread;
  w.lanes = left >= 32 ? 0xffffffffu : (1u << left) - 1;
  w.registers.assign(size_t(f.rows) * 32, 0xfff7dead7ff7deadull);
  w.local.resize(size_t(f.local) * 32);
  for (const auto& [row, value] : f.constants) std::fill_n(w.row(row), 32, value);
}

Cluster make_cluster() {
  Cluster c;
  const Function& f = *running->function;
  const int threads = int(product(running->launch.block));
  const u32 dynamic = running->launch.dynamic_shared;
  for (u64 k = 0; k < product(running->cluster); ++k) {
    Block& b = c.blocks.emplace_back();
    b.rank = unsigned(k);
    b.shared_bytes = round_up(size_t(f.static_shared), dynamic ? 16 : 1) + dynamic;
    b.storage.resize(b.shared_bytes + Page::kBytes);
    b.shared = b.storage.data();
    b.shared +=
        round_up(reinterpret_cast<u64>(b.shared), Page::kBytes) - reinterpret_cast<u64>(b.shared);
    for (int first = 0; first < threads; first += 32) make_warp(b, first, threads);
  }
  return c;
}

void start_warp(Warp& w) {
  w.live = w.lanes;
  w.rotate = false;
  std::fill(w.local.begin(), w.local.end(), 0xff);
  for (int lane = 0; lane < 32; ++lane) {
    w.pc[lane] = 0;
    w.state[lane] = w.lanes >> lane & 1 ? State::kRuns : State::kEnded;
    w.cluster_phase[lane] = 0;
    w.copies[lane] = {};
    w.clock[lane] = {};
  }
  set_special_registers(w);
}

// Shared and local memory begin as NaNs.
void start_cluster(Cluster& c, u64 number) {
  const Launch& l = running->launch;
  const unsigned* const size = running->cluster;
  c.number = number;
  c.live = int(product(l.block) * c.blocks.size());
  c.arrived = 0, c.phase = 0;
  c.meeting = {}, c.met = nullptr;
  const u64 across = l.grid[0] / size[0], down = l.grid[1] / size[1];
  const unsigned id[3] = {unsigned(number % across), unsigned(number / across % down),
                          unsigned(number / across / down)};
  for (Block& b : c.blocks) {
    b.cluster = &c;
    b.id[0] = id[0] * size[0] + b.rank % size[0];
    b.id[1] = id[1] * size[1] + b.rank / size[0] % size[1];
    b.id[2] = id[2] * size[2] + b.rank / size[0] / size[1];
    b.live = int(product(l.block));
    std::fill_n(b.shared, b.shared_bytes, 0xff);
    for (Barrier& barrier : b.barriers) barrier = {};
    for (Warp& w : b.warps) start_warp(w);
  }
  if (running->watch) watch_cluster(*running->watch, c);
}

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

void run_grid() {
  const Launch& l = running->launch;
  const Schedule schedule = schedule_named(settings().schedule);
  Cluster c = make_cluster();
  const u64 clusters = product(l.grid) / c.blocks.size();
  for (u64 k = 0; k < clusters; ++k) {
    start_cluster(c, schedule == Schedule::kReverse ? clusters - 1 - k : k);
    run_cluster(c, schedule);
    if (running->watch && !running->watch->unwritten.text.empty()) throw running->watch->unwritten;
  }
}

}  // namespace

void launch(Function* f, const Launch& l, const u8* params, size_t size) {
  Running now{f, l, params, size};
  for (int k = 0; k < 3; ++k) now.cluster[k] = std::max(f->cluster[k], 1u);
  now.async_early = settings().async_early;
  now.random = settings().seed * 0x9E3779B97F4A7C15ull | 1;
  const auto watch = start_watch(u32(product(l.block) * product(now.cluster)));
  now.watch = watch.get();
  const double begun = seconds();
  running = &now;
  run_grid();
  if (watch) keep_counts(*watch);
  if (settings().stats)
    say("%s: %llu blocks of %llu threads, %d registers, %llu warp instructions, %.3f s",
        f->name.c_str(), (unsigned long long)product(l.grid), (unsigned long long)product(l.block),
        f->rows, (unsigned long long)now.issued, seconds() - begun);
}

}  // namespace sg
