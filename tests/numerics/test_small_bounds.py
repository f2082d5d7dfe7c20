# SPDX-License-Identifier: MIT
"""Where a result should be small or is sure, its bound is small or nothing."""

import numpy as np
import pytest

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from cunorm.results import NormForward
from tests.support import bounds
from tests.support.numpy_kernels import group, row
from tests.support.operands import DTYPES

PRE = {"gate_position": "pre"}


def test_each_group_is_held_to_its_own_size():
    for kernel, first in (
        (row(groups=2, rows=4, width=64, **PRE), np.s_[..., :32]),
        (group(shape=(2, 10, 8)), np.s_[:4]),
    ):
        for name in ("weight", "bias"):
            kernel.operands[name][first] *= np.float32(1e-4)
        f = kernel.forward()
        off = f.y.copy()
        off[..., 0] += np.float32(1e-6) * np.abs(f.y).max()  # much in one group, little in another
        with pytest.raises(AssertionError, match=r"^y\[.*0\]"):
            kernel.check_forward(f._replace(y=off))
        off = f.y.copy()
        off[..., -1] += np.float32(1e-7) * np.abs(f.y).max()
        kernel.check_forward(f._replace(y=off))


@pytest.mark.parametrize("kind", ["gate", "sigmoid", "silu", "gelu", "gelu_tanh"])
def test_where_an_activation_is_flat_so_is_the_bound_of_y_small(kind):
    if kind == "gate":
        kernel = row(rows=4, width=64)
        kernel.told["gate"][:, 0] = -12.0
    else:
        kernel = group(activation=kind)
        kernel.operands["bias"][0] = -25.0  # in the tail; for gelu, beyond the smallest numbers
    f = kernel.forward()
    kernel.check_forward(f)
    f.y[..., 0] += np.float32(1e-8)
    with pytest.raises(AssertionError, match=r"^y\[.*0\]"):
        kernel.check_forward(f)


def test_a_channel_of_zeros_has_no_slope_of_relu():
    kernel = group(activation="relu")
    for name in ("weight", "bias"):
        kernel.operands[name][3] = 0.0
    kernel.check_backward(kernel.backward())
    with pytest.raises(AssertionError, match=r"^dweight\[3\]"):
        kernel.check_backward(kernel.backward("relu' is 1 at 0"))


@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_kernel_may_round_to_either_side_of_a_tie_but_not_otherwise(position):
    rng, low = np.random.default_rng(0), DTYPES["bfloat16"]
    x, gate = (rng.standard_normal((200, 1000)).astype(low) for _ in range(2))
    weight = rng.standard_normal(1000).astype(low)
    options = {"eps": 1e-6, "gate_position": position, "gate": gate}
    kr = reference.normalize_forward(x, **(options if position == "pre" else {"eps": 1e-6})).y
    g = 1.0 if position == "pre" else ACTIVATIONS["silu"].value(gate.astype(np.float64))
    nearest = reference.round_to(kr, low).astype(np.float64)
    other = reference.round_to(2 * kr - nearest, low).astype(np.float64)  # if a tie is near
    to_tie = np.where(other == nearest, np.nan, np.abs((nearest + other) / 2 - kr))

    def check(other_side):
        y = np.where(other_side, other, nearest) * weight.astype(np.float64) * g
        held = bounds.of_forward(x, weight, None, round_before_weight=True, **options)
        return held.check(NormForward(y.astype(np.float32)))

    near, far = to_tie < 2.0**-22 * np.abs(kr), to_tie > 1e-4
    assert min(np.count_nonzero(near), np.count_nonzero(far)) > 10
    check(near)
    for index in np.argwhere(far)[:3]:
        one = np.zeros(x.shape, bool)
        one[tuple(index)] = True
        with pytest.raises(AssertionError, match=r"1 of 200000 elements"):
            check(one)
