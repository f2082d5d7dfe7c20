// SPDX-License-Identifier: MIT
// The __shared__ arrays of each block of a cluster.
//
// A kernel has one place for them, at addresses fixed when it is compiled. The block that runs
// finds its own there; those of the others are kept aside.
#pragma once
#include <cstddef>
#include <cstring>
#include <vector>

class SharedMemory {
 public:
  // NaN bytes for each of the blocks; the first is selected.
  void start(char* begin, char* end, int blocks) {
    begin_ = begin;
    size_ = static_cast<std::size_t>(end - begin);
    selected_ = 0;
    aside_.assign(blocks > 1 ? blocks * size_ : 0, poison);
    if (size_ > 0) std::memset(begin_, poison, size_);
  }

  // Puts a block's arrays where it finds them.
  void select(int rank) {
    if (rank == selected_) return;
    if (size_ > 0) {
      std::memcpy(aside(selected_), begin_, size_);
      std::memcpy(begin_, aside(rank), size_);
    }
    selected_ = rank;
  }

  int selected() const { return selected_; }

  bool contains(const void* address, std::size_t bytes) const {
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(address) - begin_);
    return offset < size_ && size_ - offset >= bytes;
  }

  // Where a block has what the selected one has at an address that contains() is true of.
  const void* of_block(int rank, const void* address) {
    if (rank == selected_) return address;
    return aside(rank) + (static_cast<const char*>(address) - begin_);
  }

 private:
  static constexpr char poison = '\xff';
  char* begin_ = nullptr;
  std::size_t size_ = 0;
  int selected_ = 0;
  std::vector<char> aside_;  // the selected block's part is out of date

  char* aside(int rank) { return aside_.data() + rank * size_; }
};
