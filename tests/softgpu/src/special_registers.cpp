// SPDX-License-Identifier: MIT
#include "special_registers.h"

#include "threads.h"

namespace sg {

enum class SpecialRegister : u8 {
  kTid,
  kNtid,
  kCtaid,
  kNctaid,
  kLaneid,
  kWarpid,
  kNwarpid,
  kLanemaskEq,
  kLanemaskLt,
  kLanemaskLe,
  kLanemaskGt,
  kLanemaskGe,
  kClusterCtarank,
  kClusterNctarank,
  kClusterCtaid,
  kClusterNctaid,
  kClusterid,
  kNclusterid,
  kIsExplicitCluster,
  kSmid,
  kNsmid,
  kGridid,
  kDynamicSmemSize,
  kTotalSmemSize,
  kClock
};
using R = SpecialRegister;

bool find_special(const std::string& name, Special& out) {
  static const std::map<std::string, R> known = {{"%tid", R::kTid},
                                                 {"%ntid", R::kNtid},
                                                 {"%ctaid", R::kCtaid},
                                                 {"%nctaid", R::kNctaid},
                                                 {"%laneid", R::kLaneid},
                                                 {"%warpid", R::kWarpid},
                                                 {"%nwarpid", R::kNwarpid},
                                                 {"%lanemask_eq", R::kLanemaskEq},
                                                 {"%lanemask_lt", R::kLanemaskLt},
                                                 {"%lanemask_le", R::kLanemaskLe},
                                                 {"%lanemask_gt", R::kLanemaskGt},
                                                 {"%lanemask_ge", R::kLanemaskGe},
                                                 {"%cluster_ctarank", R::kClusterCtarank},
                                                 {"%cluster_nctarank", R::kClusterNctarank},
                                                 {"%cluster_ctaid", R::kClusterCtaid},
                                                 {"%cluster_nctaid", R::kClusterNctaid},
                                                 {"%clusterid", R::kClusterid},
                                                 {"%nclusterid", R::kNclusterid},
                                                 {"%is_explicit_cluster", R::kIsExplicitCluster},
                                                 {"%smid", R::kSmid},
                                                 {"%nsmid", R::kNsmid},
                                                 {"%gridid", R::kGridid},
                                                 {"%dynamic_smem_size", R::kDynamicSmemSize},
                                                 {"%total_smem_size", R::kTotalSmemSize},
                                                 {"%clock", R::kClock},
                                                 {"%clock_hi", R::kClock},
                                                 {"%clock64", R::kClock},
                                                 {"%globaltimer", R::kClock}};
  const size_t dot = std::min(name.find('.'), name.size());
  const auto found = known.find(name.substr(0, dot));
  if (found == known.end()) return false;
  const char axis = dot + 1 < name.size() ? name[dot + 1] : 'x';
  out = {found->second, axis == 'y' ? 1 : axis == 'z' ? 2 : 0, 0};
  return true;
}

static u64 value_of(R what, int axis, const Warp& w, int lane) {
  const Launch& l = running->launch;
  const Block& b = *w.block;
  const unsigned* const cluster = running->cluster;
  const unsigned t = unsigned(w.first_thread + lane);
  const unsigned tid[3] = {t % l.block[0], t / l.block[0] % l.block[1],
                           t / l.block[0] / l.block[1]};
  const u64 from_here = ~0ull << lane;
  switch (what) {
    case R::kTid:
      return tid[axis];
    case R::kNtid:
      return l.block[axis];
    case R::kCtaid:
      return b.id[axis];
    case R::kNctaid:
      return l.grid[axis];
    case R::kLaneid:
      return u64(lane);
    case R::kWarpid:
      return u64(w.first_thread / 32);
    case R::kNwarpid:
      return kThreadsPerSm / 32;
    case R::kLanemaskEq:
      return 1u << lane;
    case R::kLanemaskLt:
      return u32(~from_here);
    case R::kLanemaskLe:
      return u32(~(from_here << 1));
    case R::kLanemaskGt:
      return u32(from_here << 1);
    case R::kLanemaskGe:
      return u32(from_here);
    case R::kClusterCtarank:
      return b.rank;
    case R::kClusterNctarank:
      return b.cluster->blocks.size();
    case R::kClusterCtaid:
      return b.id[axis] % cluster[axis];
    case R::kClusterNctaid:
      return cluster[axis];
    case R::kClusterid:
      return b.id[axis] / cluster[axis];
    case R::kNclusterid:
      return l.grid[axis] / cluster[axis];
    case R::kIsExplicitCluster:
      return b.cluster->blocks.size() > 1;
    case R::kSmid:
      return (b.id[0] + b.id[1] + b.id[2]) % unsigned(settings().sms);
    case R::kNsmid:
      return u64(settings().sms);
    case R::kGridid:
      return 1;
    case R::kDynamicSmemSize:
      return l.dynamic_shared;
    case R::kTotalSmemSize:
      return b.shared_bytes;
    case R::kClock:
      return running->issued;
  }
  return 0;
}

void set_special_registers(Warp& w) {
  for (const Special& s : w.function->specials)
    for (int lane = 0; lane < 32; ++lane) w.row(s.row)[lane] = value_of(s.what, s.axis, w, lane);
}

}  // namespace sg
