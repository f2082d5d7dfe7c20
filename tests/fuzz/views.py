# SPDX-License-Identifier: MIT
"""Memory layouts with any strides, and strategies that draw them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

_SIGNS, _STEPS, _EXPANDED = map(st.sampled_from, ([1, 1, -1], [1, 2, 3], [1, 1, 1, 0]))
_GAPS = st.sampled_from([0, 0, 1, 3, 16])


class View(NamedTuple):
    """How elements lie in memory. Calling a view returns an array of these strides, not to be read.

    `order` lists the axes from the outermost in memory to the innermost. Each axis has a step,
    negative if reversed and 0 if expanded, and a gap of elements after its last element.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    gaps: tuple[int, ...]

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        strides, size = [0] * len(shape), dtype.itemsize
        for axis in reversed(self.order):
            strides[axis] = size * self.steps[axis]
            if self.steps[axis]:
                size *= max(1, shape[axis]) * abs(self.steps[axis]) + self.gaps[axis]
        return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)


def is_expanded(layout: View | str) -> bool:
    return layout == "expanded" if isinstance(layout, str) else 0 in layout.steps


def is_reversed(layout: View | str) -> bool:
    """Return whether an axis has a negative step, which PyTorch lacks."""
    return layout == "reversed" if isinstance(layout, str) else min(layout.steps, default=1) < 0


def contiguous(axes: int) -> View:
    return View(tuple(range(axes)), (1,) * axes, (0,) * axes)


@st.composite
def any_views(draw: Any, axes: int) -> View:
    """Draw a view of all axes in any order, with any steps; one axis may be expanded."""
    order = draw(st.permutations(range(axes)))
    steps = draw(st.lists(_SIGNS, min_size=axes, max_size=axes))
    gaps = [0] * axes
    if axes:  # each change is of one axis, as more would multiply the memory
        some = st.integers(0, axes - 1)
        steps[draw(some)] *= draw(_STEPS)
        gaps[draw(some)] = draw(_GAPS)
        steps[draw(some)] *= draw(_EXPANDED)
    return View(tuple(order), tuple(steps), tuple(gaps))


@st.composite
def row_views(draw: Any, leading: int, axes: int) -> View:
    """Draw a view whose rows are contiguous; leading axes may have any order and steps."""
    view = draw(any_views(leading))
    rest = range(leading, axes)
    gaps = [draw(_GAPS) if axis == leading else 0 for axis in rest]
    return View((*view.order, *rest), (*view.steps, *(1 for _ in rest)), (*view.gaps, *gaps))


def views(leading: int, axes: int) -> st.SearchStrategy[View]:
    """Draw the view of an input."""
    return st.one_of(st.just(contiguous(axes)), row_views(leading, axes), any_views(axes))


def result_views(leading: int, axes: int, most: int) -> st.SearchStrategy[View]:
    """Draw a result's view, whose rows do not overlap; it is contiguous if `leading` > `most`."""
    if leading > most:
        return st.just(contiguous(axes))
    apart = row_views(leading, axes).map(lambda view: view._replace(steps=_unexpanded(view.steps)))
    return st.one_of(st.just(contiguous(axes)), apart)


def _unexpanded(steps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(step or 1 for step in steps)
