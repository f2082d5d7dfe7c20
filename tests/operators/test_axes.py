# SPDX-License-Identifier: MIT
"""Row norms of axes that are not the last: `axis` is a tuple, as for channels before positions."""

from __future__ import annotations

import pytest

from tests.support.strided import channels_first

KERNELS = ("row_norm_forward", "row_norm_backward")
SHAPE = (2, 30, 24)  # samples, positions, channels
CENTERED = {"center": True, "shape": SHAPE}
GATE = {"gate": "float32"}
BRANCH = GATE | {"gate_position": "branch", "stream": "+ float32", "d_residual": "float32"}
CASES = {
    "plain": {},
    "without a mean": {"center": False, "bias": None},
    "far from zero": {"far": True},
    "odd positions": {"shape": (3, 7, 40)},
    "odd channels": {"shape": (2, 12, 37)},
    "one channel": {"shape": (2, 12, 1)},
    "one position": {"shape": (5, 1, 24)},
    "many channels": {"shape": (1, 20, 700)},
    "bfloat16": {"x": "bfloat16", "weight": "bfloat16", "bias": "bfloat16", "dy": "bfloat16"},
    "float16, odd": {"x": "float16", "dy": "float16", "shape": (1, 33, 50)},
    "float64": {"x": "float64", "weight": "float64", "bias": "float64", "dy": "float64"},
    "a stream": {"x": "bfloat16", "stream": "+ float32", "d_residual": "float32", "dy": "bfloat16"},
    "a new stream": {"x": "bfloat16", "stream": "as float32", "dy": "bfloat16"},
    "a post-gate": GATE,
    "a pre-gate": GATE | {"gate_position": "pre", "gate_activation": "tanh"},
    "a gate of the branch": BRANCH,
    "a gate of the branch for each sample": BRANCH | {"gate_own": "10"},
    "one gate for each position": BRANCH | {"gate_own": "11 scalar"},
    "an offset": {"weight_offset": 1.0, "round_before_weight": True, "x": "bfloat16"},
    "parameters for each sample": {"weight_own": "10", "bias_own": "10"},
    "parameters for each position": {"weight_own": "11", "bias_own": "01"},
    "added sums": {"accumulate": "float32"},
    "only parameters": {"needs": ("weight", "bias")},
    "given results": {"given": ("y", "dx", "mean", "rstd")},
    "in place": {"in_place": "all"},
}
IN_CI = ("plain", "odd positions", "bfloat16", "a gate of the branch for each sample")


def some(names):
    return [
        pytest.param(one, marks=() if one in IN_CI else pytest.mark.exhaustive) for one in names
    ]


def case_of(kernel, name):
    case = CENTERED | CASES[name]
    if kernel == "row_norm_forward":
        case |= {"given": tuple(n for n in case.get("given", ()) if n != "dx") or None}
    elif "given" in case:
        case |= {"given": ("dx",)}
    elif "in_place" in case:
        case |= {"in_place": "dy"}
    return case


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", some(CASES))
def test_channels_first_are_right_on_a_gpu(kernel, name, device):
    channels_first(kernel, case_of(kernel, name), device).check()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", [*CASES])
def test_channels_first_are_right(kernel, name):
    from tests.support.gpu_arrays import OnNumpy

    channels_first(kernel, case_of(kernel, name), OnNumpy()).check()
