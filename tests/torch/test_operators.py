# SPDX-License-Identifier: MIT
"""What the operators behind cunorm.torch promise torch's dispatcher: `torch.library.opcheck`.

It runs each on real and on fake tensors and compares the forms of the results, looks at what an
operator changes or returns, and traces forward and backward, against eager calls.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.library import opcheck  # noqa: E402

import cunorm.torch as ct  # noqa: E402
from tests.support.torch_cases import Watch, tensor  # noqa: E402


def of(dtype, *shape):
    return tensor("x", *shape, dtype=dtype)


def rows(dtype):
    """Return rows with gaps between the axes."""
    return of(dtype, 3, 4, 32).transpose(0, 1)


def parameters(size):
    return tensor("weight", size, dtype="float32"), tensor("bias", size, dtype="float16")


IMAGES = (2, 6, 5, 7)
CALLS = {
    "one row": lambda: ct.rms_norm(of("float32", 32)),
    "a gate, groups": lambda: ct.normalize(
        rows("bfloat16"),
        *parameters(32),
        c=3.0,
        center=True,
        groups=2,
        gate=rows("float32"),
        dtype=torch.float32,
    ),
    "a narrow stream": lambda: ct.add_rms_norm(
        rows("float32"), rows("bfloat16"), parameters(32)[0], groups=2
    ),
    "a wide stream begins": lambda: ct.add_layer_norm(
        rows("bfloat16"), None, residual_dtype=torch.float32, axis=1
    ),
    "rounded before weight": lambda: ct.rms_norm(
        rows("bfloat16"), parameters(32)[0], round_before_weight=True, weight_offset=0.5
    ),
    "only parameters": lambda: ct.layer_norm(rows("bfloat16").detach(), *parameters(32)),
    "images": lambda: ct.group_norm(of("bfloat16", *IMAGES), 3, *parameters(6), channel_axis=1),
    "channels last": lambda: ct.group_norm(
        of("bfloat16", *IMAGES).to(memory_format=torch.channels_last),
        3,
        *parameters(6),
        activation="relu",
        channel_axis=1,
        dtype=torch.float32,
    ),
    "some columns, which are copied": lambda: ct.instance_norm(
        of("bfloat16", *IMAGES)[..., :5], channel_axis=1
    ),
    "no positions": lambda: ct.group_norm(of("float32", 2, 6).detach(), 3, *parameters(6)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_operators_of_a_call_and_of_its_backward_keep_their_promises(name):
    with Watch() as watch:
        results = CALLS[name]()
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [torch.ones_like(one) for one in results])
    assert len(watch.seen) == 2
    for operator, arguments in watch.seen:
        opcheck(operator, [leaf(one, "forward" in operator.name()) for one in arguments])


def leaf(argument, is_recorded):
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.detach().requires_grad_(is_recorded and argument.requires_grad)
