// SPDX-License-Identifier: MIT
// Decodes the bodies of kernels.
#include <algorithm>

#include "program.h"

namespace sg {
namespace {

struct Operand {
  enum Type { kRow, kAddress, kVector } type = kRow;
  std::vector<int> rows = {};  // several for a vector, and for a|b
  int64_t offset = 0;
};

class Decoder {
 public:
  explicit Decoder(Function& f) : f_(f), r_{*f.module, f.first_token}, scopes_(1) {
    for (const Param& p : f.params) addresses_[p.name] = p.offset;
  }
  void decode();

 private:
  void declare_registers();
  void declare_shared();
  int constant(u64 value);
  int row_of(const std::string& name);
  int value();
  Operand operand();
  void place_operands(Instruction&, const Opcode&, const std::vector<Operand>&);
  void place_sources(Instruction&, const Operand&);
  void block_item(const Token&);
  void statement();

  Function& f_;
  Reader r_;
  std::vector<std::map<std::string, int>> scopes_;  // rows by name, for each pair of braces
  std::map<std::string, u64> addresses_;            // of parameters and variables
  std::map<u64, int> constants_;
  std::map<std::string, int> labels_;
  std::vector<std::pair<size_t, std::string>> jumps_;
};

// Reads a type, and names: %p is one register, %r<9> stands for %r0 to %r8.
void Decoder::declare_registers() {
  r_.name();
  do {
    const std::string name = r_.name();
    if (r_.take("<")) {
      const u64 count = r_.number();
      for (u64 k = 0; k < count; ++k) scopes_.back()[name + std::to_string(k)] = f_.rows++;
      r_.need(">");
    } else {
      scopes_.back()[name] = f_.rows++;
    }
  } while (r_.take(","));
  r_.need(";");
}

void Decoder::declare_shared() {
  const Declaration d = r_.declaration();
  f_.shared = int(round_up(size_t(f_.shared), d.align));
  addresses_[d.name] = u64(kReservedShared + f_.shared);
  f_.shared += int(d.bytes);
  r_.need(";");
}

int Decoder::constant(u64 value) {
  const auto [at, fresh] = constants_.insert({value, f_.rows});
  if (fresh) f_.constants.push_back({f_.rows++, value});
  return at->second;
}

int Decoder::row_of(const std::string& name) {
  for (size_t k = scopes_.size(); k-- > 0;)
    if (const auto found = scopes_[k].find(name); found != scopes_[k].end()) return found->second;
  if (Special s; find_special(name, s)) {
    s.row = f_.rows++;
    f_.specials.push_back(s);
    return scopes_[0][name] = s.row;
  }
  if (const auto own = addresses_.find(name); own != addresses_.end()) return constant(own->second);
  const auto& variables = f_.module->variables;
  if (const auto v = variables.find(name); v != variables.end()) return constant(v->second.address);
  r_.fail("an operand is not known: " + name);
}

int Decoder::value() {
  const bool minus = r_.take("-");
  const Token& t = r_.now();
  if (t.type != Token::kName) {
    const u64 sign = t.type == Token::kFloat ? 1ull << 31 : 1ull << 63;
    const u64 bits = t.type == Token::kNumber ? r_.number() : (++r_.at, t.value);
    return constant(!minus ? bits : t.type == Token::kNumber ? 0 - bits : bits ^ sign);
  }
  const std::string name = r_.name();
  return name == "_" ? 0 : row_of(name);
}

Operand Decoder::operand() {
  Operand o;
  if (r_.take("[")) {
    o = {Operand::kAddress, {value()}};
    if (r_.take("+") || r_.is("-")) o.offset = int64_t(r_.number());
    r_.need("]");
  } else if (r_.take("{")) {
    o.type = Operand::kVector;
    do {
      o.rows.push_back(value());
    } while (r_.take(","));
    r_.need("}");
    if (o.rows.size() > 4) r_.fail("a vector of more than 4");
  } else {
    o.rows = {value()};
    if (r_.take("|")) o.rows.push_back(value());
  }
  return o;
}

void Decoder::place_sources(Instruction& i, const Operand& o) {
  if (o.type == Operand::kAddress && i.sources == 0)
    i.offset = o.offset;
  else if (o.offset)
    r_.fail("the second address has an offset");
  for (int row : o.rows) {
    if (i.sources == std::size(i.source)) r_.fail("too many operands");
    i.source[i.sources++] = row;
  }
}

void Decoder::place_operands(Instruction& i, const Opcode& op,
                             const std::vector<Operand>& operands) {
  const bool result = op.has_result();
  for (const Operand& o : operands) {
    const bool is_first = &o == &operands[0];
    if (o.type == Operand::kVector && (is_first || !result)) i.elements = u8(o.rows.size());
    if (is_first && result)
      std::copy(o.rows.begin(), o.rows.end(), i.dest);
    else
      place_sources(i, o);
  }
}

void Decoder::statement() {
  Instruction i;
  i.line = r_.now().line;
  if (r_.take("@")) {
    i.negate_guard = r_.take("!");
    i.guard = row_of(r_.name());
  }
  const std::string name = r_.name();
  const Opcode op(name);
  if (op.base() == "bra") {
    i.kind = kBranch;
    jumps_.push_back({f_.code.size(), r_.name()});
  } else if (op.base() == "ret") {
    i.kind = kExit;
  } else {
    std::vector<Operand> operands;
    while (!r_.is(";")) {
      if (!operands.empty()) r_.need(",");
      operands.push_back(operand());
    }
    place_operands(i, op, operands);
    if (!choose_operation(i, op)) r_.fail("an instruction is not known: " + name);
    if (const int least = least_capability(op); f_.module->capability < least)
      r_.fail(format("%s needs compute capability %d.%d", name.c_str(), least / 10, least % 10));
  }
  r_.need(";");
  f_.code.push_back(i);
}

void Decoder::block_item(const Token& t) {
  if (r_.take(".pragma")) return r_.skip_to(";");
  if (r_.take(".reg")) return declare_registers();
  if (r_.take(".shared")) return declare_shared();
  if (t.type != Token::kName || r_.m.tokens[r_.at + 1].text != ":") return statement();
  labels_[t.text] = int(f_.code.size());
  r_.at += 2;
}

void Decoder::decode() {
  do {
    if (r_.take("{"))
      scopes_.push_back({});
    else if (r_.take("}"))
      scopes_.pop_back();
    else if (!r_.take(";"))
      block_item(r_.now());
  } while (scopes_.size() > 1);
  f_.code.emplace_back().kind = kExit;
  for (auto& [row, value] : f_.constants)
    if (value == Variable::kDynamic) value = kReservedShared + round_up(size_t(f_.shared), 16);
  for (const auto& [at, label] : jumps_) {
    const auto found = labels_.find(label);
    if (found == labels_.end()) throw Error{218, "a label is not known: " + label};
    f_.code[at].target = found->second;
  }
}

}  // namespace

void decode(Function& f) { Decoder(f).decode(); }

}  // namespace sg
