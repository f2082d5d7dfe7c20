// SPDX-License-Identifier: MIT
// In which order blocks, warps and lanes run.
#pragma once
#include <cstring>
#include <numeric>
#include <utility>

#include "launch.h"

class Turns {
 public:
  Turns() = default;
  Turns(Order order, unsigned long long seed) : order_(order), state_(seed) {}

  // Fills `items` with 0 to count - 1 in the order in which they start.
  template <class T>
  void arrange(T* items, int count) {
    std::iota(items, items + count, T(0));
    if (order_ == reversed)
      for (int i = 0; i < count / 2; ++i) std::swap(items[i], items[count - 1 - i]);
    if (order_ == random_order)
      for (int i = count - 1; i > 0; --i) std::swap(items[i], items[random_below(i + 1)]);
  }

  // Whether others run before one has come to its next barrier.
  bool interleaved() const { return order_ == random_order; }

  // The place of the one that runs next among those left.
  int next(int left) { return interleaved() ? static_cast<int>(random_below(left)) : 0; }

 private:
  Order order_ = forward;
  unsigned long long state_ = 0;

  unsigned random_below(unsigned bound) {  // splitmix64
    unsigned long long z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<unsigned>(((z ^ (z >> 31)) >> 32) * bound >> 32);
  }
};

// Takes an item out of those left.
inline void remove(int* items, int& left, int place) {
  std::memmove(items + place, items + place + 1, (--left - place) * sizeof(int));
}
