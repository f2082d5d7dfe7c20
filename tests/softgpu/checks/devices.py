# SPDX-License-Identifier: MIT
"""Calls on a device that is not current, in streams, from threads, in place. Needs SOFTGPU_DEVICES=2."""

import sys
from concurrent.futures import ThreadPoolExecutor

import cupy
import numpy as np

import cunorm

bad = 0


def check(what, ok):
    global bad
    bad += not ok
    print("ok   " if ok else "WRONG", what, flush=True)


def formula(x, w):
    x = x.astype("f8")
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w


random = np.random.default_rng(1)
x, w = random.standard_normal((9, 1003)).astype("f"), random.random(1003).astype("f")
right = formula(x, w)


def near(y):
    return float(np.abs(y.get() - right).max()) < 1e-5


for device in (1, 0, 1):
    with cupy.cuda.Device(device):
        dx, dw = cupy.asarray(x), cupy.asarray(w)
    for turn in ("first", "again"):
        y = cunorm.rms_norm(dx, dw)
        check(
            f"device {device}, {turn}",
            near(y) and y.data.device_id == device and cupy.cuda.runtime.getDevice() == 0,
        )
    f = cunorm.layer_norm_forward(dx, dw)
    g = cunorm.layer_norm_backward(f.y, dx, dw, mean=f.mean, rstd=f.rstd)
    check(f"backward on device {device}", {a.data.device_id for a in (g.dx, g.dweight)} == {device})
    g = cunorm.group_norm_forward(dx.reshape(9, 17, 59), 59, channel_axis=-1)
    check(f"group_norm on device {device}", g.y.data.device_id == device)
with cupy.cuda.Stream(non_blocking=True):
    check("a stream", near(cunorm.rms_norm(cupy.asarray(x), cupy.asarray(w))))
with cupy.cuda.Device(1):
    ones = cupy.asarray(w)
try:
    cunorm.rms_norm(cupy.asarray(x), ones)
    check("arrays of two devices are refused", False)
except (ValueError, TypeError):
    check("arrays of two devices are refused", True)
dx, dw = cupy.asarray(x), cupy.asarray(w)
with ThreadPoolExecutor(8) as pool:
    check("threads", all(near(y) for y in pool.map(lambda _: cunorm.rms_norm(dx, dw), range(40))))
check("strided", near(cunorm.rms_norm(cupy.asarray(np.pad(x, ((0, 0), (3, 2))))[:, 3:-2], dw)))
check("reversed rows", np.abs(cunorm.rms_norm(dx[::-1], dw).get() - right[::-1]).max() < 1e-5)
y = cunorm.rms_norm(dx, dw, out=dx) if "out" in cunorm.rms_norm.__code__.co_varnames else None
check("in place", y is None or near(y))
check("no rows", cunorm.rms_norm(cupy.empty((0, 1003), "f"), dw).shape == (0, 1003))
print("wrong:", bad)
sys.exit(bad > 0)
