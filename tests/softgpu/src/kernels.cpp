// SPDX-License-Identifier: MIT
// Modules and their kernels, and the launches that a GPU takes.
#include <string.h>

#include <algorithm>

#include "host.h"
#include "program.h"

namespace sg {
namespace {

unsigned long long product(const unsigned n[3]) { return 1ull * n[0] * n[1] * n[2]; }

void check_cluster(Function& f, const unsigned grid[3], const unsigned cluster[3]) {
  const unsigned long long blocks = product(cluster);
  const char* name = f.name.c_str();
  if (blocks > 1 && limits().capability < 90)
    throw Error{kNotPermitted, format("%s: clusters need compute capability 9.0", name)};
  for (int k = 0; k < 3; ++k)
    if (!cluster[k] || grid[k] % cluster[k])
      throw Error{kInvalidValue,
                  format("%s: a grid of %u blocks, in clusters of %u", name, grid[k], cluster[k])};
  if (blocks > 16 || (blocks > 8 && !f.nonportable))
    throw Error{kInvalidCluster, format("%s: clusters of %llu blocks", name, blocks)};
}

void check_blocks(Function& f, const Launch& l) {
  const char* name = f.name.c_str();
  const unsigned long long threads = product(l.block);
  if (!product(l.grid) || l.grid[0] > 0x7fffffffu || l.grid[1] > 65535 || l.grid[2] > 65535)
    throw Error{kInvalidValue,
                format("%s: a grid of %u, %u, %u blocks", name, l.grid[0], l.grid[1], l.grid[2])};
  if (!threads || threads > kThreadsPerBlock || l.block[2] > 64)
    throw Error{kInvalidValue, format("%s: a block of %u, %u, %u threads", name, l.block[0],
                                      l.block[1], l.block[2])};
  if (f.required[0] && !std::equal(l.block, l.block + 3, f.required))
    throw Error{kInvalidValue,
                format("%s: a block of %llu threads, another number is required", name, threads)};
  if (f.max_threads && threads > u64(f.max_threads))
    throw Error{kInvalidValue, format("%s: a block of %llu threads, compiled for at most %d", name,
                                      threads, f.max_threads)};
  const int most = f.max_dynamic > kStaticShared ? limits().optin_shared : kStaticShared;
  if (l.dynamic_shared > unsigned(f.max_dynamic) || f.static_shared + int(l.dynamic_shared) > most)
    throw Error{kInvalidValue, format("%s: %u bytes of dynamic and %d of static shared memory",
                                      name, l.dynamic_shared, f.static_shared)};
}

// What a GPU refuses at once, and not when the stream comes to it.
void check_launch(Function& f, const Launch& l) {
  check_blocks(f, l);
  if (!f.cluster[0]) return;
  check_cluster(f, l.grid, f.cluster);
  if (product(f.cluster) > u64(settings().largest_cluster))
    throw Error{kInvalidCluster, format("%s: no room for a cluster of %llu blocks", f.name.c_str(),
                                        product(f.cluster))};
}

int blocks_per_multiprocessor(Function& f, int threads, size_t dynamic_shared) {
  const Limits& l = limits();
  const size_t shared = size_t(f.static_shared) + dynamic_shared + size_t(l.reserved_shared);
  const int warps = std::max((threads + 31) / 32, 1);
  const int fits = shared ? int(size_t(l.shared_per_sm) / shared) : l.blocks_per_sm;
  return std::min({l.threads_per_sm / (32 * warps), l.blocks_per_sm, fits});
}

int* attribute(Function& f, int number) {
  static thread_local int value;
  switch (number) {
    case 0:
      value = f.max_threads ? f.max_threads : kThreadsPerBlock;
      break;
    case 1:
      value = f.static_shared;
      break;
    case 2:
      value = const_bytes(&f);
      break;
    case 3:
      value = f.local;
      break;
    case 4:
      value = 32;
      break;  // registers, which are not known without ptxas
    case 5:
    case 6:
      value = limits().capability;
      break;
    case 8:
      return &f.max_dynamic;
    case 14:
      return &f.nonportable;
    default:
      throw Error{kInvalidValue, format("the attribute %d of a kernel is not known", number)};
  }
  return &value;
}

// "sm_90a" in a line that begins with ".target".
int target_of(const std::string& ptx) {
  const size_t at = ptx.find(".target sm_");
  return at == ptx.npos ? 0 : atoi(ptx.c_str() + at + strlen(".target sm_"));
}

}  // namespace
}  // namespace sg

using namespace sg;

extern "C" {

int cuModuleLoadData(Module** m, const void* image) {
  return answer([&] {
    const char* text = static_cast<const char*>(image);
    if (text[0] < 9) throw Error{kInvalidImage, "a module is not the text of PTX"};
    if (target_of(text) > limits().capability)
      throw Error{kNoBinary, format("PTX for sm_%d", target_of(text))};
    *m = load_module(text, current_device());
  });
}
int cuModuleGetFunction(Function** f, Module* m, const char* name) {
  return answer([&] {
    *f = find_function(m, name);
    if (!*f) throw Error{kNotFound, format("there is no kernel %s", name)};
  });
}
int cuModuleGetGlobal_v2(u64* address, size_t* bytes, Module* m, const char* name) {
  return answer([&] {
    if (!find_global(m, name, address, bytes))
      throw Error{kNotFound, format("there is no variable %s", name)};
  });
}
int cuFuncGetModule(Module** m, Function* f) {
  return answer([&] { *m = f->module; });
}
int cuFuncGetAttribute(int* value, int number, Function* f) {
  return answer([&] { *value = *attribute(*f, number); });
}
int cuFuncSetAttribute(Function* f, int number, int value) {
  return answer([&] {
    if (number != 8 && number != 14)
      throw Error{kInvalidValue, format("the attribute %d of a kernel cannot be set", number)};
    if (number == 8 && (value < 0 || value + f->static_shared > limits().optin_shared))
      throw Error{kInvalidValue, format("%s: %d bytes of shared memory", f->name.c_str(), value)};
    *attribute(*f, number) = value;
  });
}
int cuFuncGetParamInfo(Function* f, size_t index, size_t* offset, size_t* size) {
  return answer([&] {
    if (index >= f->params.size())
      throw Error{kInvalidValue, format("%s: no parameter %zu", f->name.c_str(), index)};
    *offset = f->params[index].offset;
    if (size) *size = f->params[index].size;
  });
}

// The parameters are copied here: `values` points at one after the other.
int cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, u64 handle, void** values, void**) {
  return answer([&] {
    const Launch l{{gx, gy, gz}, {bx, by, bz}, shared};
    check_launch(*f, l);
    Stream& stream = stream_of(handle);
    if (stream.device != f->module->device)
      throw Error{kInvalidHandle, format("%s is loaded on device %d, the stream is of device %d",
                                         f->name.c_str(), f->module->device, stream.device)};
    const size_t size = f->params_size;
    auto bytes = std::make_shared<std::vector<u8>>(size + 64, u8(0xcd));
    for (size_t i = 0; i < f->params.size(); ++i)
      memcpy(bytes->data() + f->params[i].offset, values[i], f->params[i].size);
    give(stream, [=] { launch(f, l, bytes->data(), size); });
  });
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, Function* f, int threads, size_t shared) {
  return answer([&] { *n = blocks_per_multiprocessor(*f, threads, shared); });
}

struct LaunchAttribute {
  int id, pad;
  unsigned value[16];
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned count;
};
// How many clusters run at a time: 0 where such a cluster finds no room.
int cuOccupancyMaxActiveClusters(int* n, Function* f, const LaunchConfig* c) {
  return answer([&] {
    const unsigned* cluster = f->cluster;
    const unsigned one[3] = {1, 1, 1};
    for (unsigned i = 0; i < c->count; ++i)
      if (c->attributes[i].id == 4) cluster = c->attributes[i].value;
    if (!cluster[0]) cluster = one;
    check_cluster(*f, c->grid, cluster);
    check_blocks(
        *f,
        {{c->grid[0], c->grid[1], c->grid[2]}, {c->block[0], c->block[1], c->block[2]}, c->shared});
    const int blocks = int(product(cluster));
    const int each = blocks_per_multiprocessor(*f, int(product(c->block)), c->shared);
    *n = blocks > settings().largest_cluster || !each ? 0
                                                      : std::max(settings().sms * each / blocks, 1);
  });
}

}  // extern "C"
