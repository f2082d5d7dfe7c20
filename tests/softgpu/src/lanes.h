// SPDX-License-Identifier: MIT
// Makes operations on all lanes of a warp from functions of one lane's values.
#pragma once
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "threads.h"

namespace sg {

template <class T>
inline T from_bits(u64 v) {
  if constexpr (std::is_same_v<T, bool>) {
    return v & 1;
  } else if constexpr (std::is_integral_v<T>) {
    return T(v);
  } else {
    T out;
    memcpy(&out, &v, sizeof out);
    return out;
  }
}
template <class T>
inline u64 to_bits(T v) {
  if constexpr (std::is_integral_v<T>) {
    return u64(v);  // sign-extends signed types
  } else {
    u64 out = 0;
    memcpy(&out, &v, sizeof v);
    return out;
  }
}

// Calls f(lane) for each lane in the mask. For a full mask the loop has a fixed length, so that
// compilers vectorize it.
template <class F>
inline __attribute__((always_inline)) void each_lane(u32 lanes, F f) {
  if (lanes == 0xffffffffu) {
#pragma GCC ivdep
    for (int lane = 0; lane < 32; ++lane) f(lane);
  } else {
    for_lanes(lanes, f);
  }
}

// Sets the result to f of the sources, lane by lane.
template <class... Sources, class F, size_t... k>
inline void apply(Warp& w, const Instruction& i, u32 lanes, F f, std::index_sequence<k...>) {
  u64* const dest = w.row(i.dest[0]);
  const u64* const source[] = {w.row(i.source[k])...};
  each_lane(lanes,
            [=](int lane) { dest[lane] = to_bits(f(from_bits<Sources>(source[k][lane])...)); });
}
template <class... Sources, class F>
inline void apply(Warp& w, const Instruction& i, u32 lanes, F f) {
  apply<Sources...>(w, i, lanes, f, std::index_sequence_for<Sources...>{});
}
// The operation that applies f to an instruction's sources.
template <auto f, class... Sources>
void each(Warp& w, const Instruction& i, u32 lanes) {
  apply<Sources...>(w, i, lanes, f);
}
// The operation that applies f to one, two or three sources of type T.
template <auto f, class T, int sources>
constexpr Operation each_of() {
  if constexpr (sources == 1)
    return each<f, T>;
  else if constexpr (sources == 2)
    return each<f, T, T>;
  else
    return each<f, T, T, T>;
}

// Flushes a subnormal number to 0.
template <class T>
inline T flushed(T v) {
  return std::fabs(v) < std::numeric_limits<T>::min() ? std::copysign(T(0), v) : v;
}
// Returns the lesser number. If one is NaN, returns the other. -0 is less than 0.
template <class T>
inline T lesser(T a, T b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? b : a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
// An operation for each integer type. b16, b32 and b64 use the operations of u16, u32 and u64. pred
// uses that of u32: a predicate is the lowest bit.
struct ByType {
  Operation u16 = nullptr, s16 = nullptr, u32 = nullptr, s32 = nullptr, u64 = nullptr,
            s64 = nullptr;
  Operation of(const std::string& type) const {
    if (type == "pred") return u32;
    const bool sign = type[0] == 's';
    if (type.size() != 3 || (!sign && type[0] != 'u' && type[0] != 'b')) return nullptr;
    const int bits = atoi(type.c_str() + 1);
    return bits == 16   ? (sign ? s16 : u16)
           : bits == 32 ? (sign ? s32 : u32)
           : bits == 64 ? (sign ? s64 : u64)
                        : nullptr;
  }
};

// The families of instructions. Each function sets the operation of the instruction, and returns
// false if it does not support the instruction.
bool choose_arithmetic(Instruction&, const Opcode&);
bool choose_comparison(Instruction&, const Opcode&);
bool choose_conversion(Instruction&, const Opcode&);
bool choose_memory(Instruction&, const Opcode&);
bool choose_async_copy(Instruction&, const Opcode&);
bool choose_prefetch(Instruction&, const Opcode&);
bool choose_barrier(Instruction&, const Opcode&);
bool choose_mbarrier(Instruction&, const Opcode&);
bool choose_send(Instruction&, const Opcode&);
bool choose_fence(Instruction&, const Opcode&);
bool choose_grid_control(Instruction&, const Opcode&);
Space space_of(const Opcode&);

}  // namespace sg
