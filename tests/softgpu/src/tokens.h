// SPDX-License-Identifier: MIT
// Walks over the tokens of a module.
#pragma once
#include "program.h"

namespace sg {

// What follows a declaration's space: .align n, .ptr and so on, a type, a name, and sizes.
struct Declaration {
  std::string name;
  size_t align = 0, element = 0, bytes = 0;
  bool open = false;  // name[]
};

struct Reader {
  Module& m;
  size_t at = 0;

  const Token& now() const { return m.tokens[at]; }
  bool is(const char* text) const { return now().text == text && now().type != Token::kString; }
  bool take(const char* text);  // steps over it if it is there
  void need(const char* text);  // fails if it is not
  std::string name();
  u64 number();
  void skip_to(const char* text);  // and over it
  void skip_line();
  void skip_braces();
  Declaration declaration();
  std::vector<Param> params(size_t* bytes = nullptr);
  [[noreturn]] void fail(const std::string& what) const;
};

}  // namespace sg
