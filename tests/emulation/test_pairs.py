# SPDX-License-Identifier: MIT
"""GPUs that compute on pairs of floats give the bits of GPUs that compute on single floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulation.machine import gpu, needs_softgpu
from tests.emulation.plans import Planned
from tests.support.cases import call_of
from tests.support.operands import assert_same_fields
from tests.support.quantized import quantized_call

pytestmark = needs_softgpu

KERNEL = "row_norm_forward"
SINGLES, PAIRS = 90, 100  # compute capabilities
BFLOAT16 = dict.fromkeys(("x", "weight", "bias"), "bfloat16") | {"stream": "+ bfloat16"}
FLOAT16 = {"x": "float16", "bias": None, "stream": None, "round_before_weight": True}
CASES: dict[str, dict[str, Any]] = {
    "LayerNorm, a stream": {"center": True, "stream": "+ float32"},
    "LayerNorm of bfloat16, far from zero": BFLOAT16 | {"center": True, "far": True},
    "RMSNorm of float16, an offset": FLOAT16 | {"center": False, "weight_offset": 1.0},
    "tiny rows without parameters": {
        **{"center": True, "weight": None, "bias": None, "stream": None},
        **{"eps": 0.0, "scale": 1e-19},
    },
}
PLANS = ("8 threads a row, of packs", "a block of 96 a row", "streamed", "a cluster of 4")


def set_special(x: Any) -> None:
    """Give rows infinity, NaN, zeros of both signs, subnormal and large numbers."""
    rows = x.host.reshape(-1, x.host.shape[-1])
    for row, value in enumerate((np.inf, np.nan)):
        rows[row % len(rows), row] = value
    rows[-1, ::2], rows[-1, 1::7], rows[-1, 3::11] = -0.0, 1e-39, -3e4


def check(planned: Planned, made: Any) -> None:
    """Compare the results of a GPU without pairs with those of one with pairs.

    The sign of NaN, which the machine takes from the host's processor, is left out, except in q.
    """
    results = []
    for capability in (SINGLES, PAIRS):
        with planned.machine(few=1, capability=capability):
            results.append(made.run())
    for found in results:
        for name, field in found._asdict().items():
            if name != "q" and field is not None and field.dtype != "float8_e8m0fnu":
                field[np.isnan(field)] = np.nan
    assert_same_fields(*results)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_norm_has_the_same_bits(plan, case):
    planned = Planned(KERNEL, plan)
    made = call_of(KERNEL, CASES[case] | planned.case)
    set_special(made.inputs["x"])
    check(planned, made)


QUANTISED: dict[str, dict[str, Any]] = {
    "a scale that is found": {},
    "a given scale with infinite quotients": {"given_scale": 2.0**-126, "q": "float8_e5m2"},
    "int8 of blocks": {"block": 32, "q": "int8"},
    "MXFP8": {"block": 32, "scale_dtype": "float8_e8m0fnu"},
}


@pytest.mark.parametrize("case", QUANTISED)
def test_a_quantised_norm_has_the_same_bits(case):
    planned = Planned(KERNEL, "8 threads a row, of packs")
    made = quantized_call({"center": True, "stream": None} | QUANTISED[case] | planned.case, gpu())
    set_special(made.norm.inputs["x"])
    check(planned, made)
