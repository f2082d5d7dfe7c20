// SPDX-License-Identifier: MIT
// Variables that the libraries of a process share: a thread has one variable of a name, not one for
// each library. Libraries share only with those of the same headers, compiler and options, which
// have the same LIBRARIES. All else but the entry points is a library's own (-fvisibility=hidden).
// Functions of the standard library are visible, as its headers say: sharing them does no harm.
#pragma once

#ifndef LIBRARIES
#define LIBRARIES no_others
#endif
#define SHARED inline namespace LIBRARIES __attribute__((visibility("default")))
