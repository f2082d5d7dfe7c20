# SPDX-License-Identifier: MIT
"""A backward reads what the wanted gradients are made of, and gives no others."""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from tests.support.bounds import check_backward
from tests.support.gradients import MADE_OF, NEEDS
from tests.support.operands import assert_same_bits, at, draw, optional

EPS, ROWS = 1e-5, ("x", "residual", "dy", "d_residual", "gate")
# What each gradient of a group norm is made of, and what else where there is an activation.
OF_GROUPS = {
    "x": ({"dy", "x", "mean", "rstd", "weight"}, {"bias"}),
    "weight": ({"dy", "x", "mean", "rstd"}, {"weight", "bias"}),
    "bias": ({"dy"}, {"x", "mean", "rstd", "weight", "bias"}),
}


def drawn(shape=(19, 3 * 41), groups=3):
    """Draw all operands; those with rows are the middle of wider arrays."""
    given = {n: draw(n, (*shape[:-1], shape[-1] + 5), "float32")[..., 3:-2] for n in ROWS}
    given |= {n: optional(n, shape[-1], "float32") for n in ("weight", "bias")}
    statistic = (shape[0], groups)
    return given | {
        n: draw(n, statistic, "float32", mean=1, deviation=0.1) for n in ("mean", "rstd")
    }


class Backward:
    """A backward of a row norm, or of a group norm with an activation or without."""

    def __init__(self, kind, **norm):
        names = {"x", "dy", "mean", "rstd", "weight", "bias"}
        if kind in OF_GROUP_NORMS:
            self.function, activation = cunorm.group_norm_backward, kind.startswith("silu")
            self.norm = {"num_groups": 5, "activation": "silu" if activation else None}
            self.made_of = {n: a | b if activation else a for n, (a, b) in OF_GROUPS.items()}
            given = drawn((2, 4900 if "three" in kind else 24, 10), groups=5)
        else:
            self.function, given = cunorm.normalize_backward, drawn()
            self.norm = {"center": True, "groups": 3, "c": 3.0, "weight_offset": 1.0}
            self.norm |= {"round_before_weight": True} | norm
            names |= {"d_residual"}
            if kind is not None:
                names |= {"gate"}
                self.norm |= {"gate_activation": "gelu", "gate_position": kind}
            self.made_of = MADE_OF[kind]
        self.given = {name: given[name] for name in names}

    def __call__(self, needs=None, **changed):
        more = {} if needs is None else {"needs": needs}
        return self.function(**self.given | changed, **self.norm, **more)


OF_GROUP_NORMS = {"silu", "no activation", "silu in three passes"}
CASES = [*NEEDS, *(("silu", needs) for needs in (("bias", "x"), ("weight", "bias"), ()))]
CASES += [(kind, (name,)) for kind in sorted(OF_GROUP_NORMS) for name in OF_GROUPS]


@pytest.mark.parametrize(("kind", "needs"), CASES)
def test_gradients_asked_for_are_those_among_all_and_need_nothing_else(kind, needs):
    """An array that no wanted gradient is made of is full of NaN: if it is read, it shows.

    The other way round, NaN in what a gradient is made of shows in it.
    """
    backward = Backward(kind)
    whole = backward()
    read = set().union(*(backward.made_of[name] for name in needs))
    unread = {n: np.full_like(backward.given[n], np.nan) for n in backward.given.keys() - read}
    grads = backward(needs, **unread)
    for field in grads._fields:
        if {"dresidual": "x"}.get(field, field[1:]) in needs:
            assert_same_bits(getattr(grads, field), getattr(whole, field), field)
        else:
            assert getattr(grads, field) is None
    for name in read if len(needs) == 1 else ():
        grads = backward(needs, **{name: np.full_like(backward.given[name], np.nan)})
        with at(name):
            assert np.isnan(getattr(grads, f"d{needs[0]}")).all()


def test_without_center_a_mean_is_not_read():
    backward, eps = Backward("pre", center=False), {"eps": EPS}
    given, norm = backward.given, backward.norm
    gate = {"gate": given["gate"]}
    told = {n: v for n, v in norm.items() if n not in ("weight_offset", "round_before_weight")}
    rstd = cunorm.normalize_forward(given["x"], **eps, **gate, **told).rstd
    grads = backward(rstd=rstd, mean=np.full_like(rstd, np.nan))
    operands = [given[name] for name in ("dy", "x", "weight", "bias", "d_residual")]
    check_backward(grads, *operands, **eps, **gate, **norm)


@pytest.mark.parametrize("needs", [None, ("weight", "bias"), ("gate",)])
def test_an_operand_that_is_absent_has_no_gradient(needs):
    of_rows, of_groups = Backward(None), Backward("silu")
    for name in ("weight", "bias"):
        del of_rows.given[name], of_groups.given[name]
    of_rows.norm["weight_offset"] = 0.0
    wanted = None if needs is None else tuple(set(needs) - {"gate"})
    for grads in (of_rows(needs), of_groups(wanted)):
        assert [grads.dweight, grads.dbias] == [None, None]
        assert (grads.dx is None) == (needs is not None)
