// SPDX-License-Identifier: MIT
// Loads modules: their variables, and the heads of their functions.
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "tokens.h"

namespace sg {

namespace {

// The bytes that a variable begins with: zeros where nothing is said.
std::vector<u8> initial_bytes(Reader& r, const Declaration& d) {
  std::vector<u8> bytes(d.bytes);
  if (!r.take("=")) return bytes;
  size_t at = 0;
  int depth = 0;
  do {
    if (r.is("{") || r.is("}")) {
      depth += r.is("{") - r.is("}");
      ++r.at;
      continue;
    }
    if (r.take(",")) continue;
    u64 value = 0;
    if (r.now().type == Token::kFloat || r.now().type == Token::kDouble) {
      value = r.m.tokens[r.at++].value;
    } else if (r.now().type == Token::kName) {
      const bool generic = r.take("generic");
      if (generic) r.need("(");
      const auto found = r.m.variables.find(r.name());
      if (found == r.m.variables.end()) r.fail("an initial value names what is not known");
      value = found->second.address;
      if (generic) r.need(")");
      if (r.take("+")) value += r.number();
    } else {
      value = r.number();
    }
    if (at + d.element > bytes.size()) r.fail("more initial values than elements");
    memcpy(&bytes[at], &value, std::min<size_t>(d.element, 8));
    at += d.element;
  } while (depth);
  return bytes;
}

void read_variable(Reader& r, Space space, bool external) {
  Module& m = r.m;
  const Declaration d = r.declaration();
  if (space == kShared) {
    m.shared = int(round_up(m.shared, d.open ? 1 : d.align));
    m.variables[d.name] = {kShared, d.open ? Variable::kDynamic : u64(m.shared), d.bytes};
    m.shared += int(d.bytes);
  } else if (external) {
    if (!m.variables.count(d.name)) r.fail("a variable of another module");
  } else {
    const std::vector<u8> bytes = initial_bytes(r, d);
    const u64 address = allocate(std::max<size_t>(d.bytes, 1), m.device, 2);
    memcpy(reinterpret_cast<void*>(address), bytes.data(), bytes.size());
    m.allocated.push_back(address);
    m.variables[d.name] = {space, address, d.bytes};
    if (space == kConst) m.constant_bytes += d.bytes;
  }
  r.need(";");
}

// .maxntid 256 and the like, up to the body.
void read_directives(Reader& r, Function& f) {
  while (!r.is("{") && !r.is(";")) {
    const std::string word = r.name();
    if (word == ".noreturn" || word == ".explicitcluster") continue;
    unsigned v[3] = {1, 1, 1};
    int n = 0;
    do {
      if (n == 3) r.fail("more than three numbers");
      v[n++] = unsigned(r.number());
    } while (r.take(","));
    if (word == ".maxntid" || word == ".reqntid") f.max_threads = int(v[0] * v[1] * v[2]);
    if (word == ".reqntid") std::copy(v, v + 3, f.required);
    if (word == ".reqnctapercluster") std::copy(v, v + 3, f.cluster);
    static const char* const known[] = {".maxntid",      ".reqntid", ".reqnctapercluster",
                                        ".minnctapersm", ".maxnreg", ".maxclusterrank"};
    if (std::find(std::begin(known), std::end(known), word) == std::end(known))
      r.fail("a directive is not known: " + word);
  }
}

void read_function(Reader& r, bool kernel) {
  auto f = std::make_unique<Function>();
  f->module = &r.m;
  if (!kernel && r.is("(")) f->results = r.params();
  f->name = r.name();
  if (r.is("(")) f->params = r.params(&f->params_size);
  read_directives(r, *f);
  if (r.take(";")) return;  // declared, not defined
  f->first_token = r.at;
  r.skip_braces();
  const std::string name = f->name;
  (kernel ? r.m.kernels : r.m.functions)[name] = std::move(f);
}

void read_module(Module& m) {
  Reader r{m};
  bool external = false;
  while (r.now().type != Token::kEnd) {
    const std::string word = r.name();
    if (word == ".extern") {
      external = true;
      continue;
    }
    if (word == ".version" || word == ".target" || word == ".file") {
      r.skip_line();
    } else if (word == ".address_size") {
      if (r.number() != 64) r.fail("only 64-bit addresses are known");
    } else if (word == ".visible" || word == ".weak") {
    } else if (word == ".global" || word == ".const" || word == ".shared") {
      read_variable(r, word == ".global" ? kGlobal : word == ".const" ? kConst : kShared, external);
    } else if (word == ".section") {
      r.name();
      r.skip_braces();
    } else if (word == ".pragma") {
      r.skip_to(";");
    } else if (word == ".entry" || word == ".func") {
      read_function(r, word == ".entry");
    } else {
      r.fail("not known: " + word);
    }
    external = false;
  }
}

// What the driver refuses when it loads a kernel.
void check_sizes(const Function& f) {
  if (f.params_size > 32764) throw Error{218, f.name + ": more than 32764 bytes of parameters"};
  if (f.static_shared > kStaticShared)
    throw Error{218, format("%s: %d bytes of static shared memory, %d allowed", f.name.c_str(),
                            f.static_shared, kStaticShared)};
}

}  // namespace

Module::~Module() {
  for (u64 address : allocated) release(address);
}

std::string Module::line(int number) const {
  size_t at = 0;
  for (int i = 1; i < number && at < text.size(); ++i)
    at = std::min(text.find('\n', at), text.size()) + 1;
  std::string out = at < text.size() ? text.substr(at, text.find('\n', at) - at) : "";
  std::replace(out.begin(), out.end(), '\t', ' ');
  return out.erase(0, std::min(out.find_first_not_of(' '), out.size()));
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
  for (auto& [name, f] : m->kernels) {
    try {
      decode(*f);
    } catch (Error& error) {
      error.text = "kernel " + name + ": " + error.text;
      throw;
    }
    check_sizes(*f);
  }
  if (m->constant_bytes > 65536) throw Error{218, "more than 64 KiB of constants"};
  return m.release();
}

Function* find_function(Module* m, const std::string& name) {
  const auto found = m->kernels.find(name);
  return found == m->kernels.end() ? nullptr : found->second.get();
}
bool find_global(Module* m, const std::string& name, u64* address, size_t* bytes) {
  const auto found = m->variables.find(name);
  if (found == m->variables.end() || found->second.space == kShared) return false;
  *address = found->second.address;
  *bytes = found->second.bytes;
  return true;
}
int const_bytes(Function* f) { return int(f->module->constant_bytes); }

}  // namespace sg
