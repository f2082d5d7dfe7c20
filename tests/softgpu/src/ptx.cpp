// SPDX-License-Identifier: MIT
// Reads PTX text and decodes the kernels in it.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <fstream>

#include "machine.h"

namespace sg {

std::string Module::line(int number) const {
  size_t at = 0;
  for (int i = 1; i < number && at != std::string::npos; ++i) {
    at = text.find('\n', at);
    if (at != std::string::npos) ++at;
  }
  if (at == std::string::npos) return "";
  std::string out = text.substr(at, text.find('\n', at) - at);
  for (char& c : out)
    if (c == '\t') c = ' ';
  out.erase(0, out.find_first_not_of(' ') == std::string::npos ? 0 : out.find_first_not_of(' '));
  return out;
}

static std::vector<Token> tokens_of(const std::string& text) {
  std::vector<Token> out;
  size_t i = 0;
  int line = 1;
  auto word = [](char c) { return isalnum(u8(c)) || c == '_' || c == '.' || c == '$' || c == '%'; };
  while (i < text.size()) {
    const char c = text[i];
    if (c == '\n') {
      ++line, ++i;
    } else if (isspace(u8(c))) {
      ++i;
    } else if (c == '/' && text.compare(i, 2, "//") == 0) {
      while (i < text.size() && text[i] != '\n') ++i;
    } else if (c == '/' && text.compare(i, 2, "/*") == 0) {
      const size_t end = text.find("*/", i);
      for (; i < std::min(end + 2, text.size()); ++i) line += text[i] == '\n';
    } else if (c == '"') {
      const size_t end = text.find('"', i + 1);
      out.push_back({Token::kString, text.substr(i + 1, end - i - 1), 0, line});
      i = end + 1;
    } else if (isdigit(u8(c))) {
      size_t end = i;
      Token t{Token::kNumber, "", 0, line};
      if (c == '0' && (text[i + 1] == 'f' || text[i + 1] == 'F') && isxdigit(u8(text[i + 2]))) {
        t.type = Token::kFloat;
        t.value = strtoull(text.substr(i + 2, 8).c_str(), nullptr, 16);
        end = i + 10;
      } else if (c == '0' && (text[i + 1] == 'd' || text[i + 1] == 'D') &&
                 isxdigit(u8(text[i + 2]))) {
        t.type = Token::kDouble;
        t.value = strtoull(text.substr(i + 2, 16).c_str(), nullptr, 16);
        end = i + 18;
      } else {
        while (isalnum(u8(text[end])) || text[end] == '.') ++end;
        std::string s = text.substr(i, end - i);
        while (!s.empty() && (s.back() == 'U' || s.back() == 'u')) s.pop_back();
        if (s.find('.') != std::string::npos) {
          const double v = strtod(s.c_str(), nullptr);
          t.type = Token::kDouble;
          memcpy(&t.value, &v, 8);
        } else if (s.size() > 2 && (s[1] == 'b' || s[1] == 'B')) {
          t.value = strtoull(s.c_str() + 2, nullptr, 2);
        } else {
          t.value = strtoull(s.c_str(), nullptr, 0);
        }
      }
      t.text = text.substr(i, end - i);
      out.push_back(t);
      i = end;
    } else if (word(c)) {
      size_t end = i;
      while (end < text.size()) {
        if (word(text[end])) {
          ++end;
        } else if (text[end] == ':' && text[end + 1] == ':' && isalpha(u8(text[end + 2]))) {
          end += 2;
        } else {
          break;
        }
      }
      out.push_back({Token::kName, text.substr(i, end - i), 0, line});
      i = end;
    } else {
      out.push_back({Token::kPunctuation, std::string(1, c), 0, line});
      ++i;
    }
  }
  out.push_back({Token::kEnd, "", 0, line});
  return out;
}

static size_t size_of(const std::string& type) {
  static const std::map<std::string, size_t> known = {
      {".b8", 1},  {".u8", 1},  {".s8", 1},    {".b16", 2},    {".u16", 2},
      {".s16", 2}, {".f16", 2}, {".bf16", 2},  {".b32", 4},    {".u32", 4},
      {".s32", 4}, {".f32", 4}, {".f16x2", 4}, {".bf16x2", 4}, {".b64", 8},
      {".u64", 8}, {".s64", 8}, {".f64", 8},   {".pred", 1},   {".b128", 16}};
  auto found = known.find(type);
  return found == known.end() ? 0 : found->second;
}

struct Reader {
  Module& m;
  size_t at = 0;
  const Token& now() const { return m.tokens[at]; }
  bool is(const char* text) const { return now().text == text && now().type != Token::kString; }
  bool take(const char* text) {
    if (!is(text)) return false;
    ++at;
    return true;
  }
  [[noreturn]] void bad(const std::string& what) const {
    throw Error{
        218, format("PTX line %d: %s: %s", now().line, what.c_str(), m.line(now().line).c_str())};
  }
  void need(const char* text) {
    if (!take(text)) bad(format("expected '%s', found '%s'", text, now().text.c_str()));
  }
  std::string name() {
    if (now().type != Token::kName) bad("expected a name");
    return m.tokens[at++].text;
  }
  u64 number() {
    const bool minus = take("-");
    if (now().type != Token::kNumber) bad("expected a number");
    const u64 v = m.tokens[at++].value;
    return minus ? 0 - v : v;
  }
  void skip_braces() {
    int depth = 0;
    do {
      if (now().type == Token::kEnd) bad("unmatched brace");
      if (is("{")) ++depth;
      if (is("}")) --depth;
      ++at;
    } while (depth);
  }
  // A declaration after its space: .align n, .ptr and so on, a type, a name, and sizes.
  struct Declared {
    std::string name, type;
    size_t align, element, bytes;
    bool open = false;
  };
  Declared declared() {
    Declared d{"", "", 0, 0, 0};
    for (;;) {
      const std::string word = name();
      if (word == ".align") {
        d.align = number();
      } else if (word == ".v2" || word == ".v4") {
        d.bytes = word == ".v2" ? 2 : 4;
      } else if (size_of(word)) {
        d.type = word;
        d.element = size_of(word);
      } else if (word[0] == '.') {
        continue;  // .ptr, .global, .attribute...
      } else {
        d.name = word;
        break;
      }
    }
    d.bytes = d.element * std::max<size_t>(d.bytes, 1);
    if (!d.align) d.align = d.element;
    while (take("[")) {
      if (take("]")) {
        d.open = true;
        d.bytes = 0;
      } else {
        d.bytes *= number();
        need("]");
      }
    }
    return d;
  }
};

static size_t round_up(size_t n, size_t to) { return to ? (n + to - 1) / to * to : n; }

static void module_variable(Reader& r, Module& m, Space space, bool outside) {
  auto d = r.declared();
  if (m.variables.count(d.name) && outside) {
    while (!r.take(";")) ++r.at;
    return;
  }
  if (space == kShared) {
    if (d.open) {
      m.variables[d.name] = {kShared, ~0ull, 0};  // after all others
    } else {
      m.shared = int(round_up(m.shared, d.align));
      m.variables[d.name] = {kShared, u64(m.shared), d.bytes};
      m.shared += int(d.bytes);
    }
    r.need(";");
    return;
  }
  std::vector<u8> bytes(d.bytes);
  size_t at = 0;
  auto value = [&] {
    u64 v = 0;
    if (r.now().type == Token::kFloat || r.now().type == Token::kDouble) {
      v = r.now().value;
      ++r.at;
    } else if (r.now().type == Token::kName) {
      std::string n = r.name();
      if (n == "generic") {
        r.need("(");
        n = r.name();
        r.need(")");
      }
      auto found = m.variables.find(n);
      if (found == m.variables.end()) r.bad("an initial value names what is not known");
      v = found->second.address;
      if (r.take("+")) v += r.number();
    } else {
      v = r.number();
    }
    if (at + d.element <= bytes.size()) memcpy(&bytes[at], &v, d.element);
    at += d.element;
  };
  if (r.take("=")) {
    if (r.is("{")) {
      int depth = 0;
      do {
        if (r.take("{"))
          ++depth;
        else if (r.take("}"))
          --depth;
        else if (!r.take(","))
          value();
      } while (depth);
    } else {
      value();
    }
  }
  r.need(";");
  const u64 to = allocate(std::max<size_t>(d.bytes, 1), m.device, 2);
  memcpy(reinterpret_cast<void*>(to), bytes.data(), d.bytes);
  m.allocated.push_back(to);
  m.variables[d.name] = {space, to, d.bytes};
  if (space == kConst) m.constant_bytes += d.bytes;
}

static std::vector<Param> params_in(Reader& r, size_t& size) {
  std::vector<Param> out;
  size = 0;
  r.need("(");
  while (!r.take(")")) {
    r.take(",");
    if (r.take(")")) break;
    if (r.name() != ".param") r.bad("expected .param");
    auto d = r.declared();
    size = round_up(size, d.align);
    out.push_back({d.name, size, d.bytes});
    size += d.bytes;
  }
  return out;
}

static void read_module(Module& m) {
  Reader r{m};
  bool outside = false;
  while (r.now().type != Token::kEnd) {
    const std::string word = r.name();
    if (word == ".version") {
      ++r.at;
    } else if (word == ".target") {
      do r.name();
      while (r.take(","));
    } else if (word == ".address_size") {
      if (r.number() != 64) r.bad("only 64-bit addresses are known");
    } else if (word == ".visible" || word == ".weak" || word == ".common") {
    } else if (word == ".extern") {
      outside = true;
      continue;
    } else if (word == ".global") {
      module_variable(r, m, kGlobal, outside);
    } else if (word == ".const") {
      module_variable(r, m, kConst, outside);
    } else if (word == ".shared") {
      module_variable(r, m, kShared, outside);
    } else if (word == ".file") {
      const int line = r.now().line;
      while (r.now().line == line && r.now().type != Token::kEnd) ++r.at;
    } else if (word == ".section") {
      r.name();
      r.skip_braces();
    } else if (word == ".pragma") {
      while (!r.take(";")) ++r.at;
    } else if (word == ".entry" || word == ".func") {
      Function* f = new Function;
      f->module = &m;
      size_t ignored;
      if (word == ".func" && r.is("(")) params_in(r, ignored);
      f->name = r.name();
      if (r.is("(")) f->params = params_in(r, f->params_size);
      while (!r.is("{") && !r.is(";")) {
        const std::string d = r.name();
        if (d == ".maxntid" || d == ".reqntid" || d == ".reqnctapercluster") {
          unsigned v[3] = {1, 1, 1};
          int n = 0;
          do v[n++] = unsigned(r.number());
          while (r.take(","));
          if (d == ".maxntid") f->max_threads = int(v[0] * v[1] * v[2]);
          if (d == ".reqntid") {
            std::copy(v, v + 3, f->required);
            f->max_threads = int(v[0] * v[1] * v[2]);
          }
          if (d == ".reqnctapercluster") std::copy(v, v + 3, f->cluster);
        } else if (d == ".minnctapersm" || d == ".maxnreg" || d == ".maxclusterrank") {
          r.number();
        } else if (d == ".explicitcluster" || d == ".noreturn" || d == ".blocksareclusters") {
        } else {
          r.bad("a directive is not known: " + d);
        }
      }
      if (!r.take(";")) {
        f->first_token = r.at;
        r.skip_braces();
        (word == ".entry" ? m.entries : m.functions)[f->name] = f;
      } else {
        delete f;
      }
    } else {
      r.bad("not known: " + word);
    }
    outside = false;
  }
}

Module* load_module(const std::string& text, int device) {
  static int count = 0;
  if (!settings().dump.empty())
    std::ofstream(format("%s/%d.%d.ptx", settings().dump.c_str(), int(getpid()), count++)) << text;
  auto m = std::make_unique<Module>();
  m->device = device;
  m->text = text;
  m->tokens = tokens_of(m->text);
  read_module(*m);
  for (auto& [name, f] : m->entries) {
    // The driver places shared and constant memory and checks their sizes.
    try {
      decode(f);
    } catch (Error& error) {
      error.text = "kernel " + name + ": " + error.text;
      throw;
    }
    if (f->params_size > 32764) throw Error{218, name + ": more than 32764 bytes of parameters"};
    if (f->static_shared > kStaticShared)
      throw Error{218, format("%s: %d bytes of static shared memory, %d allowed", name.c_str(),
                              f->static_shared, kStaticShared)};
  }
  if (m->constant_bytes > 65536) throw Error{218, "more than 64 KiB of constants"};
  return m.release();
}

void unload(Module* m) {
  for (u64 address : m->allocated) release(address);
  for (auto& [name, f] : m->entries) delete f;
  for (auto& [name, f] : m->functions) delete f;
  delete m;
}
Function* find_function(Module* m, const std::string& name) {
  auto found = m->entries.find(name);
  return found == m->entries.end() ? nullptr : found->second;
}
bool find_global(Module* m, const std::string& name, u64* address, size_t* bytes) {
  auto found = m->variables.find(name);
  if (found == m->variables.end() || found->second.space == kShared) return false;
  *address = found->second.address;
  *bytes = found->second.bytes;
  return true;
}
Module* module_of(Function* f) { return f->module; }
const std::string& name_of(Function* f) { return f->name; }
std::vector<std::pair<size_t, size_t>> params_of(Function* f) {
  std::vector<std::pair<size_t, size_t>> out;
  for (auto& p : f->params) out.push_back({p.offset, p.size});
  return out;
}
std::vector<Function*> functions_of(Module* m) {
  std::vector<Function*> out;
  for (auto& [name, f] : m->entries) out.push_back(f);
  return out;
}
int static_shared(Function* f) { return f->static_shared; }
int local_bytes(Function* f) { return f->local; }
int const_bytes(Function* f) { return int(f->module->constant_bytes); }
int max_threads(Function* f) { return f->max_threads; }
int& max_dynamic_shared(Function* f) { return f->max_dynamic; }
int& nonportable_cluster(Function* f) { return f->nonportable; }
bool cluster_of(Function* f, unsigned out[3]) {
  std::copy(f->cluster, f->cluster + 3, out);
  return f->cluster[0] != 0;
}

// The bodies.
namespace {

struct Scope {
  std::map<std::string, int> registers;
  std::map<std::string, std::pair<int, int>> counted;  // %r<9>: the first row and how many
  std::map<std::string, Variable> variables;
};

struct Operand {
  enum Type { kRow, kAddress, kVector, kLabel, kNone } type = kNone;
  int row = 0, second = -1;  // second: of a|b
  std::vector<int> rows;
  Space space = kGeneric;
  bool symbol = false;
  int64_t offset = 0;
  std::string text;
};

struct Decoder {
  Function& f;
  Module& m;
  Reader r;
  std::vector<Scope> scopes;
  std::map<std::string, int> labels;
  std::vector<std::pair<int, std::string>> jumps;
  std::vector<std::pair<std::vector<int>*, std::vector<std::string>>> tables;
  std::map<std::string, std::vector<int>*> table_names;
  std::map<u64, int> constants;
  std::map<std::string, int> specials;
  int shared = 0;
  std::string prefix;     // of labels, of an inlined function
  std::string return_to;  // where ret goes in one
  int inlined = 0, depth = 0;

  explicit Decoder(Function& function) : f(function), m(*function.module), r{*function.module} {
    f.rows = 1;  // row 0 is a sink
    shared = m.shared;
  }
  int new_row() { return f.rows++; }
  int constant(u64 value) {
    auto [at, fresh] = constants.insert({value, 0});
    if (fresh) {
      at->second = new_row();
      f.constants.push_back({at->second, value});
    }
    return at->second;
  }
  int special(const std::string& name) {
    auto [at, fresh] = specials.insert({name, 0});
    if (fresh) {
      at->second = new_row();
      f.specials.push_back({name, at->second});
    }
    return at->second;
  }
  int find_register(const std::string& name) {
    for (size_t i = scopes.size(); i-- > 0;) {
      auto found = scopes[i].registers.find(name);
      if (found != scopes[i].registers.end()) return found->second;
      size_t digits = name.size();
      while (digits > 0 && isdigit(u8(name[digits - 1]))) --digits;
      if (digits < name.size()) {
        auto counted = scopes[i].counted.find(name.substr(0, digits));
        if (counted != scopes[i].counted.end()) {
          const int k = atoi(name.c_str() + digits);
          if (k < counted->second.second) return counted->second.first + k;
        }
      }
    }
    return -1;
  }
  const Variable* find_variable(const std::string& name) {
    for (size_t i = scopes.size(); i-- > 0;) {
      auto found = scopes[i].variables.find(name);
      if (found != scopes[i].variables.end()) return &found->second;
    }
    auto found = m.variables.find(name);
    return found == m.variables.end() ? nullptr : &found->second;
  }
  static bool is_special(const std::string& n) {
    static const char* const known[] = {"%tid",
                                        "%ntid",
                                        "%ctaid",
                                        "%nctaid",
                                        "%laneid",
                                        "%warpid",
                                        "%nwarpid",
                                        "%lanemask_",
                                        "%cluster",
                                        "%nclusterid",
                                        "%is_explicit_cluster",
                                        "%smid",
                                        "%nsmid",
                                        "%gridid",
                                        "%dynamic_smem_size",
                                        "%total_smem_size",
                                        "%clock",
                                        "%globaltimer"};
    for (const char* k : known)
      if (n.compare(0, strlen(k), k) == 0) return true;
    return false;
  }
  u64 address_of(const Variable& v) {
    if (v.space == kShared) return v.address == ~0ull ? kDynamicMark : kReservedShared + v.address;
    if (v.space == kParam) return kParamWindow | v.address;
    return v.address;
  }
  static constexpr u64 kDynamicMark = 0xdd00dd00dd00dd00ull;  // replaced when all is placed

  // Adds an instruction that a guard or a negated operand needs.
  int negated(int row) {
    Ins i;
    Parts p{{"not", "pred"}};
    choose(i, p);
    i.d[0] = new_row();
    i.s[0] = row;
    i.line = r.now().line;
    f.code.push_back(i);
    return i.d[0];
  }

  Operand value() {
    Operand o;
    o.type = Operand::kRow;
    if (r.take("!")) {
      o.row = negated(value().row);
      return o;
    }
    const bool minus = r.take("-");
    const Token& t = r.now();
    if (t.type == Token::kNumber) {
      ++r.at;
      o.row = constant(minus ? 0 - t.value : t.value);
      o.offset = int64_t(minus ? 0 - t.value : t.value);
      o.symbol = true;
    } else if (t.type == Token::kFloat) {
      ++r.at;
      o.row = constant(t.value ^ (minus ? 0x80000000ull : 0));
    } else if (t.type == Token::kDouble) {
      ++r.at;
      o.row = constant(t.value ^ (minus ? 1ull << 63 : 0));
    } else if (t.type == Token::kName) {
      std::string n = r.name();
      o.text = n;
      if (n == "_") {
        o.row = 0;
      } else if (is_special(n)) {
        o.row = special(n);
      } else if (int row = find_register(n); row >= 0) {
        o.row = row;
      } else if (const Variable* v = find_variable(n)) {
        u64 address = address_of(*v);
        if (r.take("+")) address += r.number();
        o.row = constant(address);
        o.space = v->space;
        o.symbol = true;
      } else {
        o.type = Operand::kLabel;
        o.text = n;
      }
    } else {
      r.bad("an operand is not known");
    }
    return o;
  }
  Operand operand() {
    Operand o;
    if (r.take("[")) {
      o = value();
      if (o.type != Operand::kRow) r.bad("an address is not known");
      const bool number = o.symbol && o.text.empty();
      const int64_t base = o.offset;
      o.type = Operand::kAddress;
      o.offset = 0;
      if (r.take("+"))
        o.offset = int64_t(r.number());
      else if (r.is("-"))
        o.offset = int64_t(r.number());
      if (number) o.row = constant(u64(base));
      while (!r.take("]")) ++r.at;
      return o;
    }
    if (r.take("{")) {
      o.type = Operand::kVector;
      do o.rows.push_back(value().row);
      while (r.take(","));
      r.need("}");
      return o;
    }
    o = value();
    if (r.take("|")) o.second = value().row;
    return o;
  }

  void declare_registers() {
    r.name();  // the type
    do {
      const std::string n = r.name();
      if (r.take("<")) {
        const int count = int(r.number());
        r.need(">");
        scopes.back().counted[n] = {f.rows, count};
        f.rows += count;
      } else {
        scopes.back().registers[n] = new_row();
      }
    } while (r.take(","));
    r.need(";");
  }
  void declare_variable(Space space) {
    auto d = r.declared();
    if (space == kShared && d.open) {
      scopes.front().variables[d.name] = {kShared, ~0ull, 0};
    } else if (space == kShared) {
      shared = int(round_up(shared, d.align));
      scopes.front().variables[d.name] = {kShared, u64(shared), d.bytes};
      shared += int(d.bytes);
    } else {  // local memory; a call's parameters are there too
      f.local = int(round_up(f.local, std::max<size_t>(d.align, 8)));
      scopes.back().variables[d.name] = {kLocal, u64(f.local), d.bytes};
      f.local += int(d.bytes);
    }
    r.need(";");
  }

  void call(int guard, bool negate) {
    std::vector<std::string> results, given;
    auto list = [&](std::vector<std::string>& out) {
      r.need("(");
      while (!r.take(")")) {
        if (!r.take(",")) out.push_back(r.name());
      }
    };
    if (r.is("(")) {
      list(results);
      r.need(",");
    }
    const std::string callee = r.name();
    if (r.take(",")) list(given);
    r.need(";");
    if (callee == "__assertfail" || callee == "vprintf") {
      if (callee == "__assertfail") {
        Ins i;
        i.kind = kTrap;
        i.guard = guard, i.negate = negate;
        i.line = r.now().line;
        f.code.push_back(i);
      }
      return;
    }
    auto found = m.functions.find(callee);
    if (found == m.functions.end()) r.bad("a call of what is not known: " + callee);
    if (++depth > 32) r.bad("functions that call themselves are not known");
    const std::string outer_prefix = prefix, outer_return = return_to;
    prefix = format("inlined%d:", ++inlined);
    return_to = prefix + "end";
    if (guard >= 0) {
      Ins i;
      i.kind = kBranch;
      i.guard = guard, i.negate = !negate;
      i.line = r.now().line;
      jumps.push_back({int(f.code.size()), return_to});
      f.code.push_back(i);
    }
    Scope scope;
    // The callee's names for its parameters are those of the caller's variables.
    Reader head{m, found->second->first_token};
    while (!(head.m.tokens[head.at].text == ".func")) --head.at;
    ++head.at;
    size_t ignored;
    std::vector<Param> outs, ins;
    if (head.is("(")) outs = params_in(head, ignored);
    head.name();
    if (head.is("(")) ins = params_in(head, ignored);
    auto bind = [&](const std::vector<Param>& formal, const std::vector<std::string>& actual) {
      for (size_t k = 0; k < formal.size() && k < actual.size(); ++k) {
        const Variable* v = find_variable(actual[k]);
        if (!v) r.bad("an argument is not known");
        scope.variables[formal[k].name] = *v;
      }
    };
    bind(outs, results);
    bind(ins, given);
    std::vector<Scope> caller;
    caller.swap(scopes);
    scopes.push_back(Scope{});  // shared variables are put into the first
    scopes.push_back(scope);
    const size_t back = r.at;
    r.at = found->second->first_token;
    body();
    r.at = back;
    labels[return_to] = int(f.code.size());
    scopes.swap(caller);
    prefix = outer_prefix, return_to = outer_return;
    --depth;
  }

  void statement() {
    int guard = -1;
    bool negate = false;
    const int line = r.now().line;
    if (r.take("@")) {
      negate = r.take("!");
      guard = find_register(r.name());
      if (guard < 0) r.bad("a guard is not known");
    }
    const std::string name = r.name();
    Parts parts;
    for (size_t from = 0; from <= name.size();) {
      const size_t dot = std::min(name.find('.', from), name.size());
      parts.part.push_back(name.substr(from, dot - from));
      from = dot + 1;
    }
    const std::string& base = parts.base();
    if (base == "call") return call(guard, negate);
    Ins ins;
    ins.guard = guard, ins.negate = negate, ins.line = line;
    if (base == "bra") {
      ins.kind = kBranch;
      jumps.push_back({int(f.code.size()), prefix + r.name()});
      r.need(";");
      f.code.push_back(ins);
      return;
    }
    if (base == "ret" || base == "exit") {
      r.need(";");
      if (base == "ret" && !return_to.empty()) {
        ins.kind = kBranch;
        jumps.push_back({int(f.code.size()), return_to});
      } else {
        ins.kind = kExit;
      }
      f.code.push_back(ins);
      return;
    }
    if (base == "trap" || base == "brkpt") {
      r.need(";");
      ins.kind = kTrap;
      f.code.push_back(ins);
      return;
    }
    std::vector<Operand> operands;
    while (!r.take(";")) {
      if (!operands.empty()) r.need(",");
      operands.push_back(operand());
    }
    if (base == "brx") {
      ins.kind = kIndexed;
      ins.s[0] = operands[0].row;
      ins.table = table_names[prefix + operands[1].text];
      if (!ins.table) r.bad("a table of branches is not known");
      f.code.push_back(ins);
      return;
    }
    decode_operands(ins, parts, operands);
    if (!choose(ins, parts)) {
      --r.at;
      r.bad("an instruction is not known: " + name);
    }
    f.code.push_back(ins);
  }

  // Which operands are results: the first, but of what stores, waits and so on.
  void decode_operands(Ins& ins, const Parts& parts, std::vector<Operand>& operands) {
    static const char* const none[] = {"st",
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
                                       "pmevent",
                                       "stackrestore"};
    bool result = !operands.empty();
    for (const char* n : none)
      if (parts.base() == n) result = false;
    if ((parts.base() == "bar" || parts.base() == "barrier") && parts.has("red")) result = true;
    int sources = 0, k = 0;
    for (Operand& o : operands) {
      const bool first = k++ == 0;
      if (o.type == Operand::kLabel) r.bad("an operand is not known: " + o.text);
      if (o.type == Operand::kAddress) {
        // The first address is s[0] of loads and stores; the second one of cp.async comes after.
        if (ins.space == kGeneric && o.space != kGeneric) ins.space = o.space;
        if (sources == 0) {
          ins.offset = o.offset;
          ins.s[sources++] = o.row;
        } else {
          ins.s[sources++] = o.offset ? sum(o.row, o.offset) : o.row;
        }
        continue;
      }
      if (first && result) {
        if (o.type == Operand::kVector) {
          ins.n = u8(o.rows.size());
          for (size_t j = 0; j < o.rows.size() && j < 8; ++j) ins.d[j] = o.rows[j];
        } else {
          ins.d[0] = o.row;
          ins.d[1] = std::max(o.second, 0);
        }
        continue;
      }
      if (o.type == Operand::kVector) {
        if (!result || parts.base() == "mov") ins.n = u8(o.rows.size());
        if (sources + o.rows.size() > 8) {
          // A store of eight: they are in d.
          for (size_t j = 0; j < o.rows.size() && j < 8; ++j) ins.d[j] = o.rows[j];
          ins.flags |= 128;
          continue;
        }
        for (int row : o.rows) ins.s[sources++] = row;
      } else {
        if (sources >= 8) r.bad("too many operands");
        ins.s[sources++] = o.row;
        if (o.second >= 0) ins.s[sources++] = o.second;
      }
    }
    ins.mode = u8(sources);
  }
  int sum(int row, int64_t offset) {
    Ins i;
    Parts p{{"add", "u64"}};
    choose(i, p);
    i.d[0] = new_row();
    i.s[0] = row, i.s[1] = constant(u64(offset));
    i.line = r.now().line;
    f.code.push_back(i);
    return i.d[0];
  }

  void body() {
    r.need("{");
    scopes.push_back(Scope{});
    int braces = 1;
    while (braces) {
      const Token& t = r.now();
      if (r.take("{")) {
        scopes.push_back(Scope{});
        ++braces;
      } else if (r.take("}")) {
        scopes.pop_back();
        --braces;
      } else if (r.take(";")) {
      } else if (t.text == ".reg") {
        ++r.at;
        declare_registers();
      } else if (t.text == ".local" || t.text == ".shared" || t.text == ".param") {
        ++r.at;
        declare_variable(t.text == ".shared" ? kShared : kLocal);
      } else if (t.text == ".pragma") {
        while (!r.take(";")) ++r.at;
      } else if (t.text == ".loc") {
        while (r.now().line == t.line) ++r.at;
      } else if (t.type == Token::kName && m.tokens[r.at + 1].text == ":") {
        const std::string label = prefix + t.text;
        r.at += 2;
        if (r.is(".branchtargets")) {
          ++r.at;
          auto* table = new std::vector<int>;
          std::vector<std::string> names;
          do names.push_back(prefix + r.name());
          while (r.take(","));
          r.need(";");
          tables.push_back({table, names});
          table_names[label] = table;
        } else {
          labels[label] = int(f.code.size());
        }
      } else {
        statement();
      }
    }
  }
};

}  // namespace

void decode(Function* f) {
  Decoder d{*f};
  Scope scope;
  for (auto& p : f->params) scope.variables[p.name] = {kParam, p.offset, p.size};
  d.scopes.push_back(scope);
  d.r.at = f->first_token;
  // Tables of branches stand before the branch that uses them.
  d.body();
  Ins end;
  end.kind = kExit;
  f->code.push_back(end);
  auto place = [&](const std::string& label) {
    auto found = d.labels.find(label);
    if (found == d.labels.end()) throw Error{218, "a label is not known: " + label};
    return found->second;
  };
  for (auto& [at, label] : d.jumps) f->code[at].target = place(label);
  for (auto& [table, names] : d.tables)
    for (auto& n : names) table->push_back(place(n));
  f->static_shared = d.shared;
  for (auto& [row, value] : f->constants)
    if (value == Decoder::kDynamicMark) value = kReservedShared + round_up(d.shared, 16);
  f->decoded = true;
}

}  // namespace sg
