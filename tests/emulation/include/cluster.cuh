// SPDX-License-Identifier: MIT
// The emulator's cluster.cuh: blocks of a cluster wait for each other and read each other's memory.
#pragma once

// How many blocks form a cluster is an argument of the launch.
#define CLUSTER_LAUNCH

__device__ inline int cluster_rank() { return emulation_cluster_rank(); }

__device__ inline void cluster_barrier() { emulation_cluster_barrier(); }

template <class T>
__device__ inline T cluster_load(const T* address, int rank) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a word of 32 or 64 bits");
  T value;
  emulation_cluster_load(&value, address, sizeof(T), rank);
  return value;
}
