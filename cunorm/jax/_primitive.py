# SPDX-License-Identifier: MIT
"""A primitive of JAX whose parameter is a Function: an object with rules for derivatives."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cunorm.jax._ffi import struct

Shaped = tuple[tuple[int, ...], Any]  # the shape and the dtype of a result
Found = list[Array | None]  # None is zero


class Function(ABC):
    """A function of arrays. Equal Functions do the same work; their hashes are equal."""

    @abstractmethod
    def results(self) -> Sequence[Shaped]:
        """Return the shapes and dtypes of the results."""

    @abstractmethod
    def run(self, *arrays: Array) -> Sequence[Array]:
        """Return the results; they have no derivatives."""

    @abstractmethod
    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Array], Found]:
        """Return the results and their tangents; a tangent that is None is zero."""

    def transpose(self, cotangents: Sequence[Any], arrays: Sequence[Any]) -> Found:
        """Return the cotangents of the arrays that are None, of which the results are linear.

        JAX asks only linear Functions, which override this.
        """
        raise NotImplementedError

    def bind(self, *arrays: Array) -> list[Array]:
        found: list[Array] = norm_p.bind(*arrays, function=self)
        return found


norm_p = Primitive("cunorm")
norm_p.multiple_results = True


@norm_p.def_impl
def _run(*arrays: Array, function: Function) -> Sequence[Array]:
    return function.run(*arrays)


@norm_p.def_abstract_eval
def _types_of_results(*types: Any, function: Function) -> list[Any]:
    """Return the types of the results: unsharded, and varying over the axes of the operands."""
    return [jax.typeof(struct(*one, types[0])) for one in function.results()]


mlir.register_lowering(norm_p, mlir.lower_fun(_run, multiple_results=True))


def _jvp(primals: Any, tangents: Any, *, function: Function) -> tuple[list[Array], list[Any]]:
    given = [None if type(one) is ad.Zero else one for one in tangents]
    results, found = function.jvp(primals, given)
    pairs = zip(results, found, strict=True)
    return results, [ad.Zero(jax.typeof(y).to_tangent_aval()) if t is None else t for y, t in pairs]


def _transpose(cotangents: Any, *arrays: Any, function: Function) -> Found:
    given = [None if type(one) is ad.Zero else one for one in cotangents]
    if all(one is None for one in given):
        return [None] * len(arrays)
    known = [None if ad.is_undefined_primal(one) else one for one in arrays]
    return function.transpose(given, known)


def _batch(arrays: Any, axes: Any, *, function: Function) -> tuple[list[Array], list[int]]:
    size = next(
        array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None
    )
    results = Batched(function, size, tuple(axes)).bind(*arrays)
    return results, [0] * len(results)


ad.primitive_jvps[norm_p] = _jvp
ad.primitive_transposes[norm_p] = _transpose
batching.primitive_batchers[norm_p] = _batch


@dataclass(frozen=True)
class Batched(Function):
    """A function of a batch of examples; the axis of examples is the first of each result.

    Its rules are the function's rules under `jax.vmap`.
    """

    function: Function
    size: int
    axes: tuple[int | None, ...]  # of the examples in each operand; None: they share the operand

    def results(self) -> Sequence[Shaped]:
        return [((self.size, *shape), dtype) for shape, dtype in self.function.results()]

    def run(self, *arrays: Array) -> Sequence[Array]:
        return self._mapped(lambda own: [*self.function.run(*own)], arrays)  # type: ignore[no-any-return]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Array], Found]:
        return self._mapped(self.function.jvp, primals, tangents)  # type: ignore[no-any-return]

    def transpose(self, cotangents: Sequence[Any], arrays: Sequence[Any]) -> Found:
        """Add the cotangents of examples that share an operand."""
        mapped = jax.vmap(self.function.transpose, (0, self._axes_of(arrays)), axis_size=self.size)
        found = mapped([*cotangents], [*arrays])
        return [
            None if one is None else one.sum(0) if axis is None else jnp.moveaxis(one, 0, axis)
            for one, axis in zip(found, self.axes, strict=True)
        ]

    def _mapped(self, function: Any, *of_operands: Sequence[Any]) -> Any:
        axes = tuple(map(self._axes_of, of_operands))
        return jax.vmap(function, axes, axis_size=self.size)(*map(list, of_operands))

    def _axes_of(self, arrays: Sequence[Any]) -> list[int | None]:
        pairs = zip(arrays, self.axes, strict=True)
        return [None if array is None else axis for array, axis in pairs]
