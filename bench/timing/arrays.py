# SPDX-License-Identifier: MIT
"""Copies of an array to a device and to the host, and views of it in torch and JAX."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def upload(xp: Any, host: Any, repeats: int = 1) -> Any:
    """Copy an array to the memory of `xp`, CuPy or NumPy; the axes keep their order in memory.

    The array is copied as integers, because CuPy may lack its dtype. If it has several axes,
    its rows are repeated `repeats` times.
    """
    by_memory = sorted(range(host.ndim), key=lambda axis: -host.strides[axis])
    bits = xp.asarray(host.transpose(by_memory).view(f"i{host.itemsize}"))
    if bits.ndim > 1 and repeats > 1:
        whole = xp.empty((repeats, *bits.shape), bits.dtype)
        whole[...] = bits
        bits = whole.reshape(-1, *bits.shape[1:])
    return bits.view(host.dtype).transpose(np.argsort(by_memory).tolist())


def as_torch(array: Any) -> Any:
    """Return a torch tensor that views an array of NumPy or CuPy, with its strides."""
    import torch

    if array.dtype.name == "bfloat16":
        array = array.view("int16")
        return as_torch(array).view(torch.bfloat16)
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    return torch.as_tensor(array, device="cuda")


def as_jax(array: Any) -> Any:
    """Return an array of NumPy or CuPy as a JAX array: a copy, or the same memory."""
    import jax

    if isinstance(array, np.ndarray):
        return jax.numpy.asarray(array)
    return jax.dlpack.from_dlpack(as_torch(array))  # CuPy cannot export bfloat16


def as_host(array: Any) -> Any:
    """Return an array of any framework as a NumPy array; a tensor becomes float64."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.detach().double().cpu().numpy()
    if cupy is not None and isinstance(array, getattr(cupy, "ndarray", ())):
        return cupy.asnumpy(array)
    return np.asarray(array)
