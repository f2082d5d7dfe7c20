# SPDX-License-Identifier: MIT
"""Calls of cunorm on CuPy arrays, compared with what the same formulas give in float64 NumPy."""

import argparse
import itertools
import sys
import time

import cupy
import ml_dtypes
import numpy as np

import cunorm

DTYPES = {
    "float32": np.dtype("f4"),
    "float64": np.dtype("f8"),
    "float16": np.dtype("f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}


OFFSET = 0  # elements before each array in its memory, where it ends with the memory


def put(array):
    raw = array.view(f"u{array.itemsize}")
    memory = cupy.empty(OFFSET + raw.size, raw.dtype)
    memory[OFFSET:] = cupy.asarray(raw.ravel())
    return memory[OFFSET:].reshape(raw.shape).view(array.dtype)


def get(array):
    return cupy.asnumpy(array.view(f"u{array.itemsize}")).view(array.dtype).astype("f8")


def worst(result, expected, scale=None):
    error = np.abs(get(result) - expected)
    scale = np.abs(expected).max() if scale is None else scale
    return float(error.max() / max(scale, 1e-30))


def row_case(random, dtype, rows, width, center, residual):
    t = DTYPES[dtype]
    x = (random.standard_normal((rows, width)) * 2 + 0.5).astype(t)
    res = random.standard_normal((rows, width)).astype(t) if residual else None
    dy = random.standard_normal((rows, width)).astype(t)
    dres = random.standard_normal((rows, width)).astype(t) if residual else None
    w = (1 + random.standard_normal(width) / 4).astype(t)
    b = random.standard_normal(width).astype(t) if center else None
    eps = 1e-5
    xd = x.astype("f8") + (res.astype("f8") if residual else 0)
    stream = xd.astype(t).astype("f8") if residual else xd
    mean = stream.mean(1, keepdims=True) if center else 0.0
    k = stream - mean
    rstd = 1 / np.sqrt((k * k).mean(1, keepdims=True) + eps)
    h = k * rstd
    y = h * w.astype("f8") + (b.astype("f8") if center else 0)
    g = dy.astype("f8") * w.astype("f8")
    dk = rstd * (g - h * (g * h).mean(1, keepdims=True))
    dx = dk - (dk.mean(1, keepdims=True) if center else 0)
    terms = (
        rstd * (np.abs(g) + np.abs(h) * np.abs(g * h).mean(1, keepdims=True))
    ).max()  # dx is what they leave
    if residual:
        dx = dx + dres.astype("f8")
    dw = (dy.astype("f8") * h).sum(0)
    db = dy.astype("f8").sum(0)

    name = "layer_norm" if center else "rms_norm"
    params = [put(w)] + ([put(b)] if center else [])
    more = {"residual": put(res)} if residual else {}
    forward = getattr(cunorm, f"{name}_forward")(put(x), *params, eps=eps, **more)
    limit = 8 * UNIT[dtype] + 64 * (2.0**-53 if dtype == "float64" else 2.0**-24)
    yield "y", worst(forward.y, y), limit
    saved = {"rstd": forward.rstd}
    if center:
        saved["mean"] = forward.mean
    grads = getattr(cunorm, f"{name}_backward")(
        put(dy),
        forward.residual if residual else put(x),
        params[0],
        **saved,
        **({"d_residual": put(dres)} if residual else {}),
    )
    yield "dx", worst(grads.dx, dx, max(terms, np.abs(dx).max())), limit
    if getattr(grads, "dweight", None) is not None:
        yield "dweight", worst(grads.dweight, dw), limit * 4
    if getattr(grads, "dbias", None) is not None:
        yield "dbias", worst(grads.dbias, db), limit * 4


def group_case(random, dtype, batch, size, channels, groups, last):
    t = DTYPES[dtype]
    shape = (batch, size, channels) if last else (batch, channels, size)
    axis = -1 if last else 1
    x = (random.standard_normal(shape) * 2 + 0.5).astype(t)
    dy = random.standard_normal(shape).astype(t)
    w = (1 + random.standard_normal(channels) / 4).astype(t)
    b = random.standard_normal(channels).astype(t)
    eps = 1e-5

    def grouped(array):  # (batch, groups, channels in one, size)
        moved = np.moveaxis(array, axis, 1).astype("f8")
        return moved.reshape(batch, groups, channels // groups, size)

    def back(array):
        return np.moveaxis(array.reshape(batch, channels, size), 1, axis)

    wide, bias = (v.astype("f8").reshape(1, groups, -1, 1) for v in (w, b))
    xg, dyg = grouped(x), grouped(dy)
    k = xg - xg.mean((2, 3), keepdims=True)
    rstd = 1 / np.sqrt((k * k).mean((2, 3), keepdims=True) + eps)
    h = k * rstd
    g = dyg * wide
    dx = rstd * (g - g.mean((2, 3), keepdims=True) - h * (g * h).mean((2, 3), keepdims=True))
    terms = (rstd * (np.abs(g) + np.abs(h))).max()
    dw, db = (dyg * h).sum((0, 3)).ravel(), dyg.sum((0, 3)).ravel()

    told = {"channel_axis": axis}
    args = (groups, put(w), put(b))
    forward = cunorm.group_norm_forward(put(x), *args, eps=eps, **told)
    limit = 8 * UNIT[dtype] + 64 * (2.0**-53 if dtype == "float64" else 2.0**-24)
    yield "y", worst(forward.y, back(h * wide + bias)), limit
    grads = cunorm.group_norm_backward(
        put(dy), put(x), *args, mean=forward.mean, rstd=forward.rstd, **told
    )
    yield "dx", worst(grads.dx, back(dx), max(terms, np.abs(dx).max())), limit
    yield "dweight", worst(grads.dweight, dw), limit * 4
    yield "dbias", worst(grads.dbias, db), limit * 4


GROUPS = ((3, 7, 3, 1), (2, 64, 32, 8), (1, 1023, 40, 5), (2, 256, 320, 32), (9, 1, 640, 32))


def cases(random, given):
    for dtype in given.dtypes.split(","):
        for width, center, residual in itertools.product(
            map(int, filter(None, given.widths.split(","))), (False, True), (False, True)
        ):
            yield (
                f"{dtype} width {width} {'layer' if center else 'rms'}{' add' if residual else ''}",
                row_case(random, dtype, given.rows, width, center, residual),
            )
        if given.groups:
            for sizes, last in itertools.product(GROUPS, (False, True)):
                yield (
                    f"{dtype} groups {sizes} channels {'last' if last else 'first'}",
                    group_case(random, dtype, *sizes, last),
                )


def main():
    global OFFSET
    parser = argparse.ArgumentParser()
    parser.add_argument("--widths", default="1,7,64,1003,4096,8192,40000")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--groups", action="store_true")
    given = parser.parse_args()
    random = np.random.default_rng(given.seed)
    OFFSET = given.offset
    bad = 0
    for case, run in cases(random, given):
        begun = time.time()
        try:
            found = list(run)
        except Exception as error:
            print(f"FAILED {case}: {type(error).__name__}: {error}", flush=True)
            bad += 1
            continue
        for what, error, limit in found:
            if not error <= limit:
                bad += 1
                print(f"WRONG {case} {what}: {error:.3g} > {limit:.3g}", flush=True)
        text = " ".join(f"{what} {error:.1e}" for what, error, _ in found)
        print(f"{case}: {text} ({time.time() - begun:.1f} s)", flush=True)
    print("wrong:", bad)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
