# SPDX-License-Identifier: MIT
"""What the operators behind cunorm.torch promise torch's dispatcher: `torch.library.opcheck`.

It runs each on real and on fake tensors and compares the forms of the results, looks at what an
operator changes or returns, and traces forward and backward, against eager calls.
"""

from __future__ import annotations

import pytest

from tests.support.covers import label, pairwise
from tests.support.operands import draw

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.library import opcheck  # noqa: E402

import cunorm.torch  # noqa: E402, F401

OPERATORS = torch.ops.cunorm
ROWS, IMAGES = (4, 3, 32), (2, 6, 5, 7)
NEEDS = ("x", "weight", "bias", "gate")
PARAMETERS = {"weight": "float32", "bias": "float16"}
ROW_NORMS = {
    "stream": ["none", "begins", "float32", "bfloat16"],  # x is bfloat16
    "gate": [None, "float32"],
    "parameters": [False, True],
    "center": [False, True],
    "axis, groups": [(-1, 1), (-1, 2), (1, 1)],
    "round_before_weight": [False, True],
    "dtype": [None, torch.float32],
    "layout": ["contiguous", "transposed"],
    "recorded": [("x", "residual", "gate"), ("weight", "bias")],  # what requires a gradient
}
GROUP_NORMS = {
    "layout": ["contiguous", "channels last", "some channels", "some columns", "no positions"],
    "groups": [None, 3],
    "activation": [None, "relu"],
    "parameters": [False, True],
    "axis": [1, -1],
    "dtype": [None, torch.float32],
    "recorded": [("x",), ("weight", "bias")],
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "some channels": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "some columns": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],  # which are copied
    "no positions": lambda x: x[:, :, 0, 0],
}


def cover(factors):
    """Return a cover of pairs, all but its first cases, which have most of them, exhaustive."""
    every = pairwise(factors)
    exhaustive = [pytest.param(case, marks=pytest.mark.exhaustive) for case in every[6:]]
    return pytest.mark.parametrize("case", every[:6] + exhaustive, ids=label)


def made(name, shape, dtype, case):
    """Draw an operand, which may require a gradient; parameters are contiguous."""
    tensor = torch.from_numpy(draw(name, shape, "float32")).to(getattr(torch, dtype))
    tensor = tensor if name in ("weight", "bias") else LAYOUTS[case["layout"]](tensor)
    return tensor.requires_grad_(name in case["recorded"])


def detached(arrays):
    return [None if one is None else one.detach() for one in arrays]


def row_norm(case):
    """Return x, residual, gate, weight and bias, and what is said of the norm."""
    axis, groups = case["axis, groups"]
    dtypes = {"x": "bfloat16", "gate": case["gate"]} | (PARAMETERS if case["parameters"] else {})
    dtypes["residual"] = None if case["stream"] in ("none", "begins") else case["stream"]
    shapes = dict.fromkeys(("x", "residual", "gate"), ROWS)
    shapes |= dict.fromkeys(("weight", "bias"), ROWS[axis:])
    arrays = [
        made(name, shape, dtypes[name], case) if dtypes.get(name) else None
        for name, shape in shapes.items()
    ]
    variant = (case["center"], axis, groups, case["round_before_weight"], "relu", "post")
    numbers = (1e-5, 3.0, 0.5 if case["parameters"] else 0.0, False)
    stream = torch.float32 if case["stream"] == "begins" else None
    return arrays, ("normalize", *variant, *numbers), (case["dtype"], stream)


@cover(ROW_NORMS)
def test_the_operators_of_row_norms_keep_their_promises(case):
    arrays, said, dtypes = row_norm(case)
    opcheck(OPERATORS.row_norm_forward.default, (*arrays, *said, *dtypes))

    arrays = detached(arrays)
    y, stream, mean, rstd = OPERATORS.row_norm_forward.default(*arrays, *said, *dtypes)
    x, _, gate, weight, bias = arrays
    has_stream = case["stream"] != "none"
    dy = made("dy", ROWS, str(y.dtype)[6:], case)
    d_residual = made("d_residual", ROWS, str(stream.dtype)[6:], case) if has_stream else None
    mean = mean if case["center"] else None
    given = (dy, stream if has_stream else x, rstd, mean, d_residual, gate, weight, bias)
    needs = [name for name in NEEDS if name in case["recorded"]]
    opcheck(OPERATORS.row_norm_backward.default, (*given, *said, x.dtype, needs))


@cover(GROUP_NORMS)
def test_the_operators_of_group_norms_keep_their_promises(case):
    x = made("x", IMAGES, "bfloat16", case)
    channels = x.shape[case["axis"]]
    parameters = [
        made(name, channels, dtype, case) if case["parameters"] else None
        for name, dtype in PARAMETERS.items()
    ]
    groups = None if channels % 3 else case["groups"]  # None: as many as channels
    said = ("group_norm", groups, case["activation"], case["axis"])
    forward = OPERATORS.group_norm_forward.default
    opcheck(forward, (x, *parameters, *said, 1e-5, case["dtype"]))

    x, *parameters = detached([x, *parameters])
    y, mean, rstd = forward(x, *parameters, *said, 1e-5, case["dtype"])
    dy = made("dy", IMAGES, str(y.dtype)[6:], case)
    given = (dy, x, mean, rstd, *parameters, *said, [*case["recorded"]])
    opcheck(OPERATORS.group_norm_backward.default, given)
