# SPDX-License-Identifier: MIT
"""Kinds of tensors, and modes of the forward, for the fuzzer's networks."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils.checkpoint import checkpoint


class Trivial(torch.Tensor):
    """A subclass with plain memory."""


class TrivialParameter(torch.nn.Parameter):
    """A parameter of a subclass with plain memory."""


class Wrapped(torch.Tensor):
    """A subclass whose numbers are in another tensor, as in subclasses for collectives."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, layout=inner.layout
        )

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(one: Any) -> Any:
            return one.inner if isinstance(one, cls) else one

        return func(*(torch.utils._pytree.tree_map(plain, args)), **(kwargs or {}))


def plain(one: Any) -> Any:
    """Return a tensor of torch's own class, with the numbers of a given tensor."""
    if one is None:
        return None
    one = one.detach()
    one = one.inner if isinstance(one, Wrapped) else one
    one = one.wait() if isinstance(one, AsyncCollectiveTensor) else one
    return one.as_subclass(torch.Tensor).resolve_neg()


# Gradients that arrive.
DYS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda dy: dy,
    "expanded": lambda dy: dy[:1].expand(dy.shape),
    "zero-strided": lambda dy: dy[:1, :1, :1].squeeze().expand(dy.shape),
    "negated": torch._neg_view,
    "transposed": lambda dy: dy.transpose(0, -1).contiguous().transpose(0, -1),
    "trivial": lambda dy: dy.as_subclass(Trivial),
    "wrapped": Wrapped,
    "async": AsyncCollectiveTensor,
    "zero": lambda dy: torch._efficientzerotensor(dy.shape, dtype=dy.dtype),
}


# --- ways to run the forward ----------------------------------------------------------------------


def _within(context: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a wrap that runs the forward in a context."""

    def wrap(forward: Any) -> Any:
        def run(*inputs: Any) -> Any:
            with context():
                return forward(*inputs)

        return run

    return wrap


def _after(mode: Callable[[], Any], forward: Any) -> Any:
    """Run the forward twice, first in a mode that records nothing."""

    def run(*inputs: Any) -> Any:
        with mode():
            forward(*inputs)
        return forward(*inputs)

    return run


def _to_bytes(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    return file.getvalue()


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return 2 * dy * ctx.saved_tensors[0]


@cache
def keeps_leaf_hooks() -> bool:
    """Return whether PyTorch runs a leaf's hooks if an autograd.Function ran in a wrap of `SAVING`.

    PyTorch 2.6 and 2.7 do not.
    """
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: 3 * gradient)
    with saved_tensors_hooks(lambda one: one.detach(), lambda one: one):
        y = _Square.apply(x)
    y.backward()
    return bool(x.grad == 6)


SAVING = ("checkpoint", "packed", "strided", "subclass")  # these wraps use `saved_tensors_hooks`
WRAPS: dict[str, Callable[[Any], Any]] = {
    "checkpoint": lambda forward: partial(checkpoint, forward, use_reentrant=False),
    "reentrant": lambda forward: partial(checkpoint, forward, use_reentrant=True),
    "packed": _within(
        lambda: saved_tensors_hooks(_to_bytes, lambda data: torch.load(io.BytesIO(data)))
    ),
    "strided": _within(  # unpacked with other strides
        lambda: saved_tensors_hooks(
            lambda t: t.detach().clone(), lambda t: torch.stack([t, t + 1], -1)[..., 0]
        )
    ),
    "subclass": _within(
        lambda: saved_tensors_hooks(lambda t: t.detach(), lambda t: t.clone().as_subclass(Trivial))
    ),
    "autocast": _within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "no_grad": partial(_after, torch.no_grad),
    "inference": partial(_after, torch.inference_mode),
}
