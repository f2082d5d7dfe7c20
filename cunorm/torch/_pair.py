# SPDX-License-Identifier: MIT
"""OpPair, which is a forward and its backward; and formulas of y for second derivatives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from cunorm._core.dtypes import parse_dtype
from cunorm._core.memo import memoize
from cunorm._core.plan import OpDef, backward_spec
from cunorm._group_norm.plan import GROUP_BACKWARD, GROUP_FORWARD
from cunorm._group_norm.spec import GroupBackwardSpec, GroupForwardSpec
from cunorm._row_norm.plan import ROW_BACKWARD, ROW_FORWARD
from cunorm._row_norm.spec import RowBackwardSpec, RowForwardSpec

Operand: TypeAlias = Tensor | None
Tensors = Sequence[Operand]
ForwardSpec = RowForwardSpec | GroupForwardSpec
BackwardSpec = RowBackwardSpec | GroupBackwardSpec
Run = Callable[[BackwardSpec, Tensors], Tensors]  # returns a backward's outputs
Context: TypeAlias = Any  # the context of an autograd.Function, with a pair, a spec and an x_dtype


@dataclass(eq=False)
class OpPair:
    """A forward, with results y, the new stream (of row norms) and statistics; and its backward."""

    name: str  # the names of its operators in torch's dispatcher begin with this
    forward: OpDef[Any]
    backward: OpDef[Any]
    formula: Callable[..., Tensor]  # takes a spec, x's dtype, operands; returns y

    def __post_init__(self) -> None:
        forward, backward = self.forward, self.backward
        self.is_rows = "residual" in forward.outputs
        self.no_outputs = (*self.forward.no_outputs, None)  # None is the workspace
        self.operands = [slot.name[1:] for slot in backward.result_slots]  # those with gradients
        # The names of the forward's inputs and results that the backward takes.
        results = [slot.name for slot in forward.result_slots]
        names = [*(slot.name for slot in forward.input_slots), *results, "branch"]
        reads = [slot.name for slot in backward.input_slots]
        self._saved = [name for name in reads if name in names]
        self._pick_saved = itemgetter(*map(names.index, self._saved))
        # The index of each input of the backward in [*gradients of results, *saved arrays].
        gradients = [f"d{name}" for name in results if f"d{name}" in reads]
        self._pick_inputs = itemgetter(*map([*gradients, *self._saved].index, reads))
        self._stream_slots = [
            slot for slot, name in enumerate(forward.inputs) if name in ("x", "residual")
        ]

    def has_stream_gradient(self, spec: ForwardSpec, wanted: tuple[bool, ...]) -> bool:
        """Return whether an operand of the new stream needs a gradient; then it has one, too."""
        return any(wanted[slot] for slot in self._stream_slots) or self._wants_dgate(spec, wanted)

    def _wants_dgate(self, spec: ForwardSpec, wanted: tuple[bool, ...]) -> bool:
        """Return whether the gradient of a branch's gate is wanted."""
        return has_branch_gate(spec) and wanted[self.forward.inputs.index("gate")]

    def save(
        self,
        ctx: Context,
        spec: ForwardSpec,
        wanted: tuple[bool, ...],
        arrays: Tensors,
        outputs: Tensors,
    ) -> None:
        """Keep the arrays that the backward needs; its x is the new stream, if there is one."""
        x, stream = arrays[0], outputs[1] if self.is_rows else None
        branch = x if self._wants_dgate(spec, wanted) else None
        assert x is not None
        ctx.spec, ctx.x_dtype = spec, x.dtype
        ctx.set_materialize_grads(False)
        inputs = arrays if stream is None else (stream, *arrays[1:])
        ctx.save_for_backward(*self._pick_saved((*inputs, *outputs, branch)))

    def gradients(
        self,
        ctx: Context,
        wanted: tuple[bool, ...],
        dy: Operand,
        dresidual_out: Operand,
        run: Run | None,
    ) -> list[Operand]:
        """Return the wanted gradients of the forward's inputs, by `formula` if `run` is None."""
        found: dict[str, Operand]
        if dy is None and not (dresidual_out is not None and has_branch_gate(ctx.spec)):
            dx = None if dresidual_out is None else dresidual_out.to(ctx.x_dtype)
            found = {"x": dx, "residual": dresidual_out}
        elif run is None:
            saved = dict(zip(self._saved, ctx.saved_tensors, strict=True))
            names = (*self.forward.inputs, "branch")
            operands = {name: saved[name] for name in names if name in saved}
            found = recorded_gradients(
                self.formula, ctx.spec, ctx.x_dtype, operands, dy, dresidual_out
            )
        else:
            saved = dict(zip(self._saved, ctx.saved_tensors, strict=True))
            if dy is None:
                dy, wanted, saved = self._without_norm(dresidual_out, wanted, saved)
            gradients = (dy, dresidual_out) if self.is_rows else (dy,)
            arrays = self._pick_inputs((*gradients, *saved.values()))
            spec = _spec_of_gradients(self, ctx.spec, ctx.x_dtype, wanted)
            found = dict(zip(self.operands, run(spec, arrays), strict=True))
        inputs = zip(self.forward.inputs, wanted, strict=True)
        return [found.get(name) if want else None for name, want in inputs]

    def _without_norm(
        self, dresidual_out: Operand, wanted: tuple[bool, ...], saved: dict[str, Operand]
    ) -> tuple[Operand, tuple[bool, ...], dict[str, Operand]]:
        """Return a backward's dy, wanted gradients and saved arrays if only the stream was used.

        All that the norm reads is 0, because 0 times an infinite number would be NaN.
        """
        assert dresidual_out is not None
        zeros = torch.zeros_like(dresidual_out)
        norm = {name: saved[name] for name in ("weight", "mean", "rstd") if name in saved}
        norm = {name: one if one is None else torch.zeros_like(one) for name, one in norm.items()}
        inputs = zip(self.forward.inputs, wanted, strict=True)
        wanted = tuple(want and name not in ("weight", "bias") for name, want in inputs)
        return zeros, wanted, saved | norm | {"x": zeros}


def has_branch_gate(spec: ForwardSpec) -> bool:
    return isinstance(spec, RowForwardSpec) and spec.gate_position == "branch"


@memoize()
def saving(spec: ForwardSpec) -> ForwardSpec:
    """Return the spec of a forward that also returns statistics."""
    return replace(spec, saves=True)


@memoize()
def _spec_of_gradients(
    pair: OpPair, spec: ForwardSpec, x_dtype: torch.dtype, wanted: tuple[bool, ...]
) -> BackwardSpec:
    names = zip(pair.forward.inputs, wanted, strict=True)
    wanted_names = {name.replace("residual", "x") for name, want in names if want}
    needs = tuple(name for name in pair.operands if name in wanted_names)
    x = parse_dtype(spec.function, "x", x_dtype)
    return backward_spec(pair.backward, spec, x, needs)


# --- formulas that autograd differentiates again --------------------------------------------------

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}


def recorded_gradients(
    formula: Callable[..., Tensor],
    spec: Any,
    x_dtype: torch.dtype,
    operands: dict[str, Operand],
    dy: Operand,
    dresidual_out: Operand,
) -> dict[str, Operand]:
    """Return the gradients of a forward's inputs by name; x is the array that was normalised.

    Without a dy, only the new stream was used.
    """
    x = operands["x"]
    assert x is not None
    x_compute = x.to(torch.float64 if torch.float64 in (x_dtype, x.dtype) else torch.float32)
    # The operands are distinct views, even if the caller gives one tensor for two operands.
    operands = {**operands, "x": x_compute}
    views = {name: t if t is None else t.view_as(t) for name, t in operands.items()}
    branch = views.pop("branch", None)
    gradients: dict[str, Operand] = {}
    if dy is not None:
        y = formula(spec, x_dtype, **views).to(dy.dtype)
        gradients |= _gradients(y, views, dy)
    dx = gradients.get("x")
    if dresidual_out is not None:
        dresidual_out = dresidual_out.to(x_compute.dtype)
        dx = dresidual_out if dx is None else dx + dresidual_out
    if dx is None:
        return gradients
    gradients["residual"] = dx.to(x.dtype)
    gate = views.get("gate")
    if gate is not None and has_branch_gate(spec):
        g = ACTIVATIONS[spec.gate_activation](gate.to(dx.dtype))
        if branch is not None:
            gradients |= _gradients(g * branch.to(dx.dtype), {"gate": gate}, dx)
        dx = dx * g
    return gradients | {"x": dx.to(x_dtype)}


def _gradients(y: Tensor, operands: dict[str, Operand], dy: Tensor) -> dict[str, Operand]:
    """Return the gradients of the operands that require one, by name."""
    leaves = {name: t for name, t in operands.items() if t is not None and t.requires_grad}
    found = torch.autograd.grad(y, [*leaves.values()], dy, create_graph=True, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def _centered(rows: Tensor) -> Tensor:
    """Subtract the mean, then the mean of the differences: the first mean has a rounding error."""
    rows = rows - rows.mean(-1, keepdim=True)
    return rows - rows.mean(-1, keepdim=True)


def row_formula(
    spec: RowForwardSpec,
    x_dtype: torch.dtype,
    x: Tensor,
    gate: Operand,
    weight: Operand,
    bias: Operand,
) -> Tensor:
    """Return y by the formula of `cunorm.normalize`; x and y have the compute dtype."""
    compute, groups, row_axes = x.dtype, spec.groups, len(x.shape[spec.axis :])
    width = x.shape[spec.axis :].numel() // groups

    def as_rows(operand: Tensor) -> Tensor:
        leading = operand.shape[: operand.dim() - row_axes]
        return operand.to(compute).reshape(*leading, groups, width)

    gate = None if has_branch_gate(spec) else gate
    g = None if gate is None else ACTIVATIONS[spec.gate_activation](as_rows(gate))
    choose: Callable[..., Any] = spec.formula  # also takes torch's dtypes
    options = choose({"gate": gate, "weight": weight}, x_dtype, compute)
    q = as_rows(x)
    if g is not None and options.pre_gate:
        q = q * g
    if spec.center:
        q = _centered(q)
    r = q * (q.square().mean(-1, keepdim=True) + spec.mean_eps(width)).rsqrt()
    r = r if spec.c is None else r * (spec.c / width**0.5)
    r = r if options.rounded is None else r.to(options.rounded).to(compute)
    n = r if weight is None else r * (as_rows(weight) + spec.weight_offset)
    n = n if bias is None else n + as_rows(bias)
    n = n if g is None or options.pre_gate else n * g
    return n.reshape(x.shape)


def group_formula(
    spec: GroupForwardSpec, x_dtype: torch.dtype, x: Tensor, weight: Operand, bias: Operand
) -> Tensor:
    """Return y by the formula of `cunorm.group_norm`; x and y have the compute dtype."""
    channels_first = x.movedim(spec.channel_axis, 1)
    samples, channels = channels_first.shape[:2]
    q = _centered(channels_first.reshape(samples, spec.num_groups or channels, -1))
    r = q * (q.square().mean(-1, keepdim=True) + spec.eps).rsqrt()
    n = r.reshape(samples, channels, -1)
    n = n if weight is None else n * weight.to(x.dtype)[..., None]
    n = n if bias is None else n + bias.to(x.dtype)[..., None]
    y = ACTIVATIONS[spec.activation](n).reshape(channels_first.shape)
    return y.movedim(1, spec.channel_axis)


ROW = OpPair("row_norm", ROW_FORWARD, ROW_BACKWARD, row_formula)
GROUP = OpPair("group_norm", GROUP_FORWARD, GROUP_BACKWARD, group_formula)
