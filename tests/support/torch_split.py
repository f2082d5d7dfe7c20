# SPDX-License-Identifier: MIT
"""Rows that processes of PyTorch share: their parts, and norms of them beside the oracle's."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import distributed as dist

import cunorm
import cunorm.torch as ct
from tests.support.bounds import check_backward, check_forward
from tests.support.operands import draw

ROWS, WIDTH = (3, 5), 14
WIDTHS = {2: (9, 5), 4: (4, 1, 6, 3)}  # of the parts of a row, by the number of processes
CASES = {
    "layer_norm far from 0": ("layer_norm", {"mean": 1e4}, {}),
    "rms_norm": ("rms_norm", {"x": "bfloat16"}, {"weight_offset": 1.0}),
    "a pre-gate": ("layer_norm", {"gate": "float32", "mean": 1e2}, {"gate_position": "pre"}),
    "a post-gate": ("rms_norm", {"gate": "bfloat16"}, {}),
    "a length": ("normalize", {}, {"center": True, "c": 3.0}),
    "l2_norm": ("l2_norm", {}, {}),
    "a stream": (
        "add_rms_norm",
        {"x": "bfloat16", "residual": "float32"},
        {"round_before_weight": True},
    ),
    "a gated branch": (
        "add_layer_norm",
        {"residual": "float32", "gate": "float32"},
        {"gate_position": "branch", "gate_activation": "tanh"},
    ),
}

# The arguments of `normalize` that stand for a function.
GENERIC = {
    "rms_norm": {"eps": 1e-6},
    "layer_norm": {"eps": 1e-5, "center": True},
    "l2_norm": {"eps": 1e-12 / WIDTH, "c": 1.0},
    "normalize": {"eps": 1e-6},
}


def widths():
    return WIDTHS[dist.get_world_size()]


def part(array, rank=None):
    """Return a process's columns of an array."""
    rank = dist.get_rank() if rank is None else rank
    end = [*accumulate(widths())][rank]
    return array[..., end - widths()[rank] : end]


def joined(array):
    """Return the columns of all processes."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, array)
    return np.concatenate(parts, -1)


def operands(dtypes):
    """Return the operands of a case, dy and d_residual as float64 arrays and their dtypes."""
    dtypes = {"x": "float32"} | dtypes
    mean, width = dtypes.pop("mean", 0.0), WIDTH
    shapes = dict.fromkeys(dtypes, (*ROWS, width)) | {"weight": (width,), "bias": (width,)}
    dtypes = dict.fromkeys(shapes, "float32") | dtypes
    arrays = {name: draw(name, shape, dtypes[name]) for name, shape in shapes.items()}
    arrays["x"] = (arrays["x"].astype(np.float64) + mean).astype(arrays["x"].dtype)
    arrays |= {name: draw(name, (*ROWS, width), dtypes["x"]) for name in ("dy",)}
    return arrays | {"d_residual": draw("d_residual", (*ROWS, width), "float32")}


def leaf(array):
    return to_torch(array).requires_grad_()


def to_torch(array):
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor, like):
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(like)
    return tensor.numpy()


def check_case(name):
    """Compare a case's results and gradients with the oracle for whole rows."""
    function, dtypes, options = CASES[name]
    whole = operands(dict(dtypes))
    bf16 = draw("x", (1,), "bfloat16").dtype
    dy, d_residual = whole.pop("dy"), whole.pop("d_residual")
    if function == "l2_norm":
        whole = {"x": whole["x"]}
    mine = {key: leaf(part(array)) for key, array in whole.items()}
    result = getattr(ct, function)(**mine, **options, process_group=dist.group.WORLD)
    results = {"y": result} if isinstance(result, torch.Tensor) else result._asdict()
    given = {"y": to_torch(part(dy)), "residual": to_torch(part(d_residual))}
    torch.autograd.backward([*results.values()], [given[key] for key in results])
    found = {key: joined(to_numpy(one, bf16)) for key, one in results.items()}
    grads = {f"d{key}": joined(to_numpy(one.grad, bf16)) for key, one in mine.items()}
    options = GENERIC[function.removeprefix("add_")] | options
    options |= {"gate": whole["gate"]} if "gate" in whole else {}
    x, weight, bias = whole["x"], whole.get("weight"), whole.get("bias")
    forward = cunorm.NormForward(**found)
    worst = check_forward(forward, x, weight, bias, whole.get("residual"), **options)
    stream = found.get("residual", x)
    more = {"branch": x} if options.get("gate_position") == "branch" else {}
    if "residual" in found:
        more |= {"d_residual": d_residual, "x_dtype": x.dtype}
    worst |= check_backward(cunorm.NormGrads(**grads), dy, stream, weight, bias, **more, **options)
    assert {"y", "dx"} <= worst.keys()


class Part(torch.autograd.Function):
    """This process's columns of a tensor that all processes have."""

    @staticmethod
    def forward(ctx, whole):
        ctx.shape = whole.shape
        return part(whole).clone()

    @staticmethod
    def backward(ctx, gradient):
        whole = gradient.new_zeros(ctx.shape)
        part(whole).copy_(gradient)
        dist.all_reduce(whole)
        return whole


class Joined(torch.autograd.Function):
    """The columns of all processes."""

    @staticmethod
    def forward(ctx, mine):
        return torch.from_numpy(joined(mine.detach().numpy()))

    @staticmethod
    def backward(ctx, gradient):
        return part(gradient)
