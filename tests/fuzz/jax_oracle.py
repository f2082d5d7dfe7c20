# SPDX-License-Identifier: MIT
"""The values of a random network, and its right gradients by formulas in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.jax_nets import HALVES, Exact, Net, Unrounded, results
from tests.support.operands import DTYPES

# Tolerances are relative to the largest element of the right result; for the loss, jvp and
# linearize, to the sum of the terms' magnitudes. In float32, up to 8 norms follow each other, each
# with some 10 roundings of 6e-8, and cancellation magnifies these by 10. The formulas round to half
# precision where cunorm does, so only numbers near a tie may be rounded differently, by at most
# 2**-10 in float16 and 2**-7 in bfloat16; their tolerances are 8 such differences.
TOLERANCES = {"float64": 1e-12, "float32": 1e-4, "float16": 2**-7, "bfloat16": 2**-4}
_LEAST = 0.03  # the least size of a gradient that is not zero, relative to the largest gradient
_MAX_ROUNDED = 0.25  # the most that `_rounded_otherwise` may change a gradient, in tolerances
_PARAMETERS = ("weight", "gate")  # operands whose values have a mean of 1

Worlds = frozenset  # which of its two values each operand has: the names of those with the second


class Oracle:
    """The right gradients of a network, for each choice of its operands' two values."""

    def __init__(self, net: Net, seed: int) -> None:
        self.net, self.seed = net, seed
        dtypes = {node.dtype for node in net.nodes} | {net.dtype}
        dtypes |= {one.dtype for one in net.operands.values()}
        self.tolerance = max(TOLERANCES[dtype] for dtype in dtypes)
        self.has_halves = bool(dtypes & {*HALVES})
        # Factors of the results in the loss: bfloat16 numbers that are exact in float16, too.
        self.masks = [self._draw(f"mask of {name}", net.shape, "bfloat16") for name in net.results]
        self._found: dict[Any, Any] = {}

    def value(self, name: str, second: bool) -> Any:
        """Return one of the two values of an operand."""
        one, is_near_1 = self.net.operands[name], name.startswith(_PARAMETERS)
        deviation = 0.5 if is_near_1 or name == "m" else 1.0
        shape = self.net.whole(name)
        return self._draw(f"{name} {second}", shape, one.dtype, float(is_near_1), deviation)

    def _draw(self, name: str, shape: Any, dtype: str, mean: float = 0, dev: float = 1) -> Any:
        rng = np.random.default_rng([self.seed, crc32(name.encode())])
        return (mean + dev * rng.standard_normal(shape)).astype(DTYPES[dtype])

    def values(self, world: Worlds[str]) -> list[Any]:
        return [self.value(name, name in world) for name in self.net.operands]

    def gradients(
        self, world: Worlds[str], kind: Any = Exact, dtype: Any = np.float64
    ) -> dict[str, Any]:
        """Return the gradients of the sum of all results times masks, in float64 or float32."""
        if (world, kind, dtype) not in self._found:

            def outs_of(*arrays: Any) -> Any:
                return results(kind, self.net, dict(zip(self.net.operands, arrays, strict=True)))

            with jax.enable_x64(True):
                wide = [jnp.asarray(np.asarray(one, dtype)) for one in self.values(world)]
                masks = tuple(jnp.asarray(np.asarray(one, dtype)) for one in self.masks)
                found = map(np.asarray, jax.vjp(outs_of, *wide)[1](masks))
            self._found[world, kind, dtype] = dict(zip(self.net.operands, found, strict=True))
        return self._found[world, kind, dtype]

    def can_tell(self, world: Worlds[str]) -> bool:
        """Return whether `compare` finds zeros or another operand's gradient in a gradient's place.

        Return False, too, if all gradients are zero, or if large terms cancel in one, so that it is
        small or roundings change it. Those of x and r may be equal: they are if only x + r is used.
        """
        gradients = self.gradients(world)
        largest = {name: float(abs(one).max()) for name, one in gradients.items()}
        live = [name for name, size in largest.items() if size]
        if not live or min(largest[name] for name in live) < _LEAST * max(largest.values()):
            return False
        for others in self._rounded_otherwise(world):
            off = [abs(gradients[name] - others[name]).max() / largest[name] for name in live]
            if max(off) > _MAX_ROUNDED * self.tolerance:
                return False
        pairs = [(one, other) for index, one in enumerate(live) for other in live[:index]]
        for one, other in pairs:
            alike = gradients[one].shape == gradients[other].shape and {one, other} != {"x", "r"}
            if alike and self._is_mistaken(gradients[one], gradients[other]):
                return False
        return True

    def _rounded_otherwise(self, world: Worlds[str]) -> Iterator[dict[str, Any]]:
        """Yield gradients that are not rounded to half precision, and such gradients in float32."""
        if self.has_halves:
            yield self.gradients(world, Unrounded)
        if self.tolerance >= TOLERANCES["float32"]:
            yield self.gradients(world, Unrounded, np.float32)

    def can_tell_apart(self, one: Worlds[str], other: Worlds[str]) -> bool:
        """Return whether the gradients in two worlds are far apart, or equal."""
        first, second = self.gradients(one), self.gradients(other)
        return not any(self._is_mistaken(first[name], second[name]) for name in first)

    def _is_mistaken(self, one: Any, other: Any) -> bool:
        """Return whether a comparison may accept one array for the other, although they differ."""
        most = max(abs(one).max(), abs(other).max())
        return bool(1e-9 * most < abs(one - other).max() < 4 * self.tolerance * most)

    def compare(self, name: str, found: Any, right: Any, scale: float = 0) -> None:
        """Compare an array, relative to `scale` or, without it, to the largest right element."""
        right = np.asarray(right)
        assert found.shape == right.shape, f"{name} has shape {found.shape}, not {right.shape}"
        error = abs(np.asarray(found).astype(np.float64) - right).max()
        scale = scale or abs(right).max()
        assert error <= self.tolerance * scale, (
            f"{name} is off by {error:.3g}, more than {self.tolerance:.3g} times {scale:.3g}\n"
            f"found {np.asarray(found)}\nright {right}"
        )
