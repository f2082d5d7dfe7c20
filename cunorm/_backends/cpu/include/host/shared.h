// SPDX-License-Identifier: MIT
// Variables that the libraries of a process share: each thread has one of a name, and memory for it
// in one library. Only those of the same headers, compiler and options do, as LIBRARIES names them;
// of ours, all else but the entry points is a library's own (-fvisibility=hidden). The standard
// library's headers make their functions visible: that they may be shared, too, does no harm.
#pragma once

#ifndef LIBRARIES
#define LIBRARIES no_others
#endif
#define SHARED inline namespace LIBRARIES __attribute__((visibility("default")))
