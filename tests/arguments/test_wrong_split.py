# SPDX-License-Identifier: MIT
"""Errors of the pieces of norms of split rows: each names the function and the argument.

Nothing is written, and each error says what was given and what is expected.
"""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from cunorm import Moments, Statistics, Sums
from tests.arguments.wrong_split import ERRORS, P, R, W, X, moments
from tests.support.operands import at


@pytest.mark.parametrize(("function", "options", "errors"), ERRORS, ids=[e[0] for e in ERRORS])
def test_wrong_input_of_pieces_is_named_and_nothing_is_written(function, options, errors):
    for given, error, text in errors:
        given = options | given
        arrays = [*given.values(), *(given.get("out") or ()), *(given.get("moments") or ())]
        kept = [(one, one.tobytes()) for one in arrays if isinstance(one, np.ndarray)]
        with at(function, text):
            with pytest.raises(error) as caught:
                getattr(cunorm, function)(**given)
            assert type(caught.value) is error
            assert str(caught.value).startswith(f"{function}: {text}"), str(caught.value)
        assert all(one.tobytes() == before for one, before in kept)


@pytest.mark.exhaustive
def test_sum_dr_is_not_needed_for_gradients_of_parameters():
    given = {"mean": R, "rstd": R, "sums": Sums(None, R), "count": 8, "needs": ("bias",)}
    assert cunorm.layer_norm_backward(X, X, W, W, **given).dx is None


@pytest.mark.gpu
def test_arrays_on_other_devices_are_refused():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    on_gpu = cupy.asarray(R)
    text = "is on cuda:0, expected cpu, the device of "
    given = {"mean": R, "rstd": R}
    for name in ("mean", "rstd", "correction"):
        with pytest.raises(ValueError, match=f"^layer_norm: {name} {text}x$"):
            cunorm.layer_norm(X, **given | {name: on_gpu})
    for name in Sums._fields:
        sums = Sums(R, R)._replace(**{name: on_gpu})
        with pytest.raises(ValueError, match=rf"^layer_norm_backward: sums\.{name} {text}x$"):
            cunorm.layer_norm_backward(X, X, **given, sums=sums, count=8)
    with pytest.raises(ValueError, match=rf"^combine_moments: moments\.mean {text}moments\.m2$"):
        cunorm.combine_moments(moments(mean=cupy.asarray(P)), eps=0.0)
    with pytest.raises(ValueError, match=rf"^combine_moments: out\.rstd {text}moments\.m2$"):
        cunorm.combine_moments(moments(), eps=0.0, out=Statistics(rstd=on_gpu))


def test_results_that_overlap_inputs_are_refused():
    memory = np.ones((4, 5), np.float32)
    given = Moments(mean=memory[:2], m2=memory[2:], count=8)
    with pytest.raises(ValueError, match=r"^combine_moments: out\.rstd overlaps moments\.m2"):
        cunorm.combine_moments(given, eps=0.0, out=Statistics(rstd=memory[3]))
    x = X.copy()
    with pytest.raises(ValueError, match=r"^row_moments: out\.m2 overlaps x"):
        cunorm.row_moments(x, out=Moments(m2=x.reshape(-1)[:5]))
    rstd = R.copy()
    with pytest.raises(ValueError, match=r"^normalize_backward_sums: out\.sum_r_dr overlaps rstd"):
        cunorm.normalize_backward_sums(X, x, rstd=rstd, out=Sums(sum_r_dr=rstd))
