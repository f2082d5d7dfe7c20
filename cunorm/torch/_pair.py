# SPDX-License-Identifier: MIT
"""OpPair: a forward and its backward, and what connects the two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from cunorm._core.dtypes import parse_dtype
from cunorm._core.memo import memoize
from cunorm._core.plan import OpDef
from cunorm._dispatch import dispatch_spec
from cunorm._group_norm import spec as group_spec
from cunorm._group_norm.ops import GROUP_BACKWARD, GROUP_FORWARD
from cunorm._row_norm import spec as row_spec
from cunorm._row_norm.ops import ROW_BACKWARD, ROW_FORWARD
from cunorm.torch._formula import group_formula, recorded_gradients, row_formula

Tensors = Sequence[Any]  # some of which may be None
Run = Callable[[Any, Tensors], Tensors]  # returns a backward's outputs, of a spec and inputs

_GRADIENTS = ("dy", "d_residual")  # inputs of a backward: the gradients of y and of the new stream


@dataclass(eq=False)
class OpPair:
    """A forward, whose outputs are y, of row norms the new stream, and statistics; its backward."""

    name: str  # of the operators of torch's dispatcher, but for the direction
    forward: OpDef
    backward: OpDef
    backward_spec: Callable[..., Any]  # of a forward's spec, x's dtype if there are streams, needs
    formula: Callable[..., Any]  # y by torch's operations, of a forward's spec, x's dtype, operands

    def __post_init__(self) -> None:
        self.is_rows = self.has_stream = "residual" in self.forward.outputs
        self.no_outputs = (None,) * (len(self.forward.outputs) + 1)
        self.operands = [name[1:] for name in self.backward.outputs]  # whose gradients those are
        self._saved = [name for name in self.backward.inputs if name not in _GRADIENTS]  # x first
        names = (*self.forward.inputs, *self.forward.outputs)
        self._pick_saved = itemgetter(*map(names.index, self._saved[1:]))
        gradients = _GRADIENTS[: 1 + self.has_stream]
        self._gradients = [*map(self.backward.inputs.index, gradients)]

    def save(self, ctx: Any, spec: Any, arrays: Tensors, outputs: Tensors) -> None:
        """Keep what the backward needs, also what was normalised: the stream if there is one."""
        x, stream = arrays[0], outputs[1] if self.has_stream else None
        ctx.spec, ctx.x_dtype = spec, x.dtype
        ctx.set_materialize_grads(False)
        saved = self._pick_saved((*arrays, *outputs))
        ctx.save_for_backward(x if stream is None else stream, *saved)

    def gradients(
        self, ctx: Any, wanted: tuple[bool, ...], dy: Any, d_residual: Any, run: Run | None
    ) -> list[Any]:
        """Return the wanted gradients of the forward's inputs, by the formula without `run`."""
        if dy is None:
            of_x = None if d_residual is None else d_residual.to(ctx.x_dtype)
            found = {"x": of_x, "residual": d_residual}
        elif run is None:
            saved = dict(zip(self._saved, ctx.saved_tensors, strict=True))
            operands = {name: saved[name] for name in self.forward.inputs if name in saved}
            formula = partial(self.formula, ctx.spec, ctx.x_dtype)
            found = recorded_gradients(formula, ctx.x_dtype, operands, dy, d_residual)
        else:
            arrays = [*ctx.saved_tensors]
            for place, gradient in zip(self._gradients, (dy, d_residual), strict=False):
                arrays.insert(place, gradient)
            spec = _spec_of_gradients(self, ctx.spec, ctx.x_dtype, wanted)
            found = dict(zip(self.operands, run(spec, arrays), strict=True))
        names = zip(self.forward.inputs, wanted, strict=True)
        return [found.get(name) if want else None for name, want in names]

    def run(self, op: OpDef, spec: Any, arrays: Tensors) -> list[Any]:
        """Run the forward or the backward; gradients may be negated views."""
        plain = [*arrays, *(None,) * (len(op.outputs) + 1)]
        for place in self._gradients if op is self.backward else ():
            if plain[place] is not None and plain[place].is_neg():
                plain[place] = plain[place].resolve_neg()
        return dispatch_spec(op, spec, tuple(plain))


@memoize()
def _spec_of_gradients(
    pair: OpPair, spec: Any, x_dtype: torch.dtype, wanted: tuple[bool, ...]
) -> Any:
    names = zip(pair.forward.inputs, wanted, strict=True)
    wanted_names = {name.replace("residual", "x") for name, want in names if want}
    needs = tuple(name for name in pair.operands if name in wanted_names)
    x_dtypes = [parse_dtype(spec.function, "x", x_dtype)] if pair.has_stream else []
    return pair.backward_spec(spec, *x_dtypes, needs)


ROW = OpPair("row_norm", ROW_FORWARD, ROW_BACKWARD, row_spec.backward_spec, row_formula)
GROUP = OpPair("group_norm", GROUP_FORWARD, GROUP_BACKWARD, group_spec.backward_spec, group_formula)
