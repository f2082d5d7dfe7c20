# SPDX-License-Identifier: MIT
"""Checks of rows that are split over devices against the error bounds of whole rows."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jax import P

import cunorm.jax
from cunorm import NormForward, NormGrads
from cunorm.jax import add_rms_norm, layer_norm
from tests.support.bounds import check_backward, check_forward
from tests.support.operands import draw


def check_large_means(mesh, *, check_vma):
    """Check float32 rows of mean 1e4 against the bounds of whole rows, and bits across devices."""
    rows, width = 6, 64
    a = {name: draw(name, (rows, width), "float32") for name in ("x", "dy")}
    a |= {name: draw(name, (width,), "float32") for name in ("weight", "bias")}
    a["x"] = a["x"] + np.float32(1e4)
    for one in a.values():
        one[..., 16::16] = one[..., :1]  # each device has the same first column
    specs = [P("dp", "tp"), P("dp", "tp"), P("tp"), P("tp")]

    def derive(x, dy, weight, bias):
        split = partial(layer_norm, axis_name="tp")
        y, pull = jax.vjp(split, x, weight, bias)
        dx, dweight, dbias = pull(dy)
        if not check_vma:
            dweight, dbias = jax.lax.psum((dweight, dbias), "dp")
        return y, dx, dweight, dbias

    mapped = jax.shard_map(
        derive, mesh=mesh, in_specs=(*specs,), out_specs=(*specs,), check_vma=check_vma
    )
    placed = map(jax.device_put, a.values(), [jax.NamedSharding(mesh, one) for one in specs])
    y, dx, dweight, dbias = map(np.asarray, jax.jit(mapped)(*placed))
    norm = {"eps": 1e-5, "center": True}
    check_forward(NormForward(y), a["x"], a["weight"], a["bias"], **norm)
    grads = NormGrads(dx, dweight, dbias, None, None)
    check_backward(grads, a["dy"], a["x"], a["weight"], a["bias"], **norm)
    for one in (y, dx):  # equal statistics and sums give equal bits
        np.testing.assert_array_equal(one[:, 16::16], np.repeat(one[:, :1], 3, 1))


def check_a_float32_stream_of_bfloat16(mesh):
    """Check rows rounded to bfloat16 before a float32 weight, which decides y's dtype, and dx."""
    names = {"x": "bfloat16", "residual": "float32", "weight": "float32"}
    a = {name: draw(name, (6, 64) if name != "weight" else (64,), dtype)
         for name, dtype in names.items()}  # fmt: skip
    dys = [draw(name, (6, 64), dtype) for name, dtype in (("dy", "float32"), ("dr", "float32"))]
    specs = (P("dp", "tp"), P("dp", "tp"), P("tp"))

    def derive(dys, *arrays):
        split = partial(add_rms_norm, axis_name="tp", round_before_weight=True)
        results, pull = jax.vjp(split, *arrays)
        return results, pull(cunorm.AddNorm(*dys))

    results = (cunorm.AddNorm(specs[0], specs[0]), specs)
    mapped = jax.shard_map(derive, mesh=mesh, in_specs=([*specs[:2]], *specs), out_specs=results)
    result, grads = jax.tree.map(np.asarray, jax.jit(mapped)(dys, *a.values()))
    norm = {"eps": 1e-6, "round_before_weight": True}
    check_forward(NormForward(*result), a["x"], a["weight"], None, a["residual"], **norm)
    given = NormGrads(grads[0], grads[2], None, None, grads[1])
    stream, x_dtype = result.residual, a["x"].dtype
    check_backward(given, dys[0], stream, a["weight"], None, dys[1], x_dtype=x_dtype, **norm)
    assert [str(one.dtype) for one in (*result, *grads)] == ["float32"] * 2 + [*names.values()]
