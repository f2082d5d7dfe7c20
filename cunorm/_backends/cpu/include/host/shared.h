// SPDX-License-Identifier: MIT
// Variables that libraries of one process share: a thread has one variable of a name, instead of
// one for each library. Only libraries with the same headers, compiler and options, and so with the
// same LIBRARIES, share variables. Everything else but the entry points is hidden
// (-fvisibility=hidden). Functions of the standard library stay visible, which does no harm.
#pragma once

#ifndef LIBRARIES
#define LIBRARIES no_others
#endif
#define SHARED inline namespace LIBRARIES __attribute__((visibility("default")))
