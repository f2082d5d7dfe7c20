// SPDX-License-Identifier: MIT
// %tid and the like: what a thread knows of its place.
#pragma once
#include "program.h"

namespace sg {

// Whether there is such a register; sets what it has.
bool find_special(const std::string& name, Special& out);
void set_special_registers(Warp&);

}  // namespace sg
