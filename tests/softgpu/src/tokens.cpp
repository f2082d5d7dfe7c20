// SPDX-License-Identifier: MIT
// Cuts PTX into tokens.
#include "tokens.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

namespace sg {

namespace {

bool in_name(char c) { return isalnum(u8(c)) || c == '_' || c == '.' || c == '$' || c == '%'; }

// 0f and 8 digits, or 0d and 16: the bits of a number.
bool bits_of_number(const std::string& word, Token& token) {
  const char mark = word.size() > 2 && word[0] == '0' ? char(tolower(word[1])) : ' ';
  if (!(mark == 'f' && word.size() == 10) && !(mark == 'd' && word.size() == 18)) return false;
  token.type = mark == 'f' ? Token::kFloat : Token::kDouble;
  token.value = strtoull(word.c_str() + 2, nullptr, 16);
  return true;
}

Token number(std::string word, int line) {
  Token token{Token::kNumber, word, 0, line};
  if (bits_of_number(word, token)) return token;
  while (!word.empty() && toupper(word.back()) == 'U') word.pop_back();
  if (word.find('.') != std::string::npos) {
    const double v = strtod(word.c_str(), nullptr);
    token.type = Token::kDouble;
    memcpy(&token.value, &v, 8);
  } else {
    const bool binary = word.size() > 2 && tolower(word[1]) == 'b';
    token.value = strtoull(word.c_str() + 2 * binary, nullptr, binary ? 2 : 0);
  }
  return token;
}

size_t end_of_name(const std::string& text, size_t at) {
  for (;;) {
    if (in_name(text[at]))
      ++at;
    else if (text.compare(at, 2, "::") == 0 && isalnum(u8(text[at + 2])))
      at += 2;
    else
      return at;
  }
}

size_t end_of_comment(const std::string& text, size_t at) {
  const bool line = text[at + 1] == '/';
  const size_t end = text.find(line ? "\n" : "*/", at);
  return end == std::string::npos ? text.size() : end + (line ? 0 : 2);
}

}  // namespace

std::vector<Token> tokens_of(const std::string& text) {
  std::vector<Token> out;
  int line = 1;
  for (size_t at = 0, end; at < text.size(); at = end) {
    const char c = text[at];
    end = at + 1;
    if (isspace(u8(c))) {
      line += c == '\n';
    } else if (c == '/' && (text[at + 1] == '/' || text[at + 1] == '*')) {
      end = end_of_comment(text, at);
      line += int(std::count(text.begin() + long(at), text.begin() + long(end), '\n'));
    } else if (c == '"') {
      end = std::min(text.find('"', at + 1), text.size() - 1) + 1;
      out.push_back({Token::kString, text.substr(at + 1, end - at - 2), 0, line});
    } else if (in_name(c)) {
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

static size_t size_of(const std::string& type) {
  static const std::map<std::string, size_t> named = {{".pred", 1}, {".f16x2", 4}, {".bf16x2", 4}};
  const auto found = named.find(type);
  if (found != named.end()) return found->second;
  const size_t digits = type.find_first_of("0123456789");
  static const char* const kinds[] = {".b", ".u", ".s", ".f", ".bf"};
  for (const char* kind : kinds)
    if (digits != std::string::npos && type.substr(0, digits) == kind)
      return strtoul(type.c_str() + digits, nullptr, 10) / 8;
  return 0;
}

Declaration Reader::declaration() {
  Declaration d;
  size_t lanes = 1;
  while (d.name.empty()) {
    const std::string word = name();
    if (word == ".align") {
      d.align = number();
    } else if (word == ".v2" || word == ".v4") {
      lanes = word == ".v2" ? 2 : 4;
    } else if (size_of(word)) {
      d.element = size_of(word);
    } else if (word[0] != '.') {  // else .ptr, .attribute and the like
      d.name = word;
    }
  }
  d.bytes = d.element * lanes;
  d.align = std::max(d.align, d.element);
  while (take("[")) {
    d.open |= is("]");
    d.bytes *= d.open ? 0 : number();
    need("]");
  }
  return d;
}

std::vector<Param> Reader::params(size_t* bytes) {
  std::vector<Param> out;
  size_t size = 0;
  need("(");
  while (!take(")")) {
    take(",");
    if (name() != ".param") fail("expected .param");
    const Declaration d = declaration();
    size = round_up(size, d.align);
    out.push_back({d.name, size, d.bytes});
    size += d.bytes;
  }
  if (bytes) *bytes = size;
  return out;
}

}  // namespace sg
