# SPDX-License-Identifier: MIT
"""OpPair, which is a forward and its backward: what is saved between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import torch

from cunorm._arrays._torch_private import saved_tensors
from cunorm._core.dtypes import parse_dtype
from cunorm._core.memo import memoize
from cunorm._core.plan import OpDef, backward_spec
from cunorm._group_norm.plan import GROUP_BACKWARD, GROUP_FORWARD, GROUP_JVP
from cunorm._group_norm.spec import GroupBackwardSpec, GroupForwardSpec
from cunorm._row_norm.jvp_plan import ROW_JVP
from cunorm._row_norm.plan import ROW_BACKWARD, ROW_FORWARD
from cunorm._row_norm.spec import RowBackwardSpec, RowForwardSpec
from cunorm.torch._formulas import Operand as Operand
from cunorm.torch._formulas import compute_of, gated_branch, pulled

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
    tangent: OpDef[Any]  # of y

    def __post_init__(self) -> None:
        forward, backward = self.forward, self.backward
        self.is_rows = "residual" in forward.outputs
        self.no_outputs = (*self.forward.no_outputs, None)  # None is the workspace
        self.operands = [slot.name[1:] for slot in backward.result_slots]  # those with gradients
        # The names of the forward's inputs and results that the backward takes.
        results = [slot.name for slot in forward.result_slots]
        names = [*(slot.name for slot in forward.input_slots), *results, "branch"]
        reads = [slot.name for slot in backward.input_slots]
        self.saved = [name for name in reads if name in names]
        self._pick_saved = itemgetter(*map(names.index, self.saved))
        # The index of each input of the backward in [*gradients of results, *saved arrays].
        gradients = [f"d{name}" for name in results if f"d{name}" in reads]
        self._pick_inputs = itemgetter(*map([*gradients, *self.saved].index, reads))
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
        *,
        keeps_branch: bool = False,
    ) -> tuple[Operand, ...]:
        """Keep the arrays that the backward needs; its x is the new stream, if there is one."""
        x, stream = arrays[0], outputs[1] if self.is_rows else None
        keeps_branch = keeps_branch and has_branch_gate(spec)
        branch = x if keeps_branch or self._wants_dgate(spec, wanted) else None
        assert x is not None
        ctx.spec, ctx.x_dtype = spec, x.dtype
        ctx.set_materialize_grads(False)
        inputs = arrays if stream is None else (stream, *arrays[1:])
        saved: tuple[Operand, ...] = self._pick_saved((*inputs, *outputs, branch))
        ctx.save_for_backward(*saved)
        return saved

    def gradients(
        self,
        ctx: Context,
        wanted: tuple[bool, ...],
        dy: Operand,
        dresidual_out: Operand,
        run: Run,
    ) -> list[Operand]:
        """Return the wanted gradients of the forward's inputs."""
        found: dict[str, Operand]
        if dy is None and not has_branch_gate(ctx.spec):  # only the new stream was used
            dx = None if dresidual_out is None else dresidual_out.to(ctx.x_dtype)
            found = {"x": dx, "residual": dresidual_out}
        else:
            saved = dict(zip(self.saved, saved_tensors(ctx), strict=True))
            if dy is None:
                found = _branch_gradients(ctx.spec, ctx.x_dtype, saved, dresidual_out)
            else:
                gradients = (dy, dresidual_out) if self.is_rows else (dy,)
                arrays = self._pick_inputs((*gradients, *saved.values()))
                spec = _spec_of_gradients(self, ctx.spec, ctx.x_dtype, wanted)
                found = dict(zip(self.operands, run(spec, arrays), strict=True))
        inputs = zip(self.forward.inputs, wanted, strict=True)
        return [found.get(name) if want else None for name, want in inputs]


def has_branch_gate(spec: ForwardSpec) -> bool:
    return isinstance(spec, RowForwardSpec) and spec.gate_position == "branch"


def _branch_gradients(
    spec: Any, x_dtype: torch.dtype, saved: dict[str, Operand], dresidual_out: Operand
) -> dict[str, Operand]:
    """Return the gradients of the operands of a new stream with a gate, if y was not used."""
    gate, branch = saved["gate"], saved["branch"]
    if dresidual_out is None or gate is None:
        dx = None if dresidual_out is None else dresidual_out.to(x_dtype)
        return {"x": dx, "residual": dresidual_out}
    ds = dresidual_out.to(compute_of(x_dtype, dresidual_out.dtype))
    scale = partial(gated_branch, spec.gate_activation)
    found: dict[str, Operand] = {"x": scale(ds, gate).to(x_dtype), "residual": dresidual_out}
    if branch is not None:  # dgate is wanted
        (found["gate"],) = pulled(partial(scale, branch.to(ds.dtype)), (gate,), ds)
    return found


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


ROW = OpPair("row_norm", ROW_FORWARD, ROW_BACKWARD, ROW_JVP)
GROUP = OpPair("group_norm", GROUP_FORWARD, GROUP_BACKWARD, GROUP_JVP)
