# SPDX-License-Identifier: MIT
"""Right results of a random network, by formulas in float64; comparisons with these results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.jax_nets import HALVES, Exact, Net, Unrounded, results
from tests.fuzz.jax_programs import Run
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
    """The right results of a network, for each choice of its operands' two values."""

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

    def at(self, world: Worlds[str], kind: Any = Exact) -> tuple[list[Any], dict[str, Any]]:
        """Return the results, and the gradients of the sum of all results times masks."""
        if (world, kind) not in self._found:
            with jax.enable_x64(True):
                outs, gradients = self._derived(*_float64(self.values(world)), kind=kind)
            named = dict(zip(self.net.operands, map(np.asarray, gradients), strict=True))
            self._found[world, kind] = [np.asarray(out) for out in outs], named
        return self._found[world, kind]

    def second(self, world: Worlds[str], wanted: Sequence[str]) -> list[Any]:
        """Return the gradient of the sum of all wanted gradients."""
        argnums = [[*self.net.operands].index(name) for name in wanted]

        def total(*arrays: Any) -> Any:
            _, gradients = self._derived(*arrays)
            return sum(gradients[index].sum() for index in argnums)

        with jax.enable_x64(True):
            found = jax.grad(total, tuple(argnums))(*_float64(self.values(world)))
        return [np.asarray(one) for one in found]

    def _derived(self, *arrays: Any, kind: Any = Exact, masks: Any = None) -> tuple[Any, Any]:
        names = self.net.operands

        def outs_of(*arrays: Any) -> Any:
            return results(kind, self.net, dict(zip(names, arrays, strict=True)))

        outs, pull = jax.vjp(outs_of, *arrays)
        return outs, pull(masks or tuple(_float64(self.masks)))

    def loss(self, world: Worlds[str]) -> tuple[Any, float]:
        """Return the sum of all results times masks, and the sum of these products' magnitudes."""
        pairs = zip(self.at(world)[0], self.masks, strict=True)
        products = np.stack([out * mask.astype(float) for out, mask in pairs])
        return products.sum(), float(abs(products).sum())

    def can_tell(self, world: Worlds[str]) -> bool:
        """Return whether `compare` finds zeros or another operand's gradient in a gradient's place.

        Return False, too, if all gradients are zero, or if large terms cancel in one, so that it is
        small or roundings change it. Those of x and r may be equal: they are if only x + r is used.
        """
        _, gradients = self.at(world)
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
            yield self.at(world, Unrounded)[1]
        if self.tolerance >= TOLERANCES["float32"]:
            arrays = [jnp.asarray(np.asarray(one, np.float32)) for one in self.values(world)]
            masks = tuple(jnp.asarray(np.asarray(one, np.float32)) for one in self.masks)
            _, gradients = self._derived(*arrays, kind=Unrounded, masks=masks)
            yield dict(zip(self.net.operands, map(np.asarray, gradients), strict=True))

    def can_tell_apart(self, one: Worlds[str], other: Worlds[str]) -> bool:
        """Return whether the gradients in two worlds are far apart, or equal."""
        first, second = self.at(one)[1], self.at(other)[1]
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


def _float64(arrays: Sequence[Any]) -> list[Any]:
    return [jnp.asarray(np.asarray(one, np.float64)) for one in arrays]


# --- right results of a run -----------------------------------------------------------------------


def worlds(net: Net, run: Run) -> list[Worlds[str]]:
    """Return which values the operands have in a run, or in each of its two examples."""
    first = frozenset(net.operands if run.world else ())
    return [first, first ^ frozenset(run.batched)] if run.batched else [first]


def compare(oracle: Oracle, run: Run, found: Any) -> int:
    """Compare the results of a run; return the number of derivatives that are not zero."""
    first, how = worlds(oracle.net, run)[0], run.derivative
    outs, gradients = oracle.at(first)
    right = [gradients[name] for name in run.wanted]
    if how in ("jvp", "linearize"):
        total, size = sum(one.sum() for one in right), sum(abs(one).sum() for one in right)
        oracle.compare("the derivative", found, total, size)
        return 1
    if how == "value_and_grad":
        value, found = found
        oracle.compare("the loss", value, *oracle.loss(first))
    elif how in ("forward", "vjp", "vjp_late"):
        found, *pulled = (found,) if how == "forward" else found
        for pair in zip(found, outs, strict=True):
            oracle.compare("a result", *pair)
        factors = (1, -2)[: len(pulled)]  # of the cotangents
        sides = zip(pulled, factors, strict=True)
        return sum(_pairs(oracle, run, one, [n * r for r in right]) for one, n in sides)
    elif how == "jacrev":
        right = [np.stack([one, -2 * one]) for one in right]
    elif run.batched:
        right = _of_examples(oracle, run)
    elif how in ("grad_of_grad", "jvp_of_grad", "hessian"):
        right = oracle.second(first, run.wanted)
        found = _row_sums(found, right) if how == "hessian" else found
    return _pairs(oracle, run, found, right)


def _pairs(oracle: Oracle, run: Run, found: Any, right: Any) -> int:
    # JAX allows jacfwd where no norm is differentiated; what jacfwd returns has the loss's dtype.
    of_all = oracle.net.loss_dtype if run.derivative == "jacfwd" else ""
    for name, one, other in zip(run.wanted, found, right, strict=True):
        dtype = of_all or oracle.net.operands[name].dtype
        assert str(one.dtype) == dtype, f"d{name} is {one.dtype}, expected {dtype}"
        oracle.compare(f"d{name}", one, other)
    return sum(bool(one.any()) for one in right)


def _of_examples(oracle: Oracle, run: Run) -> list[Any]:
    """Return the gradients for each example, or for the sum of all examples."""
    parts = [oracle.at(world)[1] for world in worlds(oracle.net, run)]
    right = []
    for name in run.wanted:
        each = [part[name] for part in parts]
        axis = 0 if run.derivative == "vmap_of_grad" else run.batched.get(name)
        right.append(sum(each) if axis is None else np.stack(each, axis))
    return right


def _row_sums(hessian: Any, right: Sequence[Any]) -> list[Any]:
    """Return a Hessian's product with ones; a Hessian has a block for each pair of operands."""
    found = []
    for row, one in zip(hessian, right, strict=True):
        found.append(sum(jnp.sum(block, tuple(range(one.ndim, block.ndim))) for block in row))
    return found
