// SPDX-License-Identifier: MIT
// Loads modules: splits PTX into tokens, allocates variables, and reads the headers of kernels.
#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "program.h"

namespace sg {
namespace {

bool is_name_char(char c) { return isalnum(u8(c)) || c == '_' || c == '.' || c == '$' || c == '%'; }

// 0f and 8 hexadecimal digits, or 0d and 16, are the bits of a floating-point number.
Token number(std::string word, int line) {
  Token token{Token::kNumber, word, 0, line};
  const char mark = word.size() > 2 && word[0] == '0' ? char(tolower(word[1])) : ' ';
  if ((mark == 'f' && word.size() == 10) || (mark == 'd' && word.size() == 18)) {
    token.type = mark == 'f' ? Token::kFloat : Token::kDouble;
    token.value = strtoull(word.c_str() + 2, nullptr, 16);
  } else {
    token.value = strtoull(word.c_str(), nullptr, 0);
  }
  return token;
}

size_t end_of_name(const std::string& text, size_t at) {
  for (;;) {
    if (is_name_char(text[at]))
      ++at;
    else if (text.compare(at, 2, "::") == 0 && isalnum(u8(text[at + 2])))
      at += 2;
    else
      return at;
  }
}

std::vector<Token> tokens_of(const std::string& text) {
  std::vector<Token> out;
  int line = 1;
  for (size_t at = 0, end; at < text.size(); at = end) {
    const char c = text[at];
    end = at + 1;
    if (isspace(u8(c))) {
      line += c == '\n';
    } else if (c == '/' && text[at + 1] == '/') {
      end = std::min(text.find('\n', at), text.size());
    } else if (c == '"') {
      end = std::min(text.find('"', at + 1), text.size() - 1) + 1;
      out.push_back({Token::kString, text.substr(at + 1, end - at - 2), 0, line});
    } else if (is_name_char(c)) {
      end = end_of_name(text, at);
      const std::string word = text.substr(at, end - at);
      out.push_back(isdigit(u8(c)) ? number(word, line) : Token{Token::kName, word, 0, line});
    } else {
      out.push_back({Token::kPunctuation, std::string(1, c), 0, line});
    }
  }
  out.push_back({Token::kEnd, "", 0, line});
  return out;
}

// The bytes of .u32, .bf16 and the like. 0: not a type.
size_t size_of(const std::string& type) {
  if (type == ".pred") return 1;
  const size_t digits = std::min(type.find_first_of("0123456789"), type.size());
  static const char* const kinds[] = {".b", ".u", ".s", ".f", ".bf"};
  const auto kind = std::find(std::begin(kinds), std::end(kinds), type.substr(0, digits));
  return kind == std::end(kinds) ? 0 : strtoul(type.c_str() + digits, nullptr, 10) / 8;
}

}  // namespace

void Reader::fail(const std::string& what) const {
  const int line = now().line;
  throw Error{218, format("PTX line %d: %s: %s", line, what.c_str(), m.line(line).c_str())};
}

bool Reader::take(const char* text) {
  const bool found = is(text);
  at += found;
  return found;
}

void Reader::need(const char* text) {
  if (!take(text)) fail(format("expected '%s', found '%s'", text, now().text.c_str()));
}

std::string Reader::name() {
  if (now().type != Token::kName) fail("expected a name");
  return m.tokens[at++].text;
}

u64 Reader::number() {
  const bool minus = take("-");
  if (now().type != Token::kNumber) fail("expected a number");
  const u64 v = m.tokens[at++].value;
  return minus ? 0 - v : v;
}

void Reader::skip_to(const char* text) {
  for (; !take(text); ++at)
    if (now().type == Token::kEnd) fail(format("'%s' is missing", text));
}

void Reader::skip_line() {
  for (const int line = now().line; now().line == line && now().type != Token::kEnd;) ++at;
}

void Reader::skip_braces() {
  int depth = 0;
  do {
    if (now().type == Token::kEnd) fail("unmatched brace");
    depth += is("{") - is("}");
    ++at;
  } while (depth);
}

Declaration Reader::declaration() {
  Declaration d;
  while (d.name.empty()) {
    const std::string word = name();
    if (word == ".align")
      d.align = number();
    else if (size_of(word))
      d.element = size_of(word);
    else if (word[0] != '.')  // skips .ptr and the like
      d.name = word;
  }
  d.bytes = d.element;
  d.align = std::max(d.align, d.element);
  while (take("[")) {
    d.bytes *= is("]") ? 0 : number();
    need("]");
  }
  return d;
}

namespace {

// Reads a variable of a module: zeros if it has no initial value.
void read_variable(Reader& r) {
  Module& m = r.m;
  const Declaration d = r.declaration();
  const u64 address = allocate(std::max<size_t>(d.bytes, 1), m.device, false);
  if (!address) throw Error{2, "no memory is left for a variable of a module"};
  if (r.take("=")) {
    const bool is_float = r.now().type == Token::kFloat || r.now().type == Token::kDouble;
    const u64 value = is_float ? r.m.tokens[r.at++].value : r.number();
    memcpy(reinterpret_cast<void*>(address), &value, d.element);
  }
  m.variables[d.name] = {address, d.bytes};
  r.need(";");
}

void read_dynamic_shared(Reader& r) {
  r.m.variables[r.declaration().name] = {Variable::kDynamic, 0};
  r.need(";");
}

void read_params(Reader& r, Function& f) {
  r.need("(");
  while (!r.take(")")) {
    r.take(",");
    r.need(".param");
    const Declaration d = r.declaration();
    const size_t at = round_up(f.params_size, d.align);
    f.params.push_back({d.name, at, d.bytes});
    f.params_size = at + d.bytes;
  }
}

// Reads .maxntid 256 and the like, up to the body.
void read_directives(Reader& r, Function& f) {
  while (!r.is("{")) {
    const std::string word = r.name();
    if (word == ".explicitcluster") continue;
    const unsigned x = unsigned(r.number());
    while (r.take(","))
      if (r.number() != 1) r.fail("more than one dimension");
    if (word == ".maxntid")
      f.max_threads = int(x);
    else if (word == ".reqnctapercluster")
      f.cluster = x;
    else if (word != ".minnctapersm")
      r.fail("a directive is not known: " + word);
  }
}

void read_kernel(Reader& r) {
  auto f = std::make_unique<Function>();
  f->module = &r.m;
  f->name = r.name();
  read_params(r, *f);
  read_directives(r, *f);
  f->first_token = r.at;
  r.skip_braces();
  const std::string name = f->name;
  r.m.kernels[name] = std::move(f);
}

void read_module(Module& m) {
  Reader r{m};
  while (r.now().type != Token::kEnd) {
    const std::string word = r.name();
    if (word == ".version" || word == ".target" || word == ".address_size")
      r.skip_line();
    else if (word == ".global" || word == ".const")
      read_variable(r);
    else if (word == ".shared" && r.m.tokens[r.at - 2].text == ".extern")
      read_dynamic_shared(r);
    else if (word == ".entry")
      read_kernel(r);
    else if (word != ".visible" && word != ".extern")
      r.fail("not known: " + word);
  }
}

void decode_kernel(Function& f) {
  const char* name = f.name.c_str();
  try {
    decode(f);
  } catch (Error& error) {
    error.text = format("kernel %s: %s", name, error.text.c_str());
    throw;
  }
  if (f.shared > kStaticShared)
    throw Error{218,
                format("%s: %d bytes of shared memory, %d allowed", name, f.shared, kStaticShared)};
  f.max_dynamic = kStaticShared - f.shared;
}

}  // namespace

std::string Module::line(int number) const {
  size_t at = 0;
  for (int i = 1; i < number && at < text.size(); ++i)
    at = std::min(text.find('\n', at), text.size()) + 1;
  std::string out = at < text.size() ? text.substr(at, text.find('\n', at) - at) : "";
  std::replace(out.begin(), out.end(), '\t', ' ');
  return out.erase(0, std::min(out.find_first_not_of(' '), out.size()));
}

Module* load_module(const std::string& text, int device, int capability) {
  auto m = std::make_unique<Module>();
  m->device = device;
  m->capability = capability;
  m->text = text;
  m->tokens = tokens_of(m->text);
  read_module(*m);
  for (auto& [name, f] : m->kernels) decode_kernel(*f);
  m->tokens.clear();
  return m.release();
}

}  // namespace sg
