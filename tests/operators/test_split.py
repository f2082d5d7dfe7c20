# SPDX-License-Identifier: MIT
"""Norms of rows that are cut into parts: moments, given statistics, sums and given sums."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import NormForward, NormGrads
from tests.support.bounds import assert_within, check_backward, check_forward, ulp
from tests.support.caches import fresh_process
from tests.support.gpu_arrays import OnCupy
from tests.support.kinds import Foreign
from tests.support.operands import DTYPES
from tests.support.row_errors import row_max
from tests.support.split import SplitCall

RMS = {"center": False, "bias": None} | dict.fromkeys(("x", "weight", "dy"), "bfloat16")
# Rows near zero and far from it, parts whose means differ, more and fewer parts, and one column.
DATA: dict[str, dict[str, Any]] = {
    "near zero": {},
    "far from zero": {"mean": 1e4, "c": 3.0},
    "parts far from each other": {"mean": -30.0, "apart": 1e4},
    "one part": {"sizes": (34,)},
    "parts of one column": {"sizes": (1, 1, 1), "mean": 1e4},
    "seven parts": {"sizes": (5, 64, 1, 2, 300, 17, 33), "rows": (2, 11), "apart": 1.0},
    "small deviation": {"mean": 300.0, "deviation": 1e-3, "eps": 1e-12},
    "large deviation": {"mean": -1e4, "deviation": 1e3, "eps": 1e-2},
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("options", [{}, RMS], ids=["layer_norm", "rms_norm"])
def test_norms_of_parts_are_those_of_whole_rows(options, data):
    SplitCall(options | DATA[data]).check()


def drawn(seed: int) -> dict[str, Any]:
    """Draw a case."""
    rng = random.Random(seed)
    dtypes = [None, *DTYPES]
    x = rng.choice(dtypes[1:])
    case: dict[str, Any] = {"x": x, "dy": rng.choice([x, "float32"]), "seed": seed}
    case |= {name: rng.choice([None, x, "float32"]) for name in ("weight", "bias")}
    case |= {"center": rng.random() < 0.6, "c": rng.choice([None, 1.0, 3.0])}
    case |= {"weight_offset": rng.choice([0.0, 1.0]), "eps": rng.choice([1e-5, 1e-2])}
    sizes = (1, 2, 7, 16, 33, 128, 501)
    case["sizes"] = tuple(rng.choice(sizes) for _ in range(rng.randint(1, 7)))
    case["rows"] = rng.choice([(1,), (6,), (2, 3), (2, 1, 3)])
    far = {"float16": 30.0, "bfloat16": 300.0}.get(x, 1e4)
    case |= {"mean": rng.choice([0.0, far, -far]), "apart": rng.choice([0.0, 1.0, far / 10])}
    if rng.random() < 0.2:
        case["groups"] = rng.choice([2, 3])
    elif rng.random() < 0.2 and len(case["rows"]) > 1:
        case["axis"] = -2
    elif rng.random() < 0.2 and len(case["rows"]) == 2:
        case["own"] = (2, 1)
    if rng.random() < 0.5:
        case |= {"gate": rng.choice([x, "float32"]), "gate_position": rng.choice(["pre", "post"])}
        case["gate_activation"] = rng.choice(["silu", "identity", "tanh"])
    if rng.random() < 0.4:
        case |= {"residual": rng.choice([x, "float32"]), "d_residual": rng.choice([None, x])}
        case["stream"] = rng.choice([None, case["residual"]])
        if case.get("gate"):
            case["gate_position"] = rng.choice(["pre", "post", "branch"])
    elif rng.random() < 0.5:  # with a stream of another dtype than x's, rows are rounded to it
        case["round_before_weight"] = True
    return case


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(150))
def test_drawn_norms_of_parts_are_those_of_whole_rows(seed):
    SplitCall(drawn(seed)).check()


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(150))
def test_drawn_norms_of_parts_are_those_of_whole_rows_on_a_gpu(seed):
    SplitCall(drawn(seed), OnCupy()).check()


@pytest.mark.parametrize("seed", range(0, 150, 6))
def test_without_a_compiler_the_reference_computes_norms_of_parts(seed):
    with fresh_process(CXX="", PATH=os.devnull), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "cunorm found no C")
        SplitCall(drawn(seed)).check()


def test_weights_and_biases_of_samples_are_cut_as_rows_are():
    case = {"rows": (2, 3), "own": (2, 1), "mean": 1e4}
    _, grads = SplitCall(case).check()
    assert grads.dweight.shape == grads.dbias.shape == (2, 1, 34)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(34,), (2, 1, 34), (1, 3, 34), (2, 3, 34)], ids=str)
@pytest.mark.parametrize("own", [(), (2, 1), (2, 3), (1, 3)], ids=str)
def test_gates_of_the_branch_and_weights_may_each_have_rows_of_their_own(own, shape):
    case = {"rows": (2, 3), "own": own, "gate": "float32", "gate_shape": shape}
    case |= {"gate_position": "branch", "gate_activation": "tanh", "d_residual": "float32"}
    SplitCall(case | {"residual": "float32"}).check()


def test_a_foreign_array_needs_no_shape():
    x = np.array([[1, 3, 10001, 10003]], np.float32)
    found, expected = (cunorm.row_moments(one, center=True) for one in (Foreign(x), x))
    assert [*found] == [*expected]
    assert found.count == 4


# --- statistics of some columns, and of padded rows -----------------------------------------------


def rms(x, weight, columns):
    """Return y of a norm of float64 rows by the mean square of their first columns."""
    rstd = 1 / np.sqrt((x[:, :columns] ** 2).mean(-1, keepdims=True) + 1e-5)
    return x * rstd * weight


def test_a_partial_rms_norm_and_its_gradient_are_made_of_the_pieces():
    """The columns that have no part in the statistics have no part in their gradient either."""
    call, columns = SplitCall(RMS | {"sizes": (12, 28)}), 12
    x, dy, weight = (call.arrays[name] for name in ("x", "dy", "weight"))
    moments = cunorm.row_moments(x[:, :columns])
    found = cunorm.combine_moments(moments._replace(m2=moments.m2[None]), eps=1e-5)
    y = cunorm.rms_norm(x, weight, rstd=found.rstd)
    sums = cunorm.normalize_backward_sums(dy, x, weight, rstd=found.rstd)
    none = sums._replace(sum_r_dr=np.zeros_like(sums.sum_r_dr))
    dx = [
        cunorm.rms_norm_backward(
            dy[:, part], x[:, part], weight[part], rstd=found.rstd, sums=of_part, count=columns
        ).dx
        for part, of_part in ((slice(0, columns), sums), (slice(columns, None), none))
    ]
    x, dy, weight = (array.astype(np.float64) for array in (x, dy, weight))
    exact = rms(x, weight, columns)
    assert_within(y, exact, 4 * ulp(row_max(exact), "float32") + 0.5 * ulp(exact, "bfloat16"))
    exact = np.empty_like(x)
    for column in range(x.shape[1]):  # central differences, with an error of about 1e-10
        step = np.zeros(x.shape[1])
        step[column] = 1e-5
        up, down = (rms(x + sign * step, weight, columns) for sign in (1, -1))
        exact[:, column] = (dy * (up - down)).sum(-1) / 2e-5
    terms = row_max(dy * weight * found.rstd[:, None])
    terms = np.maximum(terms, row_max(rms(x, 1.0, columns) * (sums.sum_r_dr / columns)[:, None]))
    bound = 8 * ulp(terms, "float32") + 0.5 * ulp(exact, "bfloat16") + 1e-9
    assert_within(np.concatenate(dx, -1), exact, bound)


def test_rows_that_are_padded_with_zeros_are_normalised_by_their_own_width():
    call, width = SplitCall(RMS | {"sizes": (40,), "c": 3.0}), 27
    x, dy, weight = (call.arrays[name] for name in ("x", "dy", "weight"))
    x[:, width:] = 0
    moments = cunorm.row_moments(x)
    given = moments._replace(m2=moments.m2[None], count=width)
    rstd = cunorm.combine_moments(given, eps=1e-5).rstd
    y = cunorm.normalize(x, weight, rstd=rstd, c=3.0, count=width)
    sums = cunorm.normalize_backward_sums(dy, x, weight, rstd=rstd)
    grads = cunorm.normalize_backward(dy, x, weight, rstd=rstd, c=3.0, sums=sums, count=width)
    options = {"c": 3.0, "eps": 1e-5}
    forward = NormForward(y=y[:, :width], rstd=rstd)
    check_forward(forward, x[:, :width], weight[:width], None, **options)
    assert not y[:, width:].any()
    grads = NormGrads(dx=grads.dx[:, :width], dweight=grads.dweight[:width])
    check_backward(grads, dy[:, :width], x[:, :width], weight[:width], None, **options)
