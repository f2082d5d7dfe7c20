// SPDX-License-Identifier: MIT
#include "special_registers.h"

#include <algorithm>

#include "threads.h"

namespace sg {
namespace {

const Launch& given() { return running->launch; }
const unsigned* cluster() { return running->cluster; }
u64 from_lane(int lane) { return ~0ull << lane; }

// What a register of a name, at one of its axes, has in a lane of a warp.
const std::map<std::string, SpecialValue> table = {
    {"%tid",
     [](const Warp& w, int lane, int axis) -> u64 {
       const unsigned t = unsigned(w.first_thread + lane), *const n = given().block;
       return axis == 0 ? t % n[0] : axis == 1 ? t / n[0] % n[1] : t / n[0] / n[1];
     }},
    {"%ntid", [](const Warp&, int, int axis) -> u64 { return given().block[axis]; }},
    {"%ctaid", [](const Warp& w, int, int axis) -> u64 { return w.block->id[axis]; }},
    {"%nctaid", [](const Warp&, int, int axis) -> u64 { return given().grid[axis]; }},
    {"%laneid", [](const Warp&, int lane, int) -> u64 { return u64(lane); }},
    {"%warpid", [](const Warp& w, int, int) -> u64 { return u64(w.first_thread / 32); }},
    {"%lanemask_eq", [](const Warp&, int lane, int) -> u64 { return 1u << lane; }},
    {"%lanemask_lt", [](const Warp&, int lane, int) -> u64 { return u32(~from_lane(lane)); }},
    {"%lanemask_le", [](const Warp&, int lane, int) -> u64 { return u32(~from_lane(lane + 1)); }},
    {"%lanemask_gt", [](const Warp&, int lane, int) -> u64 { return u32(from_lane(lane + 1)); }},
    {"%lanemask_ge", [](const Warp&, int lane, int) -> u64 { return u32(from_lane(lane)); }},
    {"%cluster_ctarank", [](const Warp& w, int, int) -> u64 { return w.block->rank; }},
    {"%cluster_nctarank",
     [](const Warp& w, int, int) -> u64 { return w.block->cluster->blocks.size(); }},
    {"%cluster_ctaid",
     [](const Warp& w, int, int axis) -> u64 { return w.block->id[axis] % cluster()[axis]; }},
    {"%cluster_nctaid", [](const Warp&, int, int axis) -> u64 { return cluster()[axis]; }},
    {"%clusterid",
     [](const Warp& w, int, int axis) -> u64 { return w.block->id[axis] / cluster()[axis]; }},
    {"%nclusterid",
     [](const Warp&, int, int axis) -> u64 { return given().grid[axis] / cluster()[axis]; }},
    {"%nsmid", [](const Warp&, int, int) -> u64 { return u64(settings().sms); }},
    {"%dynamic_smem_size", [](const Warp&, int, int) -> u64 { return given().dynamic_shared; }},
    {"%clock", [](const Warp&, int, int) -> u64 { return running->issued; }},
    {"%clock64", [](const Warp&, int, int) -> u64 { return running->issued; }},
};

}  // namespace

bool find_special(const std::string& name, Special& out) {
  const size_t dot = std::min(name.find('.'), name.size());
  const auto found = table.find(name.substr(0, dot));
  if (found == table.end()) return false;
  const char axis = dot + 1 < name.size() ? name[dot + 1] : 'x';
  out = {found->second, axis == 'y' ? 1 : axis == 'z' ? 2 : 0, 0};
  return true;
}

void set_special_registers(Warp& w) {
  for (const Special& s : w.function->specials)
    for (int lane = 0; lane < 32; ++lane) w.row(s.row)[lane] = s.value(w, lane, s.axis);
}

}  // namespace sg
