// SPDX-License-Identifier: MIT
// Clusters of blocks, launches that overlap and asynchronous copies, which a CPU does without.
#pragma once

#define CLUSTER_LAUNCH

struct SharedMemory {};

inline void launch_dependents() {}
inline void wait_for_prerequisites() {}

inline void async_commit() {}
template <int pending>
inline void async_wait() {}
