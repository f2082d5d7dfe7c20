# SPDX-License-Identifier: MIT
"""The choice of how a norm is called, and the autograd.Function of all norms."""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cunorm._arrays._torch_private import (
    count_modes,
    has_dual_level,
    has_tangent,
    is_batch,
    is_differentiating,
    is_legacy_batch,
    is_tracing,
    is_transforming,
    transforms,
    untransformed_apply,
)
from cunorm._arrays.registry import view
from cunorm._arrays.torch import PLAIN_TYPES, dense_form, no_tangents
from cunorm._core.validate import array_hint, describe_type
from cunorm._dispatch import dispatch, dispatch_spec, parse
from cunorm.torch._derivatives import FUNCTIONS, checked_spec, forward_text
from cunorm.torch._formulas import FORMULAS
from cunorm.torch._library import present
from cunorm.torch._pair import BackwardSpec, Context, ForwardSpec, Operand, OpPair, Tensors, saving
from cunorm.torch._tensors import Shapeless, is_dense, needs_operator, what_refuses

# These are looked up once, because both lookups together take a tenth of a call.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled


class DispatchMode(Enum):
    PLAIN = auto()  # calls `cunorm._dispatch`; no gradient is recorded
    AUTOGRAD = auto()  # calls an `autograd.Function`, which takes a sixth of OPERATOR's time
    OPERATOR = auto()  # calls an operator of torch's dispatcher, for tensor subclasses and modes
    TRANSFORMED = auto()  # calls an operator in a Function that torch.func can transform
    FORMULA = auto()  # computes in torch's operations, whose derivatives torch.compile fuses


def call(pair: OpPair, scalars: tuple[Any, ...], arrays: tuple[Operand, ...]) -> Sequence[Any]:
    """Make a forward's call and return y and, for a row norm, the new residual stream.

    If the new stream is x itself, x or None stands for it. In some modes, statistics follow.
    """
    mode = dispatch_mode(scalars[0], pair.forward.inputs, arrays)
    try:
        if mode is DispatchMode.PLAIN:
            return dispatch(pair.forward, scalars, (*arrays, *pair.no_outputs))
        if mode is DispatchMode.AUTOGRAD:
            return _apply(pair, saving(parse(pair.forward, scalars)), *arrays)
    except (TypeError, ValueError):
        if not any(map(needs_operator, arrays)):
            raise
        mode = DispatchMode.OPERATOR
        check_tensors(scalars[0], pair.forward.inputs, arrays)
    if mode is DispatchMode.FORMULA:
        known = [one if one is None else _known(one) for one in arrays]
        spec = checked_spec(pair.name, tuple(map(specialized, scalars)), known)
        return FORMULAS[pair.name](spec, dict(zip(pair.forward.inputs, arrays, strict=True)))
    functions = FUNCTIONS[pair.name]
    run = functions.forward if mode is DispatchMode.OPERATOR else functions.norm
    return present(run(*arrays, forward_text(pair.name, *map(specialized, scalars))))


def dispatch_mode(function: str, names: Sequence[str], arrays: Tensors) -> DispatchMode:
    """Return how to call a function on tensors; all tensors except x, the first, may be None."""
    if _is_compiling():
        return DispatchMode.FORMULA if is_differentiating() else DispatchMode.OPERATOR
    if is_transforming():
        return _transformed_mode(function)
    if has_dual_level() and any(isinstance(a, Tensor) and has_tangent(a) for a in arrays):
        check_tensors(function, names, arrays)
        return DispatchMode.TRANSFORMED
    requires_grad = False
    for array in arrays:
        if array is None:
            continue
        if type(array) not in PLAIN_TYPES:
            check_tensors(function, names, arrays)
            return DispatchMode.OPERATOR
        requires_grad = requires_grad or array.requires_grad
    if arrays[0] is None:
        check_tensors(function, names, arrays)
    if count_modes() or is_tracing():  # a mode such as FakeTensorMode must see the call
        return DispatchMode.OPERATOR
    is_recorded = requires_grad and _is_grad_enabled()
    return DispatchMode.AUTOGRAD if is_recorded else DispatchMode.PLAIN


def _transformed_mode(function: str) -> DispatchMode:
    """Return TRANSFORMED, or OPERATOR where torch.jit.trace or functionalize must see the call."""
    kinds = transforms()
    if not is_tracing() and "Functionalize" not in kinds:
        return DispatchMode.TRANSFORMED
    if kinds & {"Grad", "Jvp"}:
        what = "torch.jit.trace" if is_tracing() else "torch.func.functionalize"
        raise RuntimeError(
            f"{function}: {what} cannot follow derivatives by torch.func through it: use "
            "torch.fx.experimental.proxy_tensor.make_fx"
        )
    return DispatchMode.OPERATOR


def check_tensors(function: str, names: Sequence[str], arrays: Tensors) -> None:
    """Check that every operand is a dense tensor; all operands except x may be None."""
    for name, array in zip(names, arrays, strict=True):
        if isinstance(array, torch.Tensor):
            if is_batch(array):  # from a vmap that has ended
                view(function, name, array)  # raises an error
            if not is_dense(array):
                is_shapeless = isinstance(array, Shapeless)
                fix = "" if is_shapeless else f": pass {dense_form(name, array)}"
                why = f"{what_refuses(array)}, expected a dense tensor{fix}"
                raise ValueError(f"{function}: {name} {why}")
        elif array is not None or name == "x":
            got = describe_type(type(array))
            hint = array_hint(function, name, array, "torch.as_tensor")
            raise TypeError(f"{function}: {name} is {got}, expected a torch.Tensor{hint}")


def refuse_tangents(function: str, names: Sequence[str], arrays: Tensors) -> None:
    """Raise an error for a tensor with a forward-mode tangent, which an operator would drop."""
    for name, array in zip(names, arrays, strict=True) if has_dual_level() else ():
        if isinstance(array, Tensor) and has_tangent(array):
            raise no_tangents(function, name)


def specialized(scalar: object) -> object:
    """Return a scalar; for a tracer's symbol or torch.jit's tensor, return its number."""
    if torch.compiler.is_dynamo_compiling():
        # Dynamo puts the number of a symbol, not the symbol, into a set.
        return {scalar}.pop() if isinstance(scalar, (int, float)) else scalar
    convert = _NUMBERS.get(type(scalar))
    if convert is not None:
        return convert(scalar)
    if type(scalar) is Tensor and is_tracing() and not (scalar.dim() or scalar.requires_grad):
        return scalar.item()
    return scalar


def _known(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a tracer knows of a tensor."""
    return tuple(map(specialized, tensor.shape)), tensor.dtype, tensor.device.type


_NUMBERS: dict[type, Any] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, pair: OpPair, spec: ForwardSpec, *arrays: Operand
    ) -> tuple[Operand, Operand]:
        """Return y and the new residual stream, or None if there is no stream or it is x."""
        wanted = ctx.needs_input_grad[2:]
        outputs = dispatch_spec(pair.forward, spec, (*arrays, *pair.no_outputs))
        stream = outputs[1] if pair.is_rows else None
        if stream is arrays[0]:
            stream = outputs[1] = None
        elif stream is not None and not pair.has_stream_gradient(spec, wanted):
            ctx.mark_non_differentiable(stream)
        ctx.pair = pair
        pair.save(ctx, spec, wanted, arrays, outputs)
        return outputs[0], stream

    @staticmethod
    def backward(ctx: Context, dy: Operand, dresidual_out: Operand) -> tuple[Operand, ...]:
        pair = ctx.pair
        run = partial(_run_backward, pair, ctx.spec)
        return (None, None, *pair.gradients(ctx, ctx.needs_input_grad[2:], dy, dresidual_out, run))


# A Function's own `apply` first looks for transforms, but `dispatch_mode` has done this.
_apply: Callable[..., Sequence[Operand]] = untransformed_apply(_Norm)


def _run_backward(
    pair: OpPair, forward: ForwardSpec, spec: BackwardSpec, arrays: Tensors
) -> Tensors:
    """Run a backward by the kernels or, if torch must see the call, by an operator."""
    dy, second = arrays[:2]  # in row norms, `second` is the stream's gradient
    assert dy is not None
    if not (
        _is_grad_enabled()  # the gradients may be differentiated
        or has_dual_level()
        or _is_compiling()  # compiled autograd is at work
        or is_transforming()
        or count_modes()
        or is_legacy_batch(dy)  # a vectorised Jacobian has such tensors
        or (second is not None and is_legacy_batch(second))
    ):
        try:
            return dispatch_spec(pair.backward, spec, (*arrays, *pair.backward.no_outputs, None))
        except (TypeError, ValueError):
            if not any(map(needs_operator, arrays)):
                raise
    return FUNCTIONS[pair.name].run(forward)(spec, arrays)
