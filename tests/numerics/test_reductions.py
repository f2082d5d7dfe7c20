# SPDX-License-Identifier: MIT
"""Lanes, blocks and clusters reduce a row not only to a sum: here to its maximum."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.gpu_arrays import OnCupy
from tests.support.host_code import compiled, needs_a_compiler
from tests.support.internals import KernelBuild, _cuda, source_text

PROBE = """
#include "streamed.cuh"

struct Build : RowBuild {
  static constexpr bool reduces = true;
};

template <class B>
struct Arguments {
  Rows<const typename B::x_t> x;
  typename B::compute_t* maxima;
  index_t rows, groups, width;
};

template <class B>
__device__ inline void find_maxima(const Arguments<B>& arguments, Team<B>& team) {
  const BlockShare share(1, Team<B>::blocks);
  const Walk<B> walk(team, share, arguments.rows, row_width(arguments));
  for_each_row(
      walk,
      [&](const StreamedRow<B>& row) {
        RowPacks<B, typename B::x_t> x(row.of(arguments.x));
        RowReduction<B, Max> maximum;
        row.for_each_chunk([&](const auto& chunk) {
          ItemReduction<B, Max> items;
          x.load(chunk);
          chunk.for_each_pack([&](auto at) {
            const auto pack = x[at];
            for_each_item<B>(at, [&](auto item) {
              items.add(item, clear_outside<B>(read<B>(pack, item), item));
            });
          });
          maximum.add(items);
        });
        return team.all_reduce(maximum).item[0];
      },
      [&](auto found, const StreamedRow<B>& row) {
        if (row.exists && team.thread() == 0) arguments.maxima[row.index] = found;
      });
}

extern "C" __global__ void CLUSTER_LAUNCH row_maxima(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  find_maxima(arguments, team);
}
"""
ON_CPU = """
extern "C" __attribute__((visibility("default"))) void run(const Arguments<Build>* arguments) {
  constexpr long long parts = 64;
  static double values[Gang::rings * parts];
  gang = Gang{0, 1, [] {}, values, parts};
  gridDim.x = 1;
  row_maxima(*arguments);
}
"""
ABSENT = dict.fromkeys(("GATE_T", "WEIGHT_T", "BIAS_T", "ROUNDED_T"), "absent")
NONE = dict.fromkeys(("PRE_GATE", "CENTER", "WEIGHT_OFFSET"), "false")
CPU_PACK, ROWS = 64, 5


def macros(width: int, **more: object) -> tuple[tuple[str, str], ...]:
    given = {"COMPUTE_T": "fp32", "X_T": "fp32", "GATE_ACTIVATION": "identity", **ABSENT, **NONE}
    given |= {"WIDTH": width, "GROUPS": 1, "BLOCKS_PER_SM": 1, **more}
    return tuple((name, str(value)) for name, value in given.items())


def rows(width: int) -> Any:
    """Return rows from 0 on; one has a NaN, another infinity, another only zeros."""
    x = np.random.default_rng(width).uniform(1, 2, (ROWS, width)).astype(np.float32)
    x[1, width // 3] = np.nan
    x[2, width // 2] = np.inf
    x[3, -1] = 2.5
    x[4] = 0
    return x


def arguments(x: int, maxima: int, width: int) -> bytes:
    """Return the bytes of `struct Arguments` for an x of shape [ROWS, width]."""
    return np.array([x, ROWS, 1, 0, 0, width, maxima, ROWS, 1, width], np.int64).tobytes()


@needs_a_compiler
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_cpu_finds_the_maximum_of_each_row(tmp_path, is_shared):
    team = {"THREADS": 1, "THREADS_PER_ROW": 1, "PACK": CPU_PACK, "PACKS": 16, "ACCESS": 1}
    shared = {"SHARED_ROWS": "true"} if is_shared else {}
    options = [f"-D{name}={value}" for name, value in macros(0, **team, **shared)]
    options += ["-std=c++17", "-O1", "-shared", "-fPIC"]
    run = ctypes.CDLL(str(compiled(tmp_path, PROBE + ON_CPU, *options))).run
    for width in (1, 63, 1000, 3 * 128 * CPU_PACK + 1):
        x, maxima = rows(width), np.zeros(ROWS, np.float32)
        run(arguments(x.ctypes.data, maxima.ctypes.data, width))
        np.testing.assert_array_equal(maxima, x.max(axis=1))


# Threads of a block, and threads of a row: lanes of a warp, several warps, a cluster of blocks.
TEAMS = {"lanes": (32, 8), "a block": (96, 96), "a cluster": (64, 128)}


@pytest.mark.gpu
@pytest.mark.parametrize("team", TEAMS)
def test_a_gpu_finds_the_maximum_of_each_row(tmp_path, team):
    cupy = OnCupy().cupy
    threads, of_row = TEAMS[team]
    cluster, width = max(1, of_row // threads), 2 * of_row * 2 * 3 - 2  # 2 packs of 2, 3 chunks
    if cluster > 1 and int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("clusters need compute capability 9.0")
    sizes = {"THREADS": threads, "THREADS_PER_ROW": of_row, "PACK": 2, "PACKS": 2, "ACCESS": 2}
    build = KernelBuild("row_maxima", macros(width, **sizes, CLUSTER=cluster))
    Path(tmp_path / "probe.cu").write_text(PROBE)
    text, options = source_text("probe", (tmp_path,)), _cuda.compile_options(build)
    kernel = cupy.RawKernel(text, "row_maxima", options)
    x, maxima = cupy.asarray(rows(width)), cupy.zeros(ROWS, "f")
    values = arguments(x.data.ptr, maxima.data.ptr, width)
    argument = np.frombuffer(values, np.dtype((np.void, len(values))))
    kernel((cluster,), (threads,), (argument,))
    np.testing.assert_array_equal(cupy.asnumpy(maxima), rows(width).max(axis=1))
