# SPDX-License-Identifier: MIT
"""The derivatives of a norm: Functions for its results, their tangents, and its gradients.

Tangent is linear in the tangents of operands, Gradients in the cotangents of results, and each is
the transpose of the other. JAX derives them again by `formula`, in the arrays that they are given
besides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from cunorm._core.operands import present
from cunorm.jax._call import Call, gates_branch
from cunorm.jax._formulas import ACTIVATIONS, STATISTICS
from cunorm.jax._linear import (
    Kernels,
    Linear,
    Named,
    Names,
    added,
    named,
    shaped,
    spec_of,
    specs_of_results,
    without_zeros,
)
from cunorm.jax._primitive import Found, Function, Shaped


@dataclass(frozen=True)
class Forward(Function):
    """A norm as a function of its operands; `call` has no absent ones."""

    norm: Kernels
    call: Call
    saves: bool = False  # whether the statistics of rows are results

    @property
    def operands(self) -> Names:
        pairs = zip(self.call.op.inputs, self.call.inputs, strict=True)
        return tuple([name for name, one in pairs if one is not None])

    @property
    def names(self) -> Names:
        return tuple(specs_of_results(self.norm, self.call, self.saves))

    def results(self) -> Sequence[Shaped]:
        return [*map(shaped, specs_of_results(self.norm, self.call, self.saves).values())]

    def run(self, *arrays: Array) -> Sequence[Array]:
        given = named(self.operands, arrays)
        inputs = [*map(given.get, self.call.op.inputs)]
        found = self.norm.run(self.call.spec, inputs, saves=self.saves)
        return [present(found[name]) for name in self.names]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Array], Found]:
        own = replace(self, saves=True)
        operands = named(self.operands, primals)
        pushed = without_zeros(named(self.operands, tangents))
        results = named(own.names, own.bind(*primals))
        saved = _saved(self.norm, self.call, operands, results, (*pushed,))
        found = Tangent(self.norm, self.call, (*pushed,), (*saved,)).bind_named(pushed, saved)
        return [results[name] for name in self.names], [*map(found.get, self.names)]


def _saved(norm: Kernels, call: Call, operands: Named, results: Named, wanted: Names) -> Named:
    """Return the arrays that derivatives by the wanted operands need, by their names."""
    known = operands | {name: results[name] for name in STATISTICS if name in results}
    known.pop("residual", None)
    branch = known["x"]
    known["x"] = results.get("residual", branch)
    if "bias" not in wanted and not norm.needs_bias(call.spec, wanted):
        known.pop("bias", None)
    if "gate" in wanted and gates_branch(call.spec):
        known["branch"] = branch
    return known


class Tangent(Linear):
    """The tangents of y and of the new stream; `given` are operands with tangents."""

    @property
    def names(self) -> Names:
        return ("y", "residual") if self._has_stream() else ("y",)

    def _has_stream(self) -> bool:
        of_stream = ("x", "residual", *(["gate"] if gates_branch(self.call.spec) else []))
        has_stream = "residual" in specs_of_results(self.norm, self.call, False)
        return has_stream and not {*of_stream}.isdisjoint(self.given)

    def results(self) -> Sequence[Shaped]:
        specs = specs_of_results(self.norm, self.call, False)
        return [shaped(specs[name]) for name in self.names]

    def run_named(self, given: Named, saved: Named) -> Named:
        return self._derived(self.norm.push, given, saved)

    def formula(self, given: Named, saved: Named) -> Named:
        return self._derived(partial(push_by_formula, self.norm), given, saved)

    def _derived(self, push: Any, given: Named, saved: Named) -> Named:
        stream = self._of_stream(given, saved)
        names = ("weight", "bias") if gates_branch(self.call.spec) else ("weight", "bias", "gate")
        own = {name: given[name] for name in names if name in given}
        if stream is not None:
            own["x"] = stream
        y = push(self.call, own, saved).astype(self.results()[0][1])
        return {"y": y} | ({"residual": stream} if self._has_stream() else {})

    def _of_stream(self, given: Named, saved: Named) -> Array | None:
        """Return the tangent of the array that is normalised, None if it is zero."""
        if not self._has_stream():
            return given.get("x")
        x, residual, compute = given.get("x"), given.get("residual"), saved["rstd"].dtype
        found = None if x is None else x.astype(compute)
        if gates_branch(self.call.spec):
            act, gate = ACTIVATIONS[self.call.spec.gate_activation], saved["gate"].astype(compute)
            found = None if found is None else found * act(gate)
            if "gate" in given:
                of_gate = jax.jvp(act, (gate,), (given["gate"].astype(compute),))[1]
                found = added(found, saved["branch"].astype(compute) * of_gate)
        if residual is not None:
            found = added(found, residual.astype(compute))
        return present(found).astype(saved["x"].dtype)

    def transpose(self, cotangents: Sequence[Any], arrays: Sequence[Any]) -> Found:
        given, saved = self._split(arrays)
        wanted = tuple([name for name, one in given.items() if one is None])
        of_results = without_zeros(named(self.names, cotangents))
        cts = {"dy": of_results.get("y"), "d_residual": of_results.get("residual")}
        found = _gradients(self, wanted, without_zeros(cts), saved)
        return [*map(found.get, self.given), *[None] * len(saved)]


def push_by_formula(norm: Kernels, call: Call, given: Named, saved: Named) -> Array:
    """Do the work of `Kernels.push` by the formula."""
    own = {name: saved[name] if name in saved else jnp.zeros_like(given[name]) for name in given}
    y_of = partial(norm.formula, call)
    tangent: Array = jax.jvp(lambda own: y_of(saved | own), (own,), (given,))[1]
    return tangent


def _gradients(tangent: Tangent, wanted: Names, cotangents: Named, saved: Named) -> Named:
    """Return the gradients of the wanted operands, by their names."""
    norm, call = tangent.norm, tangent.call
    if {"x", "residual"}.isdisjoint(wanted) and not ("gate" in wanted and gates_branch(call.spec)):
        cotangents = {name: one for name, one in cotangents.items() if name == "dy"}
    if not cotangents:
        return {}
    if "dy" not in cotangents:  # of the results, only the stream was used
        wanted = tuple([name for name in wanted if name in ("x", "residual", "gate")])
        if not gates_branch(call.spec):
            of_stream = cotangents["d_residual"]
            return {n: of_stream.astype(spec_of(call, n).dtype.name) for n in wanted if n != "gate"}
    own = Gradients(norm, call, (*cotangents,), (*saved,), wanted)
    return own.bind_named(cotangents, saved)


@dataclass(frozen=True)
class Gradients(Linear):
    """The gradients of the operands `wanted`; `given` are dy, d_residual or both."""

    wanted: Names

    @property
    def names(self) -> Names:
        return self.wanted

    def results(self) -> Sequence[Shaped]:
        return [shaped(spec_of(self.call, name)) for name in self.wanted]

    def run_named(self, given: Named, saved: Named) -> Named:
        needs = {"x" if name == "residual" else name for name in self.wanted}
        if "dy" not in given:  # all that the norm reads is 0: 0 * inf would be NaN
            zeros = {n: jnp.zeros_like(one) for n, one in saved.items() if n in _OF_NORM}
            saved = saved | zeros | {"sums.sum_r_dr": zeros["rstd"]}
            if "mean" in zeros:
                saved["sums.sum_dr"] = zeros["mean"]
            given = given | {"dy": zeros["x"]}
        x_dtype = spec_of(self.call, "x").dtype
        found = self.norm.derive(self.call.spec, x_dtype, tuple(sorted(needs)), saved | given)
        if "residual" in self.wanted:  # dresidual has the dtype of the new stream
            residual = spec_of(self.call, "residual").dtype.name
            found["dresidual"] = present(found["dresidual"]).astype(residual)
        return {name: found[f"d{name}"] for name in self.wanted}

    def formula(self, given: Named, saved: Named) -> Named:
        compute, call = saved["rstd"].dtype, self.call
        dy, d_residual = (given.get(name) for name in ("dy", "d_residual"))
        dx = None if d_residual is None else d_residual.astype(compute)
        found: Named = {}
        if dy is not None:
            found = self._of_norm(dy.astype(compute), saved)
            if "x" in found:
                dx = added(found["x"], dx)
        found["residual"] = dx
        if gates_branch(call.spec) and dx is not None:
            found |= _of_branch(call.spec.gate_activation, dx, saved, "gate" in self.wanted)
        elif dx is not None:
            found["x"] = dx
        dresidual = found["residual"]
        if dresidual is not None:
            found["residual"] = dresidual.astype(saved["x"].dtype)
        return {name: found[name].astype(spec_of(call, name).dtype.name) for name in self.wanted}

    def _of_norm(self, dy: Array, saved: Named) -> Named:
        """Return gradients without those that come through the stream and the gate of a branch."""
        of_stream = ("x", "residual", *(["gate"] if gates_branch(self.call.spec) else []))
        names = {"x" if name in of_stream else name for name in self.wanted}
        wide = saved | {"x": saved["x"].astype(dy.dtype)}
        own = {n: wide[n] if n in wide else _zeros(spec_of(self.call, n), dy.dtype) for n in names}
        found: Named = jax.vjp(lambda own: self.norm.formula(self.call, wide | own), own)[1](dy)[0]
        return found

    def transpose(self, cotangents: Sequence[Any], arrays: Sequence[Any]) -> Found:
        given, saved = self._split(arrays)
        pushed = without_zeros(named(self.wanted, cotangents))
        own = Tangent(self.norm, self.call, (*pushed,), self.saved)
        found = own.bind_named(pushed, saved)
        of_given = {"dy": found["y"], "d_residual": found.get("residual")}
        return [
            *(of_given[name] if one is None else None for name, one in given.items()),
            *[None] * len(saved),
        ]


# Of a backward's inputs, those that the norm reads.
_OF_NORM = ("x", "weight", *STATISTICS)


def _of_branch(activation: str, ds: Array, saved: Named, wants_gate: bool) -> Named:
    """Return the gradients of a gated branch from that of the stream."""
    act, gate = ACTIVATIONS[activation], saved["gate"]

    def g(gate: Array) -> Array:
        return jnp.broadcast_to(act(gate.astype(ds.dtype)), ds.shape)

    factor, pull = jax.vjp(g, gate)
    found: Named = {"x": ds * factor}
    if wants_gate:
        found["gate"] = pull(ds * saved["branch"].astype(ds.dtype))[0]
    return found


def _zeros(spec: Any, dtype: Any) -> Array:
    return jnp.zeros(spec.shape, dtype)
