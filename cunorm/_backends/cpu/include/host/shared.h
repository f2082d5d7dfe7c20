// SPDX-License-Identifier: MIT
// Variables that libraries of one process share: a thread has one variable of a name, instead of
// one for each library. Only libraries with the same headers, compiler and options share variables:
// LIBRARIES is made of these. -fvisibility=hidden hides all other symbols, except entry points and
// functions of the standard library.
#pragma once

#ifndef LIBRARIES
#define LIBRARIES no_others
#endif
#define SHARED inline namespace LIBRARIES __attribute__((visibility("default")))
