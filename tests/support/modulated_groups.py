# SPDX-License-Identifier: MIT
"""Group norms whose weight and bias may have a row for each sample, and their samples alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import cunorm
from tests.support.operands import Array, assert_same_bits, draw
from tests.support.placed import Samples

SHAPES = ("C", "1, C", "N, C")  # of a weight or bias
Results = dict[str, Array]


class Modulated(NamedTuple):
    """A call of both directions; dtypes are those of x and dy, weight, and bias."""

    samples: Samples
    weight: str | None = "N, C"  # its shape
    bias: str | None = "N, C"
    dtypes: tuple[str, str, str] = ("float32", "float32", "float32")
    activation: str | None = "silu"
    padding: int = 1  # columns between the rows of samples, which are halves of longer rows

    @property
    def options(self) -> dict[str, Any]:
        axis = self.samples.channel_axis
        return {"activation": self.activation, "channel_axis": axis}

    def inputs(self) -> tuple[Array, Array]:
        """Return x and dy."""
        shape, dtype = self.samples.shape, self.dtypes[0]
        return draw("x", shape, dtype, mean=0.5), draw("dy", shape, dtype)

    def whole(self) -> dict[str, Array]:
        """Return weight and bias, or the arrays of which they are views."""
        count, channels = self.samples.samples, self.samples.channels
        given = {"weight": (self.weight, 1.0), "bias": (self.bias, 0.0)}
        sizes = {"C": channels, "1, C": (1, channels), "N, C": (count, 2 * channels)}
        found = {
            name: draw(name, sizes[shape], dtype, mean=mean, deviation=0.5)
            for (name, (shape, mean)), dtype in zip(given.items(), self.dtypes[1:], strict=True)
            if shape
        }
        padding = ((0, 0), (0, self.padding))
        return {k: np.pad(a, padding) if a.shape[-1] > channels else a for k, a in found.items()}

    def views(self, whole: dict[str, Any]) -> dict[str, Any]:
        """Return weight and bias, given `whole` on any device."""
        channels = self.samples.channels
        halves = {"weight": np.s_[:, :channels], "bias": np.s_[:, channels : 2 * channels]}
        return {k: a[halves[k]] if a.shape[-1] > channels else a for k, a in whole.items()}

    def run(self, on: Any, **backward: Any) -> Results:
        parameters = self.views({name: on.put(array) for name, array in self.whole().items()})
        return run(
            on,
            *map(on.put, self.inputs()),
            self.samples.groups,
            parameters,
            **self.options,
            **backward,
        )

    def alone(self, on: Any) -> list[Results]:
        """Run each sample alone, with float64 parameters of shape (C,)."""
        found, count, channels = [], self.samples.samples, self.samples.channels
        rows = {
            name: np.broadcast_to(array, (count, channels)).astype(np.float64)
            for name, array in self.views(self.whole()).items()
        }
        for i in range(count):
            arrays = [on.put(array[i : i + 1]) for array in self.inputs()]
            own = {name: on.put(array[i].copy()) for name, array in rows.items()}
            found.append(run(on, *arrays, self.samples.groups, own, **self.options))
        return found


def run(
    on: Any, x: Any, dy: Any, groups: int, parameters: dict[str, Any], **options: Any
) -> Results:
    """Run both directions; return all results by name."""
    backward = {
        name: options.pop(name) for name in ("needs", "out", "accumulate") if name in options
    }
    f = cunorm.group_norm_forward(x, groups, **parameters, **options)
    options |= {"mean": f.mean, "rstd": f.rstd}
    grads = cunorm.group_norm_backward(dy, x, groups, **parameters, **options, **backward)
    found = f._asdict() | grads._asdict()
    return {name: on.get(array) for name, array in found.items() if array is not None}


def check_against_samples_alone(
    results: Results, alone: list[Results], before: dict[str, Array] | None = None
) -> None:
    """Compare with samples alone: all bits, except in the sums over samples that share a row.

    The gradients of float64 parameters are not rounded. `before` has what they were added to.
    """
    assert results.keys() == alone[0].keys()
    for name, got in results.items():
        own = [one[name] for one in alone]
        if name not in ("dweight", "dbias"):
            assert_same_bits(got, np.concatenate(own), name)
            continue
        added = (before or {}).get(name, np.zeros((), got.dtype)).astype(np.float64)
        if got.shape == (len(alone), *own[0].shape):
            assert_same_bits(got, (np.stack(own) + added).astype(got.dtype), name)
            continue
        assert got.shape in (own[0].shape, (1, *own[0].shape)), name
        exact = sum(own) + added
        rounding = np.spacing(np.abs(exact).astype(got.dtype)).astype(np.float64)
        size = sum(map(np.abs, own)) + np.abs(added)  # float64 adds up the samples in any order
        assert (np.abs(got - exact) <= 0.5001 * rounding + 1e-14 * size).all(), name
