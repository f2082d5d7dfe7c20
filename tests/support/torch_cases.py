# SPDX-License-Identifier: MIT
"""Calls of cunorm.torch's functions, each with the tensors that it is differentiated by."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cunorm.torch as ct
from tests.support.operands import draw

ROWS, WIDTH = (2, 2), 6
ACTIVATIONS = ["identity", "sigmoid", "silu", "tanh", "relu", "gelu", "gelu_tanh"]


def tensor(name, *shape, dtype="float64", grad=True):
    """Numbers that follow from the name, some of them large."""
    made = torch.from_numpy(draw(name, shape, "float64")).to(getattr(torch, dtype))
    return made.requires_grad_(grad)


def _operands(*names):
    """Draw arrays of a row norm by their names."""
    shapes = dict.fromkeys(("weight", "bias"), (WIDTH,))
    return {name: tensor(name, *shapes.get(name, (*ROWS, WIDTH))) for name in names}


# Of each, what it is given beside x.
ROW_NORMS = {
    "rms_norm": ("rms_norm", _operands("weight"), {}),
    "rms_norm without weight": ("rms_norm", {}, {"eps": 0.5}),
    "rms_norm of Gemma": ("rms_norm", _operands("weight"), {"weight_offset": 1.0}),
    "rms_norm of Llama": ("rms_norm", _operands("weight"), {"round_before_weight": True}),
    "rms_norm of two axes": (
        "rms_norm",
        {"weight": tensor("wide", ROWS[1], WIDTH)},
        {"axis": 1},
    ),
    "rms_norm of groups": ("rms_norm", _operands("weight", "gate"), {"groups": 2}),
    "layer_norm": ("layer_norm", _operands("weight", "bias"), {}),
    "layer_norm with bias": ("layer_norm", _operands("bias"), {}),
    "layer_norm of groups": ("layer_norm", _operands("weight", "bias"), {"groups": 3}),
    "l2_norm": ("l2_norm", {}, {"eps": 0.1}),
    "normalize": ("normalize", _operands("weight", "bias"), {"c": 2.0, "center": True}),
    "add_rms_norm": ("add_rms_norm", _operands("residual", "weight"), {}),
    "add_rms_norm to none": ("add_rms_norm", {"residual": None} | _operands("weight"), {}),
    "add_layer_norm": ("add_layer_norm", _operands("residual", "weight", "bias"), {}),
    "add_normalize, gated": (
        "add_normalize",
        _operands("residual", "weight", "bias", "gate"),
        {"c": 0.5, "gate_position": "pre", "center": True},
    ),
    **{
        f"{activation} gate {position}": (
            "normalize",
            _operands("weight", "bias", "gate"),
            {"gate_activation": activation, "gate_position": position, "center": center},
        )
        for activation in ACTIVATIONS
        for position, center in (("pre", True), ("post", False))
    },
}
GROUP_NORMS = {
    "group_norm": (2, (2, 3, 4), {}),
    "group_norm, channels first": (2, (1, 4, 3, 2), {"channel_axis": 1, "eps": 0.1}),
    "instance_norm": (None, (2, 4, 5), {"channel_axis": 1, "activation": "swish"}),
    **{f"group_norm and {name}": (2, (2, 3, 4), {"activation": name}) for name in ACTIVATIONS},
}


def _row_norm(name, module):
    function, given, said = ROW_NORMS[name]
    present = {key: one for key, one in given.items() if one is not None}
    absent = {key: None for key, one in given.items() if one is None}

    def call(x, *tensors):
        named = absent | dict(zip(present, tensors, strict=True))
        stream = [named.pop("residual")] if "residual" in named else []
        result = getattr(module, function)(x, *stream, **named, **said)
        return tuple(result) if isinstance(result, tuple) else result

    return call, (tensor("x", *ROWS, WIDTH), *present.values())


def _group_norm(name, module):
    num_groups, shape, said = GROUP_NORMS[name]
    channels = shape[said.get("channel_axis", -1)]
    tensors = (tensor("x", *shape), tensor("weight", channels), tensor("bias", channels))

    def call(x, weight, bias):
        if num_groups is None:
            return module.instance_norm(x, weight, bias, **said)
        return module.group_norm(x, num_groups, weight, bias, **said)

    return call, tensors


# Each activation has a gate before the norm or after it; the other half is left to `-m exhaustive`.
_MORE = {
    f"{activation} gate {'post' if place % 2 else 'pre'}"
    for place, activation in enumerate(ACTIVATIONS)
}
NAMES = [
    pytest.param(name, marks=pytest.mark.exhaustive if name in _MORE else ())
    for name in (*ROW_NORMS, *GROUP_NORMS)
]


def case(name, module=ct):
    """Return a function of tensors, and these; it calls cunorm.torch, or cunorm itself."""
    return (_group_norm if name in GROUP_NORMS else _row_norm)(name, module)


class Watch(TorchDispatchMode):
    """Sees which operators are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(operator.name())
        return operator(*args, **kwargs or {})
