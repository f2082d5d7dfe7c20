# SPDX-License-Identifier: MIT
"""Reductions of integers over the lanes of a warp that a mask names."""

from __future__ import annotations

import numpy as np
import pytest

from tests import softgpu
from tests.softgpu.launching import cupy, launch, raises

# For each instruction: the type of its numbers, and the function of two of them.
REDUCTIONS = {
    "add.u32": ("u4", np.add),
    "add.s32": ("i4", np.add),
    "min.u32": ("u4", np.minimum),
    "min.s32": ("i4", np.minimum),
    "max.u32": ("u4", np.maximum),
    "max.s32": ("i4", np.maximum),
    "and.b32": ("u4", np.bitwise_and),
    "or.b32": ("u4", np.bitwise_or),
    "xor.b32": ("u4", np.bitwise_xor),
}
# For each mask: the lanes that reduce their values together.
GROUPS = {
    "~0u": [range(32)],
    "0xff00ff00u": [[*range(8, 16), *range(24, 32)]],
    "0xffu << (t & 24)": [range(k, k + 8) for k in (0, 8, 16, 24)],
    "0x55555555u << (t & 1)": [range(0, 32, 2), range(1, 32, 2)],
    "t == 5 ? 32u : ~32u": [[5], [k for k in range(32) if k != 5]],
}
BEGIN = "const unsigned* x, unsigned* y) {{ unsigned t = threadIdx.x, mask = {mask};"
REDUCE = """if (mask >> t & 1) asm volatile("redux.sync.{name} %0, %1, %2;"
    : "=r"(y[t + {at}]) : "r"(x[t + {at}]), "r"(mask));"""


def numbers() -> np.ndarray:
    """Return a row for each instruction. The rows of .and. and .or. have more 1 and 0 bits."""
    x = np.random.default_rng(5).integers(0, 2**32, (len(REDUCTIONS), 32), "u8").astype("u4")
    x[6] |= x[0] | x[1] | x[2]
    x[7] &= x[0] & x[1] & x[2]
    return x


@pytest.mark.parametrize("mask", GROUPS)
def test_the_lanes_of_a_mask_get_what_their_values_reduce_to(mask):
    x = numbers()
    wanted = np.zeros_like(x)
    for k, (dtype, f) in enumerate(REDUCTIONS.values()):
        for group in map(list, GROUPS[mask]):
            wanted[k, group] = f.reduce(x[k, group].view(dtype), dtype=dtype).view("u4")
    body = BEGIN.format(mask=mask)
    body += "".join(REDUCE.format(name=name, at=32 * k) for k, name in enumerate(REDUCTIONS))
    for schedule in ("lockstep", "serial", "reverse", "random"):
        y = cupy.zeros(x.shape, "u4")
        with softgpu.settings(schedule=schedule):
            launch(body + "}", cupy.asarray(x), y)
        for name, found, row in zip(REDUCTIONS, y.get(), wanted, strict=True):
            np.testing.assert_array_equal(found, row, f"{name}, {schedule}")


OF_CUDA = """const unsigned* x, unsigned* y) { unsigned t = threadIdx.x, v = x[t];
    y[t] = __reduce_max_sync(~0u, v); y[t + 64] = __reduce_max_sync(~0u, (int)v); }"""


@pytest.mark.parametrize("capability", [80, 100])
def test_functions_of_cuda_reduce_each_warp(capability):
    x, y = numbers().ravel()[:64], cupy.zeros(128, "u4")
    with softgpu.settings(capability=capability):
        launch(OF_CUDA, cupy.asarray(x), y, block=64)
    for found, dtype in zip(y.get().reshape(2, 64), ("u4", "i4"), strict=True):
        largest = x.view(dtype).reshape(2, 32).max(axis=1)
        np.testing.assert_array_equal(found.view(dtype), np.repeat(largest, 32), dtype)


def test_lanes_that_have_ended_have_no_value():
    x, y = numbers()[4], cupy.zeros(32, "u4")
    ended = np.uint32(x.argmax())
    body = BEGIN.format(mask="~0u") + f"if (t == {ended}) return;"
    launch(body + REDUCE.format(name="max.u32", at=0) + "}", cupy.asarray(x), y)
    wanted = np.full(32, np.delete(x, ended).max())
    wanted[ended] = 0
    np.testing.assert_array_equal(y.get(), wanted)


ONE, OTHER = (REDUCE.format(name=name, at=0) for name in ("max.u32", "min.u32"))
APART = {
    "another reduction": ("~0u", f"if (t < 9) {{ {ONE} }} else {{ {OTHER} }}"),
    "another mask": ("t < 9 ? ~0u : ~1u", ONE),
    "a barrier": ("~0u", f"if (t < 9) {{ {ONE} }} else __syncthreads();"),
}


@pytest.mark.parametrize("what", APART)
def test_lanes_of_a_mask_that_do_not_arrive_together_are_reported(what):
    mask, statement = APART[what]
    for schedule in ("lockstep", "serial", "reverse", "random"):
        error = r"(?s)wait for each other for ever.*PTX line \d+: .*redux"
        with softgpu.settings(schedule=schedule), raises(error):
            launch(f"{BEGIN.format(mask=mask)} {statement} }}", *cupy.zeros((2, 32), "u4"))


def test_reductions_need_compute_capability_8_0():
    body = BEGIN.format(mask="~0u") + ONE + "}"
    x, y = cupy.ones(32, "u4"), cupy.zeros(32, "u4")
    error = r"(?s)INVALID_PTX.*PTX line.*redux.sync.max.u32 needs compute capability 8.0"
    with softgpu.settings(capability=75), raises(error):
        launch(body, x, y)
    with softgpu.settings(capability=80):
        launch(body, x, y)
    assert y.get().all()
