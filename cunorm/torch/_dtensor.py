# SPDX-License-Identifier: MIT
"""Row norms of DTensors: each process normalises its local tensor, or its part of the rows."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cunorm._core import validate
from cunorm._core.tensor import contiguous_strides
from cunorm._core.validate import describe_type
from cunorm._dispatch import parse
from cunorm._row_norm.order import leading_axes_of
from cunorm._row_norm.plan import ROW_FORWARD
from cunorm._row_norm.spec import RowForwardSpec
from cunorm.torch._autograd import call
from cunorm.torch._groups import untraced
from cunorm.torch._pair import ROW, Operand, Tensors
from cunorm.torch._split import grouped_call


def is_dtensor(kind: type) -> bool:
    return (kind.__module__, kind.__name__) == ("torch.distributed.tensor", "DTensor")


@untraced("norms of DTensors")
def dtensor_call(scalars: tuple[Any, ...], arrays: Tensors, *groups: object) -> Sequence[Operand]:
    """Return y and the new stream, placed as x is, or None; x is a DTensor."""
    from torch.distributed.tensor import DTensor

    function, x = scalars[0], arrays[0]
    assert isinstance(x, DTensor)
    for name, given in zip(("process_group", "parameter_group"), groups, strict=True):
        if given is not None:
            raise ValueError(
                f"{function}: {name} is given and x is a DTensor, expected None: the placements of "
                "DTensors say how they are split"
            )
    group = _group_of_rows(parse(ROW_FORWARD, scalars), x)
    named = zip(ROW_FORWARD.inputs, arrays, strict=True)
    local = [_local(function, name, one, x) for name, one in named]
    if group is None:
        results = call(ROW, scalars, tuple(local))
    else:
        results = grouped_call(scalars, tuple(local), group, None)
    whole: Any = {"shape": x.shape, "stride": contiguous_strides(tuple(x.shape))}
    return [
        None
        if one is None or one is local[0]
        else DTensor.from_local(one, x.device_mesh, x.placements, run_check=False, **whole)
        for one in results[:2]
    ]


def _group_of_rows(spec: RowForwardSpec, x: Any) -> Any:
    """Return the group of the processes that have parts of the same rows, or None."""
    function, axis = spec.function, validate.integer(spec.function, "axis", spec.axis)
    leading = leading_axes_of(function, tuple(x.shape), axis)
    for placement in x.placements:
        if not (placement.is_replicate() or type(placement).__name__ == "Shard"):
            raise ValueError(
                f"{function}: x has placements {x.placements}, expected Shard and Replicate: pass "
                "x.redistribute(...)"
            )
    split = [
        dim
        for dim, placement in enumerate(x.placements)
        if placement.is_shard() and placement.dim >= leading
    ]
    if len(split) > 1:
        raise ValueError(
            f"{function}: x has placements {x.placements}, expected rows that at most one "
            "dimension of the mesh splits"
        )
    if not split:
        return None
    if spec.groups != 1:
        raise ValueError(
            f"{function}: groups is {spec.groups} and x has placements {x.placements}, expected "
            "rows that no dimension of the mesh splits: pass x.redistribute(...)"
        )
    _check_parts(function, x, x.shape[x.placements[split[0]].dim], x.device_mesh.size(split[0]))
    return x.device_mesh.get_group(split[0])


def _check_parts(function: str, x: Any, length: int, parts: int) -> None:
    """Check that each process has a part of the rows, or others would wait for those without."""
    of_part = -(-length // parts)  # as torch.chunk splits an axis
    if length <= of_part * (parts - 1):
        raise ValueError(
            f"{function}: x has shape {tuple(x.shape)} and placements {x.placements}, expected a "
            f"part of each row on all {parts} processes"
        )


def _local(function: str, name: str, one: Any, x: Any) -> Tensor | None:
    """Return a process's part of an operand, which is placed as x is.

    Where an operand has no axis for an axis of x, or one of 1, the gradients of all processes are
    added.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    if one is None:
        return None
    if not is_dtensor(type(one)) or one.device_mesh != x.device_mesh:
        got = "on another mesh" if is_dtensor(type(one)) else describe_type(type(one))
        raise TypeError(
            f"{function}: {name} is {got}, expected a DTensor on the mesh of x: pass "
            f"distribute_tensor({name}, x.device_mesh, ...)"
        )
    if one is x:
        local: Tensor = x.to_local()
        return local
    placements: list[Any] = []
    gradients: list[Any] = []
    for placement in x.placements:
        axis = placement.dim - (x.ndim - one.ndim) if placement.is_shard() else -1
        is_split = axis >= 0 and one.shape[axis] == x.shape[placement.dim]
        placements.append(Shard(axis) if is_split else Replicate())
        shares = placement.is_shard() and not is_split
        gradients.append(Partial() if shares else placements[-1])
    found: Tensor = one.redistribute(placements=placements).to_local(grad_placements=gradients)
    return found
