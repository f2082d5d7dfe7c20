// SPDX-License-Identifier: MIT
// Launches that may begin while the launch before them runs. Each thread must wait for that launch
// before it touches an array. Here that launch has always ended, but a missing wait is still found.
#include "lanes.h"

namespace sg {

// Variables of modules are not checked: only tests add them, and may touch them before the wait.
void need_waited(Warp& w, const Instruction& i, u32 lanes, u8* const* at) {
  if (__builtin_expect(!running->launch.dependent, 1)) return;
  for_lanes(lanes & ~w.waited, [&](int lane) {
    const Range* const range = range_of(reinterpret_cast<u64>(at[lane]));
    if (range && range->is_array)
      fail(w, i, lane, 719, "a thread touches an array before griddepcontrol.wait");
  });
}

void check_waited(Warp& w, const Instruction& i, u32 lanes) {
  if (!running->launch.dependent) return;
  for_lanes(lanes & ~w.waited, [&](int lane) {
    fail(w, i, lane, 719, "a thread of a dependent launch ends without griddepcontrol.wait");
  });
}

bool choose_grid_control(Instruction& i, const Opcode& op) {
  i.run = [](Warp&, const Instruction&, u32) {};
  if (op.has("wait")) i.run = [](Warp& w, const Instruction&, u32 lanes) { w.waited |= lanes; };
  return op.has("wait") || op.has("launch_dependents");
}

}  // namespace sg
