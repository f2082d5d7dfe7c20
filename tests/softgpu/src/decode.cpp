// SPDX-License-Identifier: MIT
// Decodes the bodies of kernels.
#include <algorithm>

#include "program.h"

namespace sg {
namespace {

struct Operand {
  enum Type { kRow, kAddress, kVector } type = kRow;
  int row = 0, second = -1;  // second: the b of a|b
  std::vector<int> rows;
  Space space = kNoSpace;
  int64_t offset = 0;
};

// The names declared between a pair of braces.
struct Scope {
  std::map<std::string, std::pair<int, int>> registers;  // name (%r of %r<9>): first row, count
  std::map<std::string, Variable> variables;
};

class Decoder {
 public:
  explicit Decoder(Function& f) : f_(f), r_{*f.module, f.first_token}, scopes_(1) {
    for (const Param& p : f.params) scopes_[0].variables[p.name] = {kParam, p.offset, p.size};
  }
  void decode();

 private:
  struct Statement {
    int guard = -1;
    bool negate = false;
    int line = 0;
  };
  void declare_registers();
  void declare_variable(Space);
  int constant(u64 value);
  int special(const std::string& name);              // -1: none
  int find_register(const std::string& name) const;  // -1: none
  const Variable* find_variable(const std::string& name) const;

  void block_item(const Token&);
  void statement();
  bool control(const std::string& base, const Statement&);
  Operand value();
  Operand operand();
  Operand address();
  void place_operands(Instruction&, const Opcode&, const std::vector<Operand>&);
  void place_sources(Instruction&, const Operand&);
  int negated(int row);
  Instruction start(const Statement&, Kind) const;

  Function& f_;
  Reader r_;
  std::vector<Scope> scopes_;
  std::map<u64, int> constants_;
  std::map<std::string, int> specials_;
  std::map<std::string, int> labels_;
  std::vector<std::pair<size_t, std::string>> jumps_;
};

void Decoder::declare_registers() {
  r_.name();  // the type
  do {
    const std::string name = r_.name();
    int count = 1;
    if (r_.take("<")) {
      count = int(r_.number());
      r_.need(">");
    }
    scopes_.back().registers[name] = {f_.rows, count};
    f_.rows += count;
  } while (r_.take(","));
  r_.need(";");
}

void Decoder::declare_variable(Space space) {
  const Declaration d = r_.declaration();
  int& size = space == kShared ? f_.shared : f_.local;
  size = int(round_up(size_t(size), d.align));
  const int begin = space == kShared ? kReservedShared : 0;
  scopes_[0].variables[d.name] = {space, u64(begin + size), d.bytes};
  size += int(d.bytes);
  r_.need(";");
}

int Decoder::constant(u64 value) {
  const auto [at, fresh] = constants_.insert({value, f_.rows});
  if (fresh) f_.constants.push_back({f_.rows++, value});
  return at->second;
}

int Decoder::special(const std::string& name) {
  Special s;
  if (!find_special(name, s)) return -1;
  const auto [at, fresh] = specials_.insert({name, f_.rows});
  s.row = at->second;
  if (fresh) ++f_.rows, f_.specials.push_back(s);
  return s.row;
}

int Decoder::find_register(const std::string& name) const {
  const size_t digits = std::min(name.find_last_not_of("0123456789") + 1, name.size());
  const int number = digits < name.size() ? atoi(name.c_str() + digits) : 0;
  for (size_t k = scopes_.size(); k-- > 0;) {
    const auto& registers = scopes_[k].registers;
    const auto whole = registers.find(name), counted = registers.find(name.substr(0, digits));
    if (whole != registers.end()) return whole->second.first;
    if (counted != registers.end() && number < counted->second.second)
      return counted->second.first + number;
  }
  return -1;
}

const Variable* Decoder::find_variable(const std::string& name) const {
  const auto& own = scopes_[0].variables;
  const auto& of_module = f_.module->variables;
  const auto found = own.find(name), other = of_module.find(name);
  return found != own.end() ? &found->second : other != of_module.end() ? &other->second : nullptr;
}

Instruction Decoder::start(const Statement& s, Kind kind) const {
  Instruction i;
  i.kind = kind;
  i.guard = s.guard, i.negate_guard = s.negate;
  i.line = s.line;
  return i;
}

// Adds an instruction that negates a predicate. Returns the row of its result.
int Decoder::negated(int row) {
  Instruction i = start({}, kNormal);
  i.line = r_.now().line;
  i.dest[0] = f_.rows++;
  i.source[0] = row;
  i.sources = 1;
  choose_operation(i, Opcode("not.pred"));
  f_.code.push_back(i);
  return i.dest[0];
}

Operand Decoder::value() {
  Operand o;
  if (r_.take("!")) {
    o.row = negated(value().row);
    return o;
  }
  const bool minus = r_.take("-");
  const Token& t = r_.now();
  if (t.type == Token::kNumber || t.type == Token::kFloat || t.type == Token::kDouble) {
    ++r_.at;
    const u64 sign = t.type == Token::kFloat ? 1ull << 31 : 1ull << 63;
    o.row = constant(!minus ? t.value : t.type == Token::kNumber ? 0 - t.value : t.value ^ sign);
    return o;
  }
  const std::string name = r_.name();
  if (name == "_") return o;
  o.row = special(name);
  if (o.row < 0) o.row = find_register(name);
  if (o.row >= 0) return o;
  const Variable* v = find_variable(name);
  if (!v) r_.fail("an operand is not known: " + name);
  o.row = constant(v->address);
  o.space = v->space;
  return o;
}

Operand Decoder::address() {
  Operand o = value();
  o.type = Operand::kAddress;
  if (r_.take("+") || r_.is("-")) o.offset = int64_t(r_.number());
  r_.need("]");
  return o;
}

Operand Decoder::operand() {
  if (r_.take("[")) return address();
  Operand o;
  if (!r_.take("{")) {
    o = value();
    if (r_.take("|")) o.second = value().row;
    return o;
  }
  o.type = Operand::kVector;
  do {
    o.rows.push_back(value().row);
  } while (r_.take(","));
  r_.need("}");
  if (o.rows.size() > 4) r_.fail("a vector of more than 4");
  return o;
}

void Decoder::place_sources(Instruction& i, const Operand& o) {
  std::vector<int> rows = o.type == Operand::kVector ? o.rows : std::vector<int>{o.row};
  if (o.second >= 0) rows.push_back(o.second);
  if (o.type == Operand::kAddress && i.sources == 0)
    i.offset = o.offset;
  else if (o.offset)
    r_.fail("the second address has an offset");
  for (int row : rows) {
    if (i.sources == std::size(i.source)) r_.fail("too many operands");
    i.source[i.sources++] = row;
  }
}

void Decoder::place_operands(Instruction& i, const Opcode& op,
                             const std::vector<Operand>& operands) {
  const bool result = op.has_result();
  for (const Operand& o : operands) {
    const bool is_result = result && &o == &operands[0];
    if (o.type == Operand::kVector && (&o == &operands[0] || !result))
      i.elements = u8(o.rows.size());
    if (!is_result) {
      place_sources(i, o);
    } else if (o.type == Operand::kVector) {
      std::copy(o.rows.begin(), o.rows.end(), i.dest);
    } else {
      i.dest[0] = o.row;
      i.dest[1] = std::max(o.second, 0);
    }
  }
}

// Decodes branches and exits. Returns false for other instructions.
bool Decoder::control(const std::string& base, const Statement& s) {
  if (base != "bra" && base != "ret" && base != "exit") return false;
  if (base == "bra") jumps_.push_back({f_.code.size(), r_.name()});
  f_.code.push_back(start(s, base == "bra" ? kBranch : kExit));
  r_.need(";");
  return true;
}

void Decoder::statement() {
  Statement s;
  s.line = r_.now().line;
  if (r_.take("@")) {
    s.negate = r_.take("!");
    s.guard = find_register(r_.name());
    if (s.guard < 0) r_.fail("a guard is not known");
  }
  const std::string name = r_.name();
  const Opcode op(name);
  if (control(op.base(), s)) return;
  std::vector<Operand> operands;
  while (!r_.is(";")) {
    if (!operands.empty()) r_.need(",");
    operands.push_back(operand());
  }
  Instruction i = start(s, kNormal);
  place_operands(i, op, operands);
  if (!choose_operation(i, op)) r_.fail("an instruction is not known: " + name);
  r_.need(";");
  f_.code.push_back(i);
}

void Decoder::block_item(const Token& t) {
  if (r_.take(".pragma")) return r_.skip_to(";");
  if (r_.take(".reg")) return declare_registers();
  if (r_.take(".shared")) return declare_variable(kShared);
  if (r_.take(".local")) return declare_variable(kLocal);
  if (t.type != Token::kName || r_.m.tokens[r_.at + 1].text != ":") return statement();
  labels_[t.text] = int(f_.code.size());
  r_.at += 2;
}

void Decoder::decode() {
  int braces = 0;
  do {
    if (r_.take("{")) {
      scopes_.push_back({});
      ++braces;
    } else if (r_.take("}")) {
      scopes_.pop_back();
      --braces;
    } else if (!r_.take(";")) {
      block_item(r_.now());
    }
  } while (braces);
  f_.code.push_back(start({}, kExit));
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
