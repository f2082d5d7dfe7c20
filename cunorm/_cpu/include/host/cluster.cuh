// SPDX-License-Identifier: MIT
// Clusters, which a CPU's team of one thread never forms: declared for what is not instantiated.
#pragma once

#define CLUSTER_LAUNCH

int cluster_rank();
void cluster_barrier();
template <class T>
T cluster_load(const T* address, int rank);
