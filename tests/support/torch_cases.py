# SPDX-License-Identifier: MIT
"""Calls of cunorm.torch's functions, each with the tensors that get gradients."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cunorm.torch as ct
from tests.support.operands import draw

SHAPE, IMAGES = (2, 4, 6), (2, 4, 3, 2)
ACTIVATIONS = ["sigmoid", "tanh", "relu", "gelu_tanh"]  # silu and gelu are used below
PRE = {"gate_position": "pre", "center": True}
ROWS = {  # the function, its operands besides x, and its options
    "rms_norm": ("rms_norm", "weight", {}),
    "Gemma's": ("rms_norm", "weight", {"weight_offset": 1.0}),
    "Llama's": ("rms_norm", "weight", {"round_before_weight": True}),
    "two axes": ("rms_norm", "weight", {"axis": 1}),
    "groups": ("rms_norm", "weight bias gate", {"groups": 2}),
    "layer_norm": ("layer_norm", "weight bias", {}),
    "modulated": ("layer_norm", "weight bias", {"weight_offset": 1.0}),
    "the next residual": ("rms_norm", "weight bias", {}),
    "bias alone": ("layer_norm", "bias", {}),
    "l2_norm": ("l2_norm", "", {"eps": 0.1, "groups": 3}),
    "normalize": ("normalize", "weight bias", {"c": 2.0, "center": True}),
    "add_rms_norm": ("add_rms_norm", "residual weight", {}),
    "a new stream": ("add_rms_norm", "weight", {}),
    "add_layer_norm": ("add_layer_norm", "residual weight bias", {}),
    "a gated branch": (
        "add_layer_norm",
        "residual weight bias gate",
        {"gate_activation": "tanh", "gate_position": "branch"},
    ),
    "a branch with a number": (
        "add_rms_norm",
        "weight gate",
        {"gate_activation": "identity", "gate_position": "branch"},
    ),
    "add_normalize": ("add_normalize", "residual weight bias gate", {"c": 0.5} | PRE),
} | {
    f"{activation} gate": (
        "normalize",
        "weight bias gate",
        {"gate_activation": activation} | (PRE if index % 2 else {}),
    )
    for index, activation in enumerate(ACTIVATIONS)
}
GROUPS = {
    "group_norm": ("group_norm", "weight bias", {"num_groups": 2, "channel_axis": -1}),
    "channels last": (
        "group_norm",
        "weight bias",
        {"num_groups": 2, "channel_axis": 1, "activation": "gelu"},
    ),
    "instance_norm": ("instance_norm", "weight bias", {"channel_axis": 1, "activation": "swish"}),
}
CASES = ROWS | GROUPS
SHAPES = {  # of operands that vary over rows, or of the gate of a branch
    "modulated": {"weight": (2, 1, 6), "bias": (4, 6)},
    "the next residual": {"bias": SHAPE},
    "a gated branch": {"gate": (2, 1, 6)},
    "a branch with a number": {"weight": (4, 6), "gate": (2, 1, 1)},
}


def tensor(name, *shape, dtype="float64", grad=True):
    """Draw numbers, seeded by the name and shape."""
    result = torch.from_numpy(draw(name, shape, "float64")).to(getattr(torch, dtype))
    return result.requires_grad_(grad)


def operands(name):
    """Draw the operands of a case."""
    _, given, options = CASES[name]
    shape = IMAGES if name == "channels last" else SHAPE
    axis = options.get("channel_axis", -1)
    parameter = (shape[axis],) if name in GROUPS else shape[options.get("axis", -1) :]
    shapes = dict.fromkeys(("weight", "bias"), parameter) | SHAPES.get(name, {})
    tensors = {key: tensor(key, *shapes.get(key, shape)) for key in ("x", *given.split())}
    if name == "channels last":
        x = tensors["x"].detach().to(memory_format=torch.channels_last)
        tensors["x"] = x.requires_grad_()
    return tensors


def case(name, module=ct):
    """Return the case's function of tensors, which returns a tuple, and tensors to pass to it."""
    function, _, options = CASES[name]
    given = operands(name)

    def call(*tensors):
        named = dict(zip(given, tensors, strict=True))
        named |= {"residual": named.get("residual")} if function.startswith("add_") else {}
        result = getattr(module, function)(**named, **options)
        return tuple(result) if isinstance(result, tuple) else (result,)

    return call, tuple(given.values())


def gradients(call, tensors, **options):
    """Return the gradients of a weighted sum of all results."""
    results = [one for one in call(*tensors) if one.requires_grad]
    return torch.autograd.grad(results, tensors, [factors(one) for one in results], **options)


def factors(result):
    """Return small integers in the layout of a result."""
    numbers = torch.arange(result.numel(), device=result.device) % 7 - 2
    return torch.zeros_like(result) + numbers.to(result.dtype).reshape(result.shape)


class Watch(TorchDispatchMode):
    """Records the calls of cunorm's operators, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "cunorm":
            self.seen.append((operator, args))
        return operator(*args, **kwargs or {})


def assert_same(actual, expected):
    """Check that tensors agree in dtype, strides and bits; torch.equal takes no 8-bit floats."""
    for one, other in zip(actual, expected, strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        one, other = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (one, other))
        assert torch.equal(one, other)
