# SPDX-License-Identifier: MIT
"""Norms of any data with parameters, forward and backward, on any device, held to their bounds."""

from __future__ import annotations

import cunorm
from tests.support.bounds import check_backward, check_forward
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.operands import draw, optional


def check_layer_norm(on, x, dtype=None, **told):
    """Hold a layer norm of x, forward and backward, to its bounds."""
    dtype, width = str(x.dtype) if dtype is None else dtype, x.shape[-1]
    dy, weight, bias = draw("dy", x.shape, dtype), *parameters(width, dtype)
    there, given = on.put(x), [on.put(weight), on.put(bias)]
    f = cunorm.layer_norm_forward(there, *given, **told)
    grads = cunorm.layer_norm_backward(on.put(dy), there, *given, rstd=f.rstd, mean=f.mean)
    f, grads = (type(r)(*(a if a is None else on.get(a) for a in r)) for r in (f, grads))
    check_forward(f, x, weight, bias, center=True, eps=1e-5, **told)
    check_backward(grads, dy, x, weight, bias, center=True, eps=1e-5)
    return f


def check_group_norm(on, x, groups, axis, activation=None):
    """Hold a group norm of x, forward and backward, to its bounds."""
    dy, told = draw("dy", x.shape, str(x.dtype)), {"activation": activation, "channel_axis": axis}
    weight, bias = parameters(x.shape[axis], str(x.dtype))
    there, given = on.put(x), (groups, on.put(weight), on.put(bias))
    f = cunorm.group_norm_forward(there, *given, **told)
    saved = {"mean": f.mean, "rstd": f.rstd}
    grads = cunorm.group_norm_backward(on.put(dy), there, *given, **saved, **told)
    f, grads = (type(r)(*map(on.get, r)) for r in (f, grads))
    check_group_forward(f, x, groups, weight, bias, eps=1e-5, **told)
    check_group_backward(grads, dy, x, groups, weight, bias, eps=1e-5, **told)
    return f


def parameters(width, dtype):
    return [optional(name, width, dtype) for name in ("weight", "bias")]
