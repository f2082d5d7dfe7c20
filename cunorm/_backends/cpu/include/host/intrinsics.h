// SPDX-License-Identifier: MIT
// The intrinsic functions of the machine's instructions.
#pragma once
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__) && \
    defined(__GNUC__) && !defined(__clang__) && __has_include(<fmaintrin.h>)
// The parts of <immintrin.h> that are needed, whose include guard this macro is. GCC 12 takes 0.3 s
// to read the rest, most of which is for AVX-512.
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
// clang-format off: these need the first.
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
// clang-format on
#elif defined(__SSE__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
