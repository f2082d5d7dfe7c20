// SPDX-License-Identifier: MIT
// The CPU's streamed.cuh: all rows are streamed.
#pragma once
#include "row.cuh"

template <class B>
using StreamedRow = Row<B>;
