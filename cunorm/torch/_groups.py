# SPDX-License-Identifier: MIT
"""Groups of processes: their check, and the sums of parameters' gradients over a group."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist

from cunorm._arrays._torch_private import wait
from cunorm._core.validate import describe_type
from cunorm.torch._pair import Context, Operand

_Call = Callable[..., Sequence[Operand]]


def untraced(what: str) -> Callable[[_Call], _Call]:
    """Decorate a function that torch.compile does not trace: it breaks its graph there."""

    def decorate(function: _Call) -> _Call:
        def run(*arguments: Any) -> Any:
            is_loaded = "torch._dynamo" in sys.modules  # loading it takes seconds
            return (torch.compiler.disable(function) if is_loaded else function)(*arguments)

        marks: Any = run
        marks._torchdynamo_disable = True
        marks._torchdynamo_disable_msg = f"{what} run outside of graphs: leave out fullgraph=True"
        return run

    return decorate


def check_group(function: str, argument: str, group: object) -> None:
    """Check a group of processes of which this process is one."""
    expected = "expected a torch.distributed.ProcessGroup"
    if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{function}: {argument} does not have this process, {expected} that has it"
        )
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        got = describe_type(type(group))
        hint = ": pass its get_group()" if hasattr(group, "get_group") else ""
        raise TypeError(f"{function}: {argument} is {got}, {expected}{hint}")


class _SummedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, group: Any, *parameters: Operand) -> tuple[Operand, ...]:
        ctx.group = group
        return tuple(None if one is None else one.view_as(one) for one in parameters)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, *gradients: Operand) -> tuple[Operand, ...]:
        """Add all gradients in one message; those of 16 bits are added in float32."""
        wanted = [
            (slot, one)
            for slot, one in enumerate(map(wait, gradients))
            if one is not None and ctx.needs_input_grad[slot + 1]
        ]
        if not wanted:
            return (None, *gradients)
        dtypes = {one.dtype for _, one in wanted}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        message = torch.cat([one.reshape(-1).to(dtype) for _, one in wanted])
        dist.all_reduce(message, group=ctx.group)
        parts = message.split([one.numel() for _, one in wanted])
        found: list[Operand] = [None] * len(gradients)
        for (slot, one), part in zip(wanted, parts, strict=True):
            found[slot] = part.view(one.shape).to(one.dtype)
        return (None, *found)


summed: Callable[..., Sequence[Operand]] = _SummedGradients.apply
