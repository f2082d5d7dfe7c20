# SPDX-License-Identifier: MIT
"""Checks of norms on any data against their bounds, in both directions, on any device."""

from __future__ import annotations

import numpy as np

import cunorm
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import get_all
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.operands import draw, optional


def parameters(width, dtype):
    return [optional(name, width, dtype) for name in ("weight", "bias")]


def check_layer_norm(on, x):
    """Check a layer norm of x, forward and backward, against its bounds."""
    dtype, width = str(x.dtype), x.shape[-1]
    dy, given = draw("dy", x.shape, dtype), parameters(width, dtype)
    there, theirs = on.put(x), [on.put(array) for array in given]
    f = cunorm.layer_norm_forward(there, *theirs)
    grads = cunorm.layer_norm_backward(on.put(dy), there, *theirs, rstd=f.rstd, mean=f.mean)
    f, grads = get_all(on, f), get_all(on, grads)
    check_forward(f, x, *given, center=True, eps=1e-5)
    check_backward(grads, dy, x, *given, center=True, eps=1e-5)
    return f


def check_group_norm(on, x, groups, axis, activation="silu"):
    """Check a group norm of x, forward and backward, against its bounds."""
    dtype = str(x.dtype)
    dy, given = draw("dy", x.shape, dtype), (groups, *parameters(x.shape[axis], dtype))
    options = {"activation": activation, "channel_axis": axis}
    there, theirs = [on.put(dy), on.put(x)], (groups, *map(on.put, given[1:]))
    f = cunorm.group_norm_forward(there[1], *theirs, **options)
    grads = cunorm.group_norm_backward(*there, *theirs, mean=f.mean, rstd=f.rstd, **options)
    f, grads = get_all(on, f), get_all(on, grads)
    check_group_forward(f, x, *given, **options, eps=1e-5)
    check_group_backward(grads, dy, x, *given, **options, eps=1e-5)
    return f


def laid_out(x, axis):
    """Return a copy with the last axis moved to `axis`."""
    return np.ascontiguousarray(np.moveaxis(x, -1, axis))
