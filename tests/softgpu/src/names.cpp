// SPDX-License-Identifier: MIT
#include "names.h"

#include <algorithm>

#include "special_registers.h"

namespace sg {

// Stands for the address of dynamic shared memory until all is placed.
constexpr u64 kDynamicMark = 0xdd00dd00dd00dd00ull;

Names::Names(Function& f) : shared(f.module->shared), f_(f) {
  Scope params;
  for (const Param& p : f.params) params.variables[p.name] = {kParam, p.offset, p.size};
  scopes.push_back(params);
}

int Names::constant(u64 value) {
  const auto [at, fresh] = constants_.insert({value, 0});
  if (fresh) {
    at->second = new_row();
    f_.constants.push_back({at->second, value});
  }
  return at->second;
}

int Names::special(const std::string& name) {
  Special s;
  if (!find_special(name, s)) return -1;
  const auto [at, fresh] = specials_.insert({name, 0});
  if (fresh) {
    at->second = s.row = new_row();
    f_.specials.push_back(s);
  }
  return at->second;
}

int Names::find_register(const std::string& name) const {
  const size_t digits = std::min(name.find_last_not_of("0123456789") + 1, name.size());
  const int number = digits < name.size() ? atoi(name.c_str() + digits) : 0;
  for (size_t k = scopes.size(); k-- > 0;) {
    const auto& registers = scopes[k].registers;
    const auto whole = registers.find(name), counted = registers.find(name.substr(0, digits));
    if (whole != registers.end()) return whole->second.first;
    if (counted != registers.end() && number < counted->second.second)
      return counted->second.first + number;
  }
  return -1;
}

const Variable* Names::find_variable(const std::string& name) const {
  for (size_t k = scopes.size(); k-- > 0;) {
    const auto found = scopes[k].variables.find(name);
    if (found != scopes[k].variables.end()) return &found->second;
  }
  const auto found = f_.module->variables.find(name);
  return found == f_.module->variables.end() ? nullptr : &found->second;
}

void Names::declare_registers(Reader& r) {
  r.name();  // the type
  do {
    const std::string name = r.name();
    int count = 1;
    if (r.take("<")) {
      count = int(r.number());
      r.need(">");
    }
    scopes.back().registers[name] = {f_.rows, count};
    f_.rows += count;
  } while (r.take(","));
  r.need(";");
}

// Shared variables are the kernel's, local ones those of a scope. Parameters of calls are local.
void Names::declare_variable(Reader& r, Space space) {
  const Declaration d = r.declaration();
  int& size = space == kShared ? shared : f_.local;
  size = int(round_up(size_t(size), space == kShared ? d.align : std::max<size_t>(d.align, 8)));
  Scope& scope = space == kShared ? scopes.front() : scopes.back();
  scope.variables[d.name] = {space, d.open ? Variable::kDynamic : u64(size), d.bytes};
  size += int(d.bytes);
  r.need(";");
}

u64 Names::address_of(const Variable& v) {
  if (v.space == kShared)
    return v.address == Variable::kDynamic ? kDynamicMark : kReservedShared + v.address;
  return v.space == kParam ? kParamWindow | v.address : v.address;
}

void Names::place_dynamic_shared() {
  for (auto& [row, value] : f_.constants)
    if (value == kDynamicMark) value = kReservedShared + round_up(size_t(shared), 16);
}

}  // namespace sg
