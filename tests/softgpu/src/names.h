// SPDX-License-Identifier: MIT
// What the names in a function's body stand for: rows of registers, and variables.
#pragma once
#include "tokens.h"

namespace sg {

struct Scope {
  std::map<std::string, std::pair<int, int>> registers;  // %r of %r<9>: first row, how many
  std::map<std::string, Variable> variables;
};

class Names {
 public:
  explicit Names(Function&);
  std::vector<Scope> scopes;
  int shared;  // bytes

  int new_row() { return f_.rows++; }
  int constant(u64 value);
  int special(const std::string& name);              // -1: there is none
  int find_register(const std::string& name) const;  // the same
  const Variable* find_variable(const std::string& name) const;
  void declare_registers(Reader&);
  void declare_variable(Reader&, Space);
  static u64 address_of(const Variable&);
  // Dynamic shared memory begins behind all other.
  void place_dynamic_shared();

 private:
  Function& f_;
  std::map<u64, int> constants_;
  std::map<std::string, int> specials_;
};

}  // namespace sg
