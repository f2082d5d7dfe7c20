# SPDX-License-Identifier: MIT
"""What torch.func wants: batches become further rows or samples, or calls of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Dims = Sequence[Any]
Batched = tuple[tuple[Any, ...], tuple[int, ...]]  # results, and where each one's batch axis is


def transformable(
    operator: Callable[..., Any], save: Callable[..., None], gradients: Callable[..., Any]
) -> Callable[..., Any]:
    """Return an operator as torch.func wants it, which does not ask operators for gradients."""

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True  # by the rules of the operators
        setup_context = staticmethod(save)
        backward = staticmethod(gradients)

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operator(*arguments)

    run: Callable[..., Any] = Transformed.apply
    return run


def differentiable_once(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return the operator of a backward, transformable, whose own gradients are an error."""
    return transformable(operator, lambda ctx, inputs, output: None, _refuse)


def _refuse(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "cunorm.torch has no second derivatives under torch.func, only through "
        "torch.autograd.grad(..., create_graph=True)"
    )


def is_batched(dim: Any) -> bool:
    """Whether an argument, none of which is a list of tensors, has a batch axis."""
    return isinstance(dim, int)


def in_front(arguments: Sequence[Any], dims: Dims, batch: int) -> list[Any]:
    """Return tensors with the batch axis as the first; those without one are expanded."""
    return [
        one
        if one is None
        else one.movedim(dim, 0)
        if is_batched(dim)
        else one.expand(batch, *one.shape)
        for one, dim in zip(arguments, dims, strict=True)
    ]


def one_by_one(
    operator: Callable[..., Any], batch: int, dims: Dims, arguments: Sequence[Any]
) -> Batched:
    """Call an operator for each item of a batch: what all rows share differs between them."""
    calls = [
        operator(
            *(
                one.select(dim, item) if is_batched(dim) else one
                for one, dim in zip(arguments, dims, strict=True)
            )
        )
        for item in range(batch)
    ]
    results = tuple(torch.stack(items) for items in zip(*calls, strict=True))
    return results, (0,) * len(results)
