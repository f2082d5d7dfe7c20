# SPDX-License-Identifier: MIT
"""One array, seen by several frameworks: from the host to a device, and to torch and JAX there."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def upload(xp: Any, host: Any, repeats: int = 1) -> Any:
    """Put an array where `xp`, CuPy or NumPy, keeps its own, in the order of its memory.

    It goes there as bits, which CuPy always has. One that has rows is put there `repeats` times.
    """
    by_memory = sorted(range(host.ndim), key=lambda axis: -host.strides[axis])
    bits = xp.asarray(host.transpose(by_memory).view(f"i{host.itemsize}"))
    if bits.ndim > 1 and repeats > 1:
        whole = xp.empty((repeats, *bits.shape), bits.dtype)
        whole[...] = bits
        bits = whole.reshape(-1, *bits.shape[1:])
    return bits.view(host.dtype).transpose(np.argsort(by_memory).tolist())


def as_torch(array: Any) -> Any:
    """Return the torch tensor of the memory of an array of NumPy's or CuPy's, with its strides."""
    import torch

    if array.dtype.name == "bfloat16":
        array = array.view("int16")
        return as_torch(array).view(torch.bfloat16)
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    return torch.as_tensor(array, device="cuda")


def as_jax(array: Any) -> Any:
    """Return the JAX array of an array of NumPy's or CuPy's: a copy, or the same memory."""
    import jax

    if isinstance(array, np.ndarray):
        return jax.numpy.asarray(array)
    return jax.dlpack.from_dlpack(as_torch(array))  # CuPy cannot hand out bfloat16


def as_host(array: Any) -> Any:
    """Return any of these as a NumPy array, with bfloat16 as a wider type where need be."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(array, torch.Tensor):
        return array.detach().double().cpu().numpy()
    if cupy is not None and isinstance(array, getattr(cupy, "ndarray", ())):
        return cupy.asnumpy(array)
    return np.asarray(array)
