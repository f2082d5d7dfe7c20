// SPDX-License-Identifier: MIT
// Decodes the bodies of kernels. Functions that they call are put in their place.
#include <algorithm>

#include "names.h"

namespace sg {
namespace {

struct Operand {
  enum Type { kRow, kAddress, kVector, kLabel } type = kRow;
  int row = 0, second = -1;  // second: of a|b
  std::vector<int> rows;
  Space space = kGeneric;
  int64_t offset = 0;
  std::string label;
};

class Decoder {
 public:
  explicit Decoder(Function& f) : f_(f), r_{*f.module, f.first_token}, names_(f) {}
  void decode();

 private:
  struct Statement {
    int guard = -1;
    bool negate = false;
    int line = 0;
  };
  void body();
  void block_item(const Token&);
  void label_or_table(const std::string& name);
  void statement();
  bool control(const std::string& base, const Statement&);
  void call(const Statement&);
  void inline_function(Function&, const std::vector<std::string>& results,
                       const std::vector<std::string>& given, const Statement&);
  void bind(Scope&, const std::vector<Param>&, const std::vector<std::string>& actual);
  std::vector<std::string> list();
  Operand value();
  Operand number_or_name();
  Operand operand();
  Operand address();
  void place_operands(Instruction&, const Opcode&, const std::vector<Operand>&);
  void place_sources(Instruction&, const Operand&);
  int helper(const char* opcode, int first, int second);
  Instruction start(const Statement&, Kind) const;
  void jump(const Statement&, const std::string& label);
  int place_of(const std::string& label) const;

  Function& f_;
  Reader r_;
  Names names_;
  std::map<std::string, int> labels_;
  std::vector<std::pair<size_t, std::string>> jumps_;
  struct Table {
    std::vector<int>* places;
    std::vector<std::string> labels;
  };
  std::map<std::string, Table> tables_;
  std::string prefix_;     // of labels, in a called function
  std::string return_to_;  // where ret goes in one
  int calls_ = 0, depth_ = 0;
};

Instruction Decoder::start(const Statement& s, Kind kind) const {
  Instruction i;
  i.kind = kind;
  i.guard = s.guard, i.negate_guard = s.negate;
  i.line = s.line;
  return i;
}

void Decoder::jump(const Statement& s, const std::string& label) {
  jumps_.push_back({f_.code.size(), label});
  f_.code.push_back(start(s, kBranch));
}

int Decoder::place_of(const std::string& label) const {
  const auto found = labels_.find(label);
  if (found == labels_.end()) throw Error{218, "a label is not known: " + label};
  return found->second;
}

// An instruction that an operand needs; returns the row of its result.
int Decoder::helper(const char* opcode, int first, int second) {
  Instruction i = start({}, kNormal);
  i.line = r_.now().line;
  i.dest[0] = names_.new_row();
  i.source[0] = first, i.source[1] = second;
  i.sources = 2;
  choose_operation(i, Opcode(opcode));
  f_.code.push_back(i);
  return i.dest[0];
}

Operand Decoder::number_or_name() {
  Operand o;
  const bool minus = r_.take("-");
  const Token& t = r_.now();
  if (t.type == Token::kNumber || t.type == Token::kFloat || t.type == Token::kDouble) {
    const u64 sign = t.type == Token::kFloat ? 1ull << 31 : 1ull << 63;
    const u64 v = !minus ? t.value : t.type == Token::kNumber ? 0 - t.value : t.value ^ sign;
    ++r_.at;
    o.row = names_.constant(v);
    return o;
  }
  const std::string name = r_.name();
  if (name == "_") return o;
  o.row = names_.special(name);
  if (o.row < 0) o.row = names_.find_register(name);
  if (o.row >= 0) return o;
  if (const Variable* v = names_.find_variable(name)) {
    const u64 more =
        r_.is("+") && r_.m.tokens[r_.at + 1].type == Token::kNumber ? (++r_.at, r_.number()) : 0;
    o.row = names_.constant(Names::address_of(*v) + more);
    o.space = v->space;
  } else {
    o.type = Operand::kLabel;
    o.label = name;
  }
  return o;
}

Operand Decoder::value() {
  if (!r_.take("!")) return number_or_name();
  Operand o = number_or_name();
  o.row = helper("not.pred", o.row, 0);
  return o;
}

Operand Decoder::address() {
  Operand o = number_or_name();
  if (o.type != Operand::kRow) r_.fail("an address is not known: " + o.label);
  o.type = Operand::kAddress;
  if (r_.take("+") || r_.is("-")) o.offset = int64_t(r_.number());
  r_.need("]");
  return o;
}

Operand Decoder::operand() {
  if (r_.take("[")) return address();
  Operand o;
  if (r_.take("{")) {
    o.type = Operand::kVector;
    do {
      o.rows.push_back(value().row);
    } while (r_.take(","));
    r_.need("}");
    if (o.rows.size() > 8) r_.fail("a vector of more than 8");
    return o;
  }
  o = value();
  if (r_.take("|")) o.second = value().row;
  return o;
}

// Those without a result: all their operands are sources.
bool has_result(const Opcode& op) {
  static const char* const without[] = {"st",
                                        "red",
                                        "bar",
                                        "barrier",
                                        "membar",
                                        "fence",
                                        "cp",
                                        "prefetch",
                                        "prefetchu",
                                        "discard",
                                        "applypriority",
                                        "nanosleep",
                                        "griddepcontrol",
                                        "pmevent"};
  if (op.base() == "bar" || op.base() == "barrier") return op.has("red");
  return std::find(std::begin(without), std::end(without), op.base()) == std::end(without);
}

void Decoder::place_sources(Instruction& i, const Operand& o) {
  std::vector<int> rows = o.type == Operand::kVector ? o.rows : std::vector<int>{o.row};
  if (o.second >= 0) rows.push_back(o.second);
  if (o.type == Operand::kAddress) {
    if (i.space == kGeneric) i.space = o.space;
    // The offset of the first address is the instruction's.
    if (i.sources == 0)
      i.offset = o.offset;
    else if (o.offset)
      rows = {helper("add.u64", o.row, names_.constant(u64(o.offset)))};
  }
  for (int row : rows) {
    if (i.sources == std::size(i.source)) r_.fail("too many operands");
    i.source[i.sources++] = row;
  }
}

void Decoder::place_operands(Instruction& i, const Opcode& op,
                             const std::vector<Operand>& operands) {
  const bool result = has_result(op);
  for (const Operand& o : operands) {
    if (o.type == Operand::kLabel) r_.fail("an operand is not known: " + o.label);
    if (o.type == Operand::kVector && (&o == &operands[0] || !result))
      i.elements = u8(o.rows.size());
    if (!result || &o != &operands[0]) {
      place_sources(i, o);
    } else if (o.type == Operand::kVector) {
      std::copy(o.rows.begin(), o.rows.end(), i.dest);
    } else {
      i.dest[0] = o.row;
      i.dest[1] = std::max(o.second, 0);
    }
  }
}

std::vector<std::string> Decoder::list() {
  std::vector<std::string> out;
  r_.need("(");
  while (!r_.take(")"))
    if (!r_.take(",")) out.push_back(r_.name());
  return out;
}

void Decoder::call(const Statement& s) {
  std::vector<std::string> results, given;
  if (r_.is("(")) {
    results = list();
    r_.need(",");
  }
  const std::string callee = r_.name();
  if (r_.take(",")) given = list();
  r_.need(";");
  if (callee == "__assertfail") {
    f_.code.push_back(start(s, kTrap));
    return;
  }
  const auto found = f_.module->functions.find(callee);
  if (found == f_.module->functions.end()) r_.fail("a call of what is not known: " + callee);
  if (++depth_ > 32) r_.fail("functions that call themselves are not known");
  inline_function(*found->second, results, given, s);
  --depth_;
}

// The callee's names for its parameters are those of the caller's variables.
void Decoder::bind(Scope& scope, const std::vector<Param>& params,
                   const std::vector<std::string>& actual) {
  if (params.size() != actual.size()) r_.fail("a call with another number of arguments");
  for (size_t k = 0; k < params.size(); ++k) {
    const Variable* v = names_.find_variable(actual[k]);
    if (!v) r_.fail("an argument is not known: " + actual[k]);
    scope.variables[params[k].name] = *v;
  }
}

void Decoder::inline_function(Function& callee, const std::vector<std::string>& results,
                              const std::vector<std::string>& given, const Statement& s) {
  Scope scope;
  bind(scope, callee.results, results);
  bind(scope, callee.params, given);
  const std::string outer_prefix = prefix_, outer_return = return_to_;
  prefix_ = format("call%d:", ++calls_);
  return_to_ = prefix_ + "end";
  if (s.guard >= 0) jump({s.guard, !s.negate, s.line}, return_to_);
  std::vector<Scope> outer;
  outer.swap(names_.scopes);
  names_.scopes = {Scope{}, scope};
  const size_t back = r_.at;
  r_.at = callee.first_token;
  body();
  r_.at = back;
  labels_[return_to_] = int(f_.code.size());
  names_.scopes.swap(outer);
  prefix_ = outer_prefix, return_to_ = outer_return;
}

// Branches and ends; false: something else.
bool Decoder::control(const std::string& base, const Statement& s) {
  if (base == "call") {
    call(s);
    return true;
  }
  if (base == "bra") {
    jump(s, prefix_ + r_.name());
  } else if (base == "ret" && !return_to_.empty()) {
    jump(s, return_to_);
  } else if (base == "ret" || base == "exit") {
    f_.code.push_back(start(s, kExit));
  } else if (base == "trap" || base == "brkpt") {
    f_.code.push_back(start(s, kTrap));
  } else if (base == "brx") {
    Instruction i = start(s, kIndexedBranch);
    i.source[0] = number_or_name().row;
    r_.need(",");
    const auto table = tables_.find(prefix_ + r_.name());
    if (table == tables_.end()) r_.fail("a table of branches is not known");
    i.table = table->second.places;
    f_.code.push_back(i);
  } else {
    return false;
  }
  r_.need(";");
  return true;
}

void Decoder::statement() {
  Statement s;
  s.line = r_.now().line;
  if (r_.take("@")) {
    s.negate = r_.take("!");
    s.guard = names_.find_register(r_.name());
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

void Decoder::label_or_table(const std::string& name) {
  r_.need(":");
  if (!r_.take(".branchtargets")) {
    labels_[prefix_ + name] = int(f_.code.size());
    return;
  }
  Table& table = tables_[prefix_ + name];
  f_.tables.push_back(std::make_unique<std::vector<int>>());
  table.places = f_.tables.back().get();
  do {
    table.labels.push_back(prefix_ + r_.name());
  } while (r_.take(","));
  r_.need(";");
}

void Decoder::block_item(const Token& t) {
  if (t.text == ".pragma") return r_.skip_to(";");
  if (t.text == ".loc") return r_.skip_line();
  if (r_.take(".reg")) return names_.declare_registers(r_);
  if (r_.take(".shared")) return names_.declare_variable(r_, kShared);
  if (r_.take(".local") || r_.take(".param")) return names_.declare_variable(r_, kLocal);
  if (t.type != Token::kName || r_.m.tokens[r_.at + 1].text != ":") return statement();
  ++r_.at;
  label_or_table(t.text);
}

void Decoder::body() {
  int braces = 0;
  do {
    if (r_.take("{")) {
      names_.scopes.push_back({});
      ++braces;
    } else if (r_.take("}")) {
      names_.scopes.pop_back();
      --braces;
    } else if (!r_.take(";")) {
      block_item(r_.now());
    }
  } while (braces);
}

void Decoder::decode() {
  body();
  f_.code.push_back(start({}, kExit));
  for (const auto& [at, label] : jumps_) f_.code[at].target = place_of(label);
  for (const auto& [name, table] : tables_)
    for (const std::string& label : table.labels) table.places->push_back(place_of(label));
  f_.static_shared = names_.shared;
  names_.place_dynamic_shared();
}

}  // namespace

void decode(Function& f) { Decoder(f).decode(); }

}  // namespace sg
