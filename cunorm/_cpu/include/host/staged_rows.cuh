// SPDX-License-Identifier: MIT
// Staged rows, which a CPU does without: it prefetches rows to its caches.
#pragma once

template <class B>
struct StagedRows {
  struct Storage {};

  explicit StagedRows(Storage&) {}
};
