# SPDX-License-Identifier: MIT
"""A backward reads only the inputs of the requested gradients, and returns no others."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import cunorm
from tests.support.case_covers import ACTIVATIONS
from tests.support.case_covers import NEEDS as SUBSETS
from tests.support.cases import call_of
from tests.support.covers import everything, label
from tests.support.gpu_arrays import OnNumpy
from tests.support.gradients import INPUTS_OF, NEEDS
from tests.support.host_code import needs_a_compiler
from tests.support.machines import compiled_for, machines
from tests.support.operands import DTYPES, assert_same_bits, at, draw
from tests.support.placed import Samples

EVERY = {"shape": (1, 1, 19, 41), "groups": 3, "center": True, "c": 3.0, "weight_offset": 1.0}
EVERY |= {"round_before_weight": True, "d_residual": "float32", "gate_activation": "gelu"}
# Kinds of group norms: positions, and the activation. In the last, there are three passes.
GROUP_NORMS = {"silu": (24, "silu"), "linear": (24, None), "long": (4900, "silu")}
ALL = {"dy", "x", "mean", "rstd", "weight", "bias"}
LINEAR = {"x": ALL - {"bias"}, "weight": ALL - {"weight", "bias"}, "bias": {"dy"}}
GROUP_INPUTS_OF = dict.fromkeys(GROUP_NORMS, dict.fromkeys(LINEAR, ALL)) | {"linear": LINEAR}
CASES = [*NEEDS, ("silu", ("bias", "x")), ("silu", ("weight", "bias"))]
CASES += [(kind, (name,)) for kind in GROUP_NORMS for name in LINEAR]


def backward(kind, **more):
    """Return a call: `kind` is a key of GROUP_NORMS, a gate's position, or None (no gate)."""
    if kind in GROUP_NORMS:
        positions, activation = GROUP_NORMS[kind]
        case = {"samples": Samples(2, (positions,), 10, 5), "activation": activation}
        return call_of("group_norm_backward", case | more, OnNumpy())
    gated = {"gate": "float32", "gate_position": kind} if kind else {}
    return call_of("row_norm_backward", EVERY | gated | more, OnNumpy())


@pytest.mark.parametrize(("kind", "needs"), CASES)
def test_requested_gradients_equal_those_of_all_and_need_no_other_inputs(kind, needs):
    """Inputs that no requested gradient depends on are NaN, so that reading them gives NaN.

    Conversely, NaN in an input of a gradient shows in the gradient.
    """
    whole, part = backward(kind).check(), backward(kind, needs=needs)
    read = set().union(*((INPUTS_OF | GROUP_INPUTS_OF)[kind][name] for name in needs))
    for name, placed in part.inputs.items():
        if placed and name not in read:
            placed.host[...] = np.nan
    grads = part.run()
    for field in grads._fields:
        if {"dresidual": "x"}.get(field, field[1:]) in needs:
            assert_same_bits(getattr(grads, field), getattr(whole, field), field)
        else:
            assert getattr(grads, field) is None
    for name in read if len(needs) == 1 else ():
        part = backward(kind, needs=needs)
        part.inputs[name].host[...] = np.nan
        with at(name):
            assert np.isnan(getattr(part.run(), f"d{needs[0]}")).all()


@pytest.mark.parametrize("needs", [("x", "weight", "bias"), ("weight", "bias")])
def test_an_operand_that_is_absent_has_no_gradient(needs):
    x, dy = (draw(name, (4, 7, 10), "float32") for name in ("x", "dy"))
    f = cunorm.layer_norm_forward(x)
    row_grads = cunorm.layer_norm_backward(dy, x, rstd=f.rstd, mean=f.mean, needs=needs)
    f = cunorm.group_norm_forward(x, 5)
    group_grads = cunorm.group_norm_backward(dy, x, 5, mean=f.mean, rstd=f.rstd, needs=needs)
    for grads in (row_grads, group_grads):
        assert [grads.dweight, grads.dbias] == [None, None]
        assert (grads.dx is not None) == ("x" in needs)


@needs_a_compiler
@pytest.mark.parametrize("machine", machines())
def test_gradients_of_a_gate_or_of_weight_and_gate_are_not_old_memory(machine):
    """Memory in which builds keep values between passes is poisoned first: see `machines.py`.

    Without dx and center, a post-gate's backward reduces over no row. So no first pass stores
    values, and the kernel must not read the memory for such values.
    """
    case = dict.fromkeys(("x", "dy", "gate"), "float16") | {"bias": None, "workspace": True}
    for needs, width in product([("gate",), ("weight", "gate")], (3, 300)):
        sized = case | {"shape": (1, 1, 5, width), "needs": needs}
        with compiled_for(machine), at(needs, width):
            call_of("row_norm_backward", sized, OnNumpy()).check()


# --- all subsets, on all instruction sets ---------------------------------------------------------

_ALL = {"x": tuple(DTYPES), "machine": machines()}
OF_ROWS = {"gate_position": ("post", "pre"), "gate_activation": ACTIVATIONS, **_ALL}
OF_GROUPS = {"channels_last": (True, False), "activation": (None, *ACTIVATIONS[:-1]), **_ALL}
# In a group norm of the first size, a thread keeps h, the gradient before the activation, from one
# pass to the next. In the second, the workspace keeps h.
SIZES = ((2, (30,), 40, 8), (3, (97,), 400, 4))


@pytest.mark.exhaustive
@needs_a_compiler
@pytest.mark.parametrize(
    ("kernel", "needs"),
    [pytest.param(k, n, id=f"{k}-{'-'.join(n)}") for k in SUBSETS for n in SUBSETS[k]],
)
def test_all_gradients_with_all_activations_positions_and_dtypes_are_within_their_bounds(
    kernel, needs
):
    for case in everything(OF_GROUPS if "group" in kernel else OF_ROWS):
        case |= dict.fromkeys(("dy", "gate"), case["x"]) | {"needs": needs, "workspace": True}
        if "group" in kernel:
            sized = [{"samples": Samples(*size, case["channels_last"])} for size in SIZES]
        else:
            sized = [{"shape": (1, 1, 5, width)} for width in (3, 300)]
        for size in sized:
            with compiled_for(case["machine"]), at(label(case), size), np.errstate(all="ignore"):
                call_of(kernel, case | size, OnNumpy()).check()
