// SPDX-License-Identifier: MIT
// Modules and kernels, checks of launches, and the initial state of threads.
#include <algorithm>

#include "host.h"
#include "threads.h"

namespace sg {

thread_local Running* running = nullptr;

std::string place_of(const Warp& w, int lane) {
  return format("kernel %s, block %u of %u, thread %d of %u", running->function->name.c_str(),
                w.block->id, running->launch.grid, w.first_thread + lane, running->launch.block);
}

Error error_at(const Warp& w, const Instruction& i, int lane, int code, const std::string& what) {
  return {code, format("%s: %s\n  PTX line %d: %s", place_of(w, lane).c_str(), what.c_str(), i.line,
                       running->function->module->line(i.line).c_str())};
}
void fail(const Warp& w, const Instruction& i, int lane, int code, const std::string& what) {
  throw error_at(w, i, lane, code, what);
}

namespace {

void make_warp(Block& b, int first_thread, int threads) {
  Function& f = *running->function;
  Warp& w = b.warps.emplace_back();
  w.block = &b;
  w.function = &f;
  w.first_thread = first_thread;
  const int left = threads - first_thread;
  w.lanes = left >= 32 ? 0xffffffffu : (1u << left) - 1;
  w.registers.assign(size_t(f.rows) * 32, 0xfff7dead7ff7deadull);
  for (const auto& [row, value] : f.constants) std::fill_n(w.row(row), 32, value);
}

Cluster make_cluster() {
  Cluster c;
  const int threads = int(running->launch.block);
  for (unsigned rank = 0; rank < running->function->cluster; ++rank) {
    Block& b = c.blocks.emplace_back();
    b.rank = rank;
    const unsigned dynamic = running->launch.dynamic_shared;
    b.shared_bytes = round_up(size_t(running->function->shared), dynamic ? 16 : 1) + dynamic;
    b.storage.resize(b.shared_bytes + Page::kBytes);
    const u64 begin = reinterpret_cast<u64>(b.storage.data());
    b.shared = b.storage.data() + (round_up(begin, Page::kBytes) - begin);
    for (int first = 0; first < threads; first += 32) make_warp(b, first, threads);
  }
  return c;
}

void start_warp(Warp& w) {
  w.live = w.lanes;
  w.rotate = false;
  w.published = 0;
  w.waited = 0;
  for (int lane = 0; lane < 32; ++lane) {
    w.pc[lane] = 0;
    w.state[lane] = w.lanes >> lane & 1 ? State::kRuns : State::kEnded;
    w.cluster_phase[lane] = 0;
    w.copies[lane] = {};
    w.clock[lane] = {};
    for (const Special& s : w.function->specials) w.row(s.row)[lane] = s.value(w, lane);
  }
}

// Sets the initial state of a cluster. Shared memory begins as NaNs.
void start_cluster(Cluster& c, u64 number) {
  const int threads = int(running->launch.block);
  c.number = number;
  c.live = threads * int(c.blocks.size());
  c.arrived = 0, c.phase = 0;
  c.sync = {}, c.clock = nullptr;
  for (Block& b : c.blocks) {
    b.cluster = &c;
    b.id = unsigned(number * c.blocks.size()) + b.rank;
    b.live = threads;
    b.arrived = 0, b.sync = {};
    b.mbarriers.clear();
    std::fill_n(b.shared, b.shared_bytes, 0xff);
    for (Warp& w : b.warps) start_warp(w);
  }
  if (running->watch) watch_cluster(*running->watch, c);
}

void run_grid() {
  Cluster c = make_cluster();
  const u64 clusters = running->launch.grid / c.blocks.size();
  const bool backwards = setting(kSchedule) == kReverse;
  for (u64 k = 0; k < clusters; ++k) {
    start_cluster(c, backwards ? clusters - 1 - k : k);
    run_cluster(c);
    if (running->watch && !running->watch->unwritten.text.empty()) throw running->watch->unwritten;
  }
}

// Checks what a GPU rejects when a launch is enqueued, before the stream reaches it.
void check_launch(const Function& f, const Launch& l) {
  const char* name = f.name.c_str();
  if (!l.grid || l.grid > 0x7fffffffu || l.grid % f.cluster)
    throw Error{kInvalidValue,
                format("%s: a grid of %u blocks, in clusters of %u", name, l.grid, f.cluster)};
  if (!l.block || l.block > kThreadsPerBlock || (f.max_threads && l.block > u32(f.max_threads)))
    throw Error{kInvalidValue, format("%s: a block of %u threads, compiled for at most %d", name,
                                      l.block, f.max_threads)};
  if (l.dynamic_shared > u32(f.max_dynamic))
    throw Error{kInvalidValue, format("%s: %u bytes of dynamic and %d of static shared memory",
                                      name, l.dynamic_shared, f.shared)};
  if (f.cluster > 1 && limits().capability < 90)
    throw Error{kNotPermitted, format("%s: clusters need compute capability 9.0", name)};
  if (f.cluster > 16 || (f.cluster > 8 && !f.nonportable))
    throw Error{kInvalidCluster, format("%s: clusters of %u blocks", name, f.cluster)};
}

int blocks_per_multiprocessor(const Function& f, int threads, unsigned dynamic_shared) {
  const Limits& l = limits();
  const int shared = f.shared + int(dynamic_shared) + l.reserved_shared;
  const int warps = (threads + 31) / 32;
  const int fits = shared ? l.shared_per_sm / shared : l.blocks_per_sm;
  return std::min({l.threads_per_sm / (32 * warps), l.blocks_per_sm, fits});
}

}  // namespace

void launch(Function* f, const Launch& l, const u8* params) {
  Running now{f, l, params};
  now.async_early = setting(kCopiesAreEarly);
  now.random = setting(kSeed) * 0x9E3779B97F4A7C15ull | 1;
  const auto watch = start_watch(l.block * f->cluster);
  now.watch = watch.get();
  running = &now;
  run_grid();
  if (watch) keep_counts(*watch);
}

}  // namespace sg

using namespace sg;

// Checks a launch, copies its parameters and enqueues it. `values` has a pointer to each parameter.
static void enqueue_launch(Function* f, const Launch& l, u64 handle, void** values) {
  check_launch(*f, l);
  if (f->cluster > setting(kLargestCluster))
    throw Error{kInvalidCluster,
                format("%s: no room for a cluster of %u blocks", f->name.c_str(), f->cluster)};
  Stream& stream = stream_of(handle);
  if (stream.device != f->module->device)
    throw Error{kInvalidHandle, format("%s is loaded on device %d, the stream is of device %d",
                                       f->name.c_str(), f->module->device, stream.device)};
  auto bytes = std::make_shared<std::vector<u8>>(f->params_size + 64, u8(0xcd));
  for (size_t i = 0; i < f->params.size(); ++i)
    memcpy(bytes->data() + f->params[i].offset, values[i], f->params[i].size);
  enqueue(stream, [=] { launch(f, l, bytes->data()); });
}

// Runs a call. It fails if the thread has no context: the runtime creates one, the driver does not.
template <class Work>
int with_context(Work work) {
  return status_of([&] {
    need_context();
    work();
  });
}

extern "C" {

int cuModuleLoadData(Module** m, const char* ptx) {
  return with_context([&] {
    const std::string text = ptx, target = ".target sm_";
    const size_t at = text.find(target);  // "sm_90a" in a line that begins with ".target"
    if (at == text.npos) throw Error{kInvalidImage, "a module is not the text of PTX"};
    const int capability = atoi(ptx + at + target.size());
    if (capability > limits().capability)
      throw Error{kNoBinary, format("PTX for sm_%d", capability)};
    *m = load_module(text, current_device(), capability);
  });
}
int cuModuleGetFunction(Function** f, Module* m, const char* name) {
  return with_context([&] {
    const auto found = m->kernels.find(name);
    if (found == m->kernels.end()) throw Error{kNotFound, format("there is no kernel %s", name)};
    *f = found->second.get();
  });
}
int cuModuleGetGlobal_v2(u64* address, size_t* bytes, Module* m, const char* name) {
  return with_context([&] {
    const auto found = m->variables.find(name);
    if (found == m->variables.end())
      throw Error{kNotFound, format("there is no variable %s", name)};
    *address = found->second.address;
    *bytes = found->second.bytes;
  });
}
int cuFuncGetModule(Module** m, Function* f) {
  return with_context([&] { *m = f->module; });
}
int cuFuncSetAttribute(Function* f, int number, int value) {
  return with_context([&] {
    if (number != 8 && number != 14)
      throw Error{kInvalidValue, format("the attribute %d of a kernel is not known", number)};
    if (number == 8 && (value < 0 || value + f->shared > largest_shared()))
      throw Error{kInvalidValue, format("%s: %d bytes of shared memory", f->name.c_str(), value)};
    // 8: bytes of dynamic shared memory. 14: clusters of more than 8 blocks are allowed.
    (number == 8 ? f->max_dynamic : f->nonportable) = value;
  });
}
int cuFuncGetAttribute(int* value, int number, Function* f) {
  return with_context([&] {
    if (number != 1 && number != 8)
      throw Error{kInvalidValue, format("the attribute %d of a kernel is not known", number)};
    *value = number == 1 ? f->shared : f->max_dynamic;  // bytes of shared memory
  });
}
int cuFuncGetParamInfo(Function* f, size_t index, size_t* offset, size_t* size) {
  return with_context([&] {
    if (index >= f->params.size())
      throw Error{kInvalidValue, format("%s: no parameter %zu", f->name.c_str(), index)};
    *offset = f->params[index].offset;
    *size = f->params[index].size;
  });
}

static Launch one_dimensional(const unsigned grid[3], const unsigned block[3],
                              unsigned dynamic_shared) {
  for (const unsigned size : {grid[1], grid[2], block[1], block[2]})
    if (size != 1) throw Error{kInvalidValue, "a launch of more than one dimension"};
  return {grid[0], block[0], dynamic_shared};
}
int cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned dynamic_shared, u64 handle, void** values, void**) {
  return with_context([&] {
    const unsigned grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
    enqueue_launch(f, one_dimensional(grid, block, dynamic_shared), handle, values);
  });
}

// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
  unsigned id;
  alignas(8) int value;
  char rest[60];
};
struct LaunchConfig {
  unsigned grid[3], block[3], dynamic_shared;
  u64 stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);

static Launch launch_of(const LaunchConfig& c) {
  Launch l = one_dimensional(c.grid, c.block, c.dynamic_shared);
  for (unsigned k = 0; k < c.attribute_count; ++k) {
    if (c.attributes[k].id != 6)  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
      throw Error{kInvalidValue,
                  format("the attribute %u of a launch is not known", c.attributes[k].id)};
    l.dependent = c.attributes[k].value != 0;
  }
  return l;
}
int cuLaunchKernelEx(const LaunchConfig* c, Function* f, void** values, void**) {
  return with_context([&] {
    const Launch l = launch_of(*c);
    if (l.dependent && limits().capability < 90)
      throw Error{kNotPermitted, "dependent launches need compute capability 9.0"};
    enqueue_launch(f, l, c->stream, values);
  });
}
// Returns in n how many clusters run at a time. 0 means that there is no room for a cluster.
int cuOccupancyMaxActiveClusters(int* n, Function* f, const LaunchConfig* c) {
  return with_context([&] {
    const Launch l = launch_of(*c);
    check_launch(*f, l);
    const int blocks = int(f->cluster);
    const int each = blocks_per_multiprocessor(*f, int(l.block), l.dynamic_shared);
    const bool fits = blocks <= int(setting(kLargestCluster)) && each;
    *n = fits ? std::max(int(setting(kMultiprocessors)) * each / blocks, 1) : 0;
  });
}

}  // extern "C"
