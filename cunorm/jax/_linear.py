# SPDX-License-Identifier: MIT
"""What a norm does in JAX, functions that are linear in some of their arrays, arrays by name."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from cunorm._core.dtypes import DType
from cunorm._core.memo import memoize
from cunorm._core.operands import present
from cunorm._core.tensor import OptionalSpec
from cunorm.jax._call import Call, replace_interned
from cunorm.jax._formulas import STATISTICS
from cunorm.jax._primitive import Found, Function, Shaped

Names = tuple[str, ...]
Named = dict[str, Any]  # arrays by name; None is zero


class Kernels(Protocol):
    """The kernels of a norm, and its formula."""

    corrects: bool  # whether the statistics of centred rows have a correction of the mean

    def run(self, spec: Any, arrays: Sequence[Any], *, saves: bool) -> Named:
        """Return y and the new stream, with `saves` also the statistics of rows."""

    def derive(self, spec: Any, x_dtype: DType, needs: Names, given: Named) -> Named:
        """Return the gradients of the operands in `needs`; `given` has the backward's inputs."""

    def push(self, call: Call, given: Named, saved: Named) -> Array:
        """Return y's tangent for those of x (the array that is normalised) and of others."""

    def formula(self, call: Call, operands: Named) -> Array:
        """Return y in the compute dtype."""

    def needs_bias(self, spec: Any, wanted: Names) -> bool:
        """Return whether derivatives by the wanted operands need the bias."""


_RESULTS = ("y", "residual", *STATISTICS)  # residual is the new stream


@memoize()
def specs_of_results(norm: Kernels, call: Call, saves: bool) -> dict[str, Any]:
    """Return the specs of the results, by their names."""
    op, (_, spec, inputs) = call.op, call
    own = Call(op, replace_interned(spec, saves=saves), inputs)
    specs, shared = [*inputs, *op.no_outputs], dict(own.plan.shared)
    for slot, one in own.plan.outputs:
        specs[slot] = one
    found = {
        name: specs[shared.get(slot, slot)] for slot, name in enumerate(op.outputs, op.first_output)
    }
    if norm.corrects and found["mean"] is not None:
        found["correction"] = found["mean"]
    return {name: found[name] for name in _RESULTS if found.get(name) is not None}


@dataclass(frozen=True)
class Linear(Function):
    """A function that is linear in the arrays with the names `given`."""

    norm: Kernels
    call: Call
    given: Names
    saved: Names

    @property
    @abstractmethod
    def names(self) -> Names:
        """The names of results."""

    @abstractmethod
    def run_named(self, given: Named, saved: Named) -> Named:
        """Return the results by the kernels."""

    @abstractmethod
    def formula(self, given: Named, saved: Named) -> Named:
        """Return the results by operations that JAX can derive by the saved arrays."""

    def bind_named(self, given: Named, saved: Named) -> Named:
        return named(self.names, self.bind(*given.values(), *saved.values()))

    def _split(self, arrays: Sequence[Any]) -> tuple[Named, Named]:
        count = len(self.given)
        return named(self.given, arrays[:count]), named(self.saved, arrays[count:])

    def run(self, *arrays: Array) -> Sequence[Array]:
        found = self.run_named(*self._split(arrays))
        return [found[name] for name in self.names]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Array], Found]:
        given, saved = self._split(primals)
        of_given, of_saved = (without_zeros(one) for one in self._split(tangents))
        # Statistics are those of x, by which the formula is derived.
        of_saved = {name: one for name, one in of_saved.items() if name not in STATISTICS}
        found: Named = {}
        if of_given and not (of_saved and self._rounds(saved)):
            found = replace(self, given=(*of_given,)).bind_named(of_given, saved)
            of_given = {}
        if of_saved:
            more = _by_formula(self, given, saved, of_given, of_saved)
            found = {name: added(found.get(name), more[name]) for name in self.names}
        return self.bind(*primals), [*map(found.get, self.names)]

    def _rounds(self, saved: Named) -> bool:
        """Return whether results are rounded; then a sum of two would be rounded three times."""
        return any(dtype != saved["rstd"].dtype for _, dtype in self.results())


@partial(jax.jit, static_argnums=0, inline=True)
def _by_formula(
    function: Linear, given: Named, saved: Named, of_given: Named, of_saved: Named
) -> Named:
    """Return the tangents of the results for those of some arrays."""

    def of_own(own: Named, own_saved: Named) -> Named:
        return function.formula(given | own, saved | own_saved)

    primals = {name: given[name] for name in of_given}, {name: saved[name] for name in of_saved}
    found: Named = jax.jvp(of_own, primals, (of_given, of_saved))[1]
    return found


# --- arrays by name -------------------------------------------------------------------------------


def named(names: Names, arrays: Sequence[Any]) -> Named:
    return dict(zip(names, arrays, strict=True))


def without_zeros(arrays: Named) -> Named:
    return {name: one for name, one in arrays.items() if one is not None}


def added(one: Array | None, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def spec_of(call: Call, name: str) -> Any:
    return present(call.inputs[call.op.inputs.index(name)])


def shaped(spec: OptionalSpec) -> Shaped:
    return present(spec).shape, jnp.dtype(present(spec).dtype.name)
