// SPDX-License-Identifier: MIT
// The asynchronous copies that a thread has under way.
#pragma once
#include <cstddef>
#include <cstring>
#include <vector>

// A copy can read its source and write its destination at any time until it is waited for. Here the
// destination holds NaN bytes until then, and the source must not change.
class CopyQueue {
 public:
  struct Copy {
    char* to;
    const char* from;
    unsigned bytes;
    long long group;
    char source_before[16];
  };

  void add(void* to, const void* from, unsigned bytes) {
    Copy copy = {static_cast<char*>(to), static_cast<const char*>(from), bytes, group_, {}};
    std::memcpy(copy.source_before, from, bytes);
    std::memset(to, 0xff, bytes);
    copies_.push_back(copy);
  }

  // Ends the group that the copies since the last commit belong to.
  void commit() { ++group_; }

  // Delivers all but the newest `pending` of the groups that have ended; what was added since the
  // last commit is in none of them. Where copies that are still under way go, there is poison
  // again. Returns a copy whose source has changed, null if none has.
  const Copy* wait(unsigned pending) {
    std::size_t count = 0;
    for (; count < copies_.size() && copies_[count].group < group_ - pending; ++count) {
      const Copy& copy = copies_[count];
      if (std::memcmp(copy.from, copy.source_before, copy.bytes) != 0) return &copy;
      std::memcpy(copy.to, copy.source_before, copy.bytes);
    }
    copies_.erase(copies_.begin(), copies_.begin() + count);
    for (const Copy& copy : copies_) std::memset(copy.to, 0xff, copy.bytes);
    return nullptr;
  }

  // The oldest copy under way, null if there is none.
  const Copy* oldest() const { return copies_.empty() ? nullptr : copies_.data(); }

  void clear() { copies_.clear(); }

 private:
  std::vector<Copy> copies_;  // by age
  long long group_ = 0;
};
