# SPDX-License-Identifier: MIT
"""Row norms of which the processes of a group have parts of the rows.

Forward, each process sends the moments of its parts of the rows, and the number of their elements;
backward, the sums that the gradient of x needs. Every process combines what all have sent in the
order of their ranks, so all have the same bits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from cunorm._arrays._torch_private import (
    count_modes,
    is_collective,
    is_legacy_batch,
    is_tracing,
    is_transforming,
    wait,
)
from cunorm._arrays.torch import PLAIN_TYPES, TORCH_DTYPES
from cunorm._core import validate
from cunorm._core.dtypes import parse_dtype
from cunorm._core.memo import memoize
from cunorm._core.tensor import Device, TensorSpec
from cunorm._core.validate import describe_type
from cunorm._dispatch import dispatch_spec, parse
from cunorm._row_norm.combine_plan import COMBINE_MOMENTS
from cunorm._row_norm.plan import ROW_FORWARD
from cunorm._row_norm.spec import RowBackwardSpec, RowForwardSpec
from cunorm._row_norm.split_plan import ROW_GIVEN, ROW_GIVEN_SUMS, ROW_MOMENTS, ROW_SUMS
from cunorm._row_norm.split_spec import (
    combine_spec,
    given_spec,
    given_sums_spec,
    moments_spec,
    sums_spec,
)
from cunorm.torch._autograd import call, check_tensors, refuse_tangents
from cunorm.torch._groups import check_group, summed, untraced
from cunorm.torch._pair import ROW, Context, Operand, Tensors, saving

# Newer versions of PyTorch have the first of these names, older ones the second.
_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
_HEADER = 1  # numbers in front of a message: the number of elements of a row's part


@untraced("norms with process_group or parameter_group")
def grouped_call(
    scalars: tuple[Any, ...], arrays: Tensors, process_group: Any, parameter_group: Any
) -> Sequence[Operand]:
    """Return y and the new stream, or None; at least one group is given."""
    function = scalars[0]
    _refuse_modes(function)
    x, weight, bias, *others = arrays
    if parameter_group is not None:
        check_group(function, "parameter_group", parameter_group)
        weight, bias = summed(parameter_group, weight, bias)
    arrays = (x, weight, bias, *others)
    if process_group is not None:
        check_group(function, "process_group", process_group)
        spec = saving(parse(ROW_FORWARD, scalars))
        _check_split(spec, arrays)
        if dist.get_world_size(process_group) > 1:
            return _split_norm(process_group, spec, *arrays)
    return call(ROW, scalars, arrays)


def _refuse_modes(function: str) -> None:
    if is_transforming() or count_modes() or is_tracing():
        raise RuntimeError(
            f"{function}: process_group or parameter_group is given under a transform of "
            "torch.func, a mode or a tracer of torch, expected plain calls"
        )


def _check_split(spec: RowForwardSpec, arrays: Tensors) -> None:
    """Check that rows may be split, and that the arrays are plain or results of collectives."""
    function, names = spec.function, ROW_FORWARD.inputs
    validate.integer(function, "axis", spec.axis)
    if spec.groups != 1:
        raise ValueError(
            f"{function}: groups is {spec.groups}, expected 1 with process_group: leave out "
            "process_group if each process has whole groups"
        )
    refuse_tangents(function, names, arrays)
    check_tensors(function, names, arrays)
    for name, array in zip(names, arrays, strict=True):
        kind = type(array)
        if not (array is None or kind in PLAIN_TYPES or is_collective(kind)):
            raise TypeError(
                f"{function}: {name} is {describe_type(kind)}, expected a plain torch.Tensor with "
                "process_group"
            )


class _SplitNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, group: Any, spec: RowForwardSpec, *arrays: Operand
    ) -> tuple[Operand, Operand]:
        wanted = ctx.needs_input_grad[2:]
        arrays = tuple(map(wait, arrays))
        x, weight, bias, gate, residual = arrays
        assert x is not None
        _check(spec, *map(_key, arrays))
        of_moments = None if spec.gate_position == "post" else gate
        message, counts, stream = _moments(group, spec, x, of_moments, residual)
        total = _total(spec, counts)
        rows = message.narrow(1, _HEADER, message.shape[1] - _HEADER)
        statistics = _combined(spec, total, counts, rows, x.shape[: spec.axis])
        own = None if spec.gate_position == "branch" else gate
        given = given_spec(spec, parse_dtype(spec.function, "x", x.dtype), total)
        operands = (x if stream is None else stream, weight, bias, own, *statistics, None, None)
        (y,) = dispatch_spec(ROW_GIVEN, given, operands)
        mean, rstd, ctx.correction = statistics
        ctx.group, ctx.total = group, counts.sum() if total is None else total
        if stream is not None and not ROW.has_stream_gradient(spec, wanted):
            ctx.mark_non_differentiable(stream)
        ROW.save(ctx, spec, wanted, arrays, (y, stream, mean, rstd))
        return y, stream

    @staticmethod
    def backward(ctx: Context, dy: Operand, dresidual_out: Operand) -> tuple[Operand, ...]:
        gradients = wait(dy), wait(dresidual_out)
        are_batched = any(one is not None and is_legacy_batch(one) for one in gradients)
        if torch.is_grad_enabled() or are_batched:
            what = "derivatives are batched" if are_batched else "a second derivative is asked for"
            raise RuntimeError(
                f"{ctx.spec.function}: {what}, expected first ones, one at a time: split rows "
                "(process_group) have no others"
            )
        run = partial(_run_backward, ctx)
        return (None, None, *ROW.gradients(ctx, ctx.needs_input_grad[2:], *gradients, run))


_split_norm: Callable[..., Sequence[Operand]] = _SplitNorm.apply


# --- forward --------------------------------------------------------------------------------------


def _key(array: Operand) -> Any:
    return None if array is None else (array.shape, array.stride(), array.dtype, array.device)


@memoize()
def _check(spec: RowForwardSpec, *keys: Any) -> None:
    """Check the operands of a call, before anything is sent."""
    specs: list[TensorSpec | None] = []
    for name, key in zip(ROW_FORWARD.inputs, keys, strict=True):
        if key is None:
            specs.append(None)
            continue
        shape, strides, dtype, device = key
        where = Device(device.type, device.index or 0)
        known = parse_dtype(spec.function, name, dtype)
        specs.append(TensorSpec(tuple(shape), strides, known, where))
    ROW_FORWARD.plan(spec, (*specs, *ROW_FORWARD.no_outputs))


def _moments(
    group: Any, spec: RowForwardSpec, x: Tensor, gate: Operand, residual: Operand
) -> tuple[Tensor, Tensor, Operand]:
    """Return the messages of all processes, each with a header, its counts, and the new stream."""
    compute, shape = _compute_dtype(spec, x, residual), x.shape[: spec.axis]
    rows, columns = shape.numel(), 3 if spec.center else 1
    if x.is_cpu:
        _check_sizes(spec.function, group, rows, columns * compute.itemsize)
    message = torch.empty(_HEADER + columns * rows, dtype=compute, device=x.device)
    message[0] = x.shape[spec.axis :].numel()
    parts = [one.view(shape) for one in message[_HEADER:].view(columns, rows)]
    mean, m2, correction = parts if spec.center else (None, *parts, None)
    outputs = (mean, m2, correction, None)
    *_, stream = dispatch_spec(ROW_MOMENTS, moments_spec(spec), (x, gate, residual, *outputs, None))
    gathered = _all_gather(group, message)
    return gathered, gathered[:, 0], None if stream is x else stream


def _compute_dtype(spec: RowForwardSpec, x: Tensor, residual: Operand) -> torch.dtype:
    stream = x if residual is None else residual
    given = spec.residual_dtype
    dtypes = (x.dtype, stream.dtype if given is None else TORCH_DTYPES[given])
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _all_gather(group: Any, message: Tensor) -> Tensor:
    """Return the messages of all processes, stacked in the order of their ranks."""
    size = dist.get_world_size(group)
    gathered = message.new_empty(size * message.numel())
    _gather(gathered, message, group=group)
    return gathered.view(size, -1)


def _check_sizes(function: str, group: Any, rows: int, width: int) -> None:
    """Check that all messages have equally many rows and bytes, else gloo would abort a process.

    On a GPU, this would wait for all work; there, NCCL mostly ends a mismatch after the group's
    timeout.
    """
    sizes = _all_gather(group, torch.tensor([rows, width])).tolist()
    for rank, (other_rows, other_width) in enumerate(sizes):
        if other_rows != rows:
            raise ValueError(
                f"{function}: x has {rows} rows, and {other_rows} on rank {rank} of process_group, "
                "expected as many on all ranks"
            )
        if other_width != width:
            raise ValueError(
                f"{function}: process_group exchanges {width} bytes a row, and {other_width} on "
                f"rank {rank}, expected the same function and dtypes on all ranks"
            )


def _total(spec: RowForwardSpec, counts: Tensor) -> int | None:
    """Return the number of elements of a whole row if a number of the call depends on it."""
    if spec.c is None and not spec.eps_of_sum:
        return None
    return round(counts.sum(dtype=torch.float64).item())


def _combined(
    spec: RowForwardSpec, total: int | None, counts: Tensor, gathered: Tensor, shape: torch.Size
) -> list[Operand]:
    """Return the mean, rstd and correction of whole rows."""
    parts = gathered.unflatten(1, (3 if spec.center else 1, *shape)).unbind(1)
    mean, m2, correction = parts if spec.center else (None, *parts, None)
    inputs, of_all = (m2, mean, correction, counts), combine_spec(spec, total, None)
    return dispatch_spec(COMBINE_MOMENTS, of_all, (*inputs, *COMBINE_MOMENTS.no_outputs, None))


# --- backward -------------------------------------------------------------------------------------


def _run_backward(ctx: Context, spec: RowBackwardSpec, arrays: Tensors) -> Tensors:
    """Return the gradients; `arrays` are in the order of the backward of whole rows."""
    dy, _, x, weight, _, gate, mean, rstd, _ = arrays
    own = None if spec.gate_position == "branch" else gate
    of_x = "x" in spec.needs or ("gate" in spec.needs and spec.gate_position != "post")
    sums = [mean, rstd]  # nothing reads them if only parameters are wanted
    correction = ctx.correction
    total = ctx.total if isinstance(ctx.total, int) else 1
    if of_x:
        assert rstd is not None
        columns = 2 if spec.center else 1
        message = torch.empty(columns, *rstd.shape, dtype=rstd.dtype, device=rstd.device)
        outputs = message.unbind() if spec.center else (None, *message.unbind())
        operands = (dy, x, weight, own, mean, rstd, correction)
        dispatch_spec(ROW_SUMS, sums_spec(spec), (*operands, *outputs, None))
        gathered = _all_gather(ctx.group, message.view(-1))
        added = gathered.sum(0).view(message.shape)
        if isinstance(ctx.total, Tensor):
            added /= ctx.total
        sums = [*added.unbind()] if spec.center else [None, *added.unbind()]
    given = given_sums_spec(spec, total)
    inputs = (*arrays, correction, *sums)
    return dispatch_spec(ROW_GIVEN_SUMS, given, (*inputs, *ROW_GIVEN_SUMS.no_outputs, None))
