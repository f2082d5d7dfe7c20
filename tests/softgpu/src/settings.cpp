// SPDX-License-Identifier: MIT
// Settings, changed by name while the process runs, and texts.
#include <stdarg.h>

#include <algorithm>
#include <cstdlib>

#include "host.h"

namespace sg {

Settings current_settings;
std::recursive_mutex& host_lock = *new std::recursive_mutex;  // never destroyed
static thread_local std::string last_error;
void keep_error(const std::string& text) { last_error = text; }

std::string format(const char* text, ...) {
  char* made = nullptr;
  va_list list;
  va_start(list, text);
  const int size = vasprintf(&made, text, list);
  va_end(list);
  std::string out(made, size_t(size));
  free(made);
  return out;
}
void say(const char* text, ...) {
  va_list list;
  va_start(list, text);
  fputs("softgpu: ", stderr);
  vfprintf(stderr, text, list);
  fputs("\n", stderr);
  va_end(list);
}

namespace {

struct Setting {
  std::string value;
  std::vector<std::string> allowed;  // empty: what `apply` takes
  std::function<bool(const std::string&)> apply;
};

bool read_number(const std::string& text, u64* number) {
  char* end;
  *number = strtoull(text.c_str(), &end, 10);
  return !text.empty() && isdigit(u8(text[0])) && !*end;
}
Setting number_in(int Settings::* field, const char* value, u64 least, u64 most) {
  return {value, {}, [=](const std::string& text) {
            u64 n;
            if (!read_number(text, &n) || n < least || n > most) return false;
            current_settings.*field = int(n);
            return true;
          }};
}
// The first of the words is the default, and means no.
Setting flag(bool Settings::* field, const char* no, const char* yes) {
  return {no, {no, yes}, [=](const std::string& text) {
            current_settings.*field = text == yes;
            return true;
          }};
}

auto& table = *new std::map<std::string, Setting>{
    {"schedule",
     {"lockstep",
      {"lockstep", "serial", "reverse", "random"},
      [](const std::string& text) {
        current_settings.schedule = text;
        return true;
      }}},
    {"seed",
     {"1", {}, [](const std::string& t) { return read_number(t, &current_settings.seed); }}},
    {"races", flag(&Settings::races, "False", "True")},
    {"counters", flag(&Settings::counters, "False", "True")},
    {"copies", flag(&Settings::async_early, "late", "early")},
    {"streams",
     {"now",
      {"now", "late", "late_reversed"},
      [](const std::string& text) {
        current_settings.late_streams = text != "now";
        current_settings.streams_reversed = text == "late_reversed";
        return true;
      }}},
    {"multiprocessors", number_in(&Settings::sms, "132", 1, 1000)},
    {"devices", number_in(&Settings::devices, "1", 1, 16)},
    {"largest_cluster", number_in(&Settings::largest_cluster, "16", 1, 16)},
    {"capability",
     {"90",
      {},
      [](const std::string& text) {
        u64 n;
        if (!read_number(text, &n) || !limits_of(int(n))) return false;
        current_settings.capability = int(n);
        return true;
      }}},
    {"ptx_folder", {"", {}, [](const std::string& t) { return current_settings.dump = t, true; }}},
    {"statistics", flag(&Settings::stats, "False", "True")},
};

bool set(const std::string& name, const std::string& value) {
  auto found = table.find(name);
  if (found == table.end()) return false;
  Setting& s = found->second;
  auto& words = s.allowed;
  if (!words.empty() && std::find(words.begin(), words.end(), value) == words.end()) return false;
  if (!s.apply(value)) return false;
  s.value = value;
  return true;
}

// Those of the environment: name=value,name=value.
const bool is_begun = [] {
  std::string rest = getenv("SOFTGPU_SETTINGS") ? getenv("SOFTGPU_SETTINGS") : "";
  for (std::string one; !rest.empty(); rest.erase(0, one.size() + 1)) {
    one = rest.substr(0, rest.find(','));
    const size_t name = one.find('=');
    if (name == one.npos || !set(one.substr(0, name), one.substr(name + 1)))
      say("no setting %s", one.c_str());
  }
  return true;
}();

}  // namespace
}  // namespace sg

using namespace sg;

extern "C" {
// Returns the value of a setting and gives it a new one, if any; nullptr where that is not known.
const char* softgpu_setting(const char* name, const char* value) {
  HOLD;
  static thread_local std::string before;
  auto found = table.find(name);
  if (found == table.end()) return nullptr;
  before = found->second.value;
  return !value || set(name, value) ? before.c_str() : nullptr;
}
// What the last error of this thread was.
const char* softgpu_error() { return last_error.c_str(); }
// Does all that is queued, on all streams of all devices.
int softgpu_finish() { return answer(finish); }
}
