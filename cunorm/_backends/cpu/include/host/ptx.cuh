// SPDX-License-Identifier: MIT
// The CPU's ptx.cuh: there are no clusters, dependent launches or asynchronous copies.
#pragma once

#define CLUSTER_LAUNCH

struct SharedMemory {};

inline void launch_dependents() {}
inline void wait_for_prerequisites() {}

inline void async_commit() {}
template <int pending>
inline void async_wait() {}
