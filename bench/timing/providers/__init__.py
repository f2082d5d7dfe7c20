# SPDX-License-Identifier: MIT
"""The providers of the operators, by name on the command line; libraries are imported on demand.

The copy, which is always timed, comes from the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from bench.timing.providers.base import Provider, require_gpu
from bench.timing.providers.ours import Cunorm, Ungated


def _lazy(module: str, name: str, *arguments: Any) -> Callable[[], Provider]:
    def load() -> Provider:
        provider: Provider = getattr(import_module(f"{__name__}.{module}"), name)(*arguments)
        return provider

    return load


_ON_BOTH = {
    "cunorm": _lazy("ours", "Cunorm", "cunorm", "torch"),
    "cunorm-ungated": _lazy("ours", "Ungated", "cunorm-ungated", "torch"),
    "cunorm-autograd": _lazy("autograd", "ours"),
    "cunorm-jax": _lazy("traced", "ours"),
    "torch": _lazy("autograd", "eager"),
    "torch.compile": _lazy("autograd", "compiled"),
    "jax": _lazy("traced", "jax_numpy"),
}
LOADERS: dict[str, dict[str, Callable[[], Provider]]] = {
    "cpu": {"cunorm-numpy": _lazy("ours", "Cunorm", "cunorm-numpy", "own")} | _ON_BOTH,
    "cuda": {
        "cunorm-cupy": _lazy("ours", "Cunorm", "cunorm-cupy", "own"),
        "liger": _lazy("autograd", "liger"),
        "fla": _lazy("autograd", "fla"),
        "quack": _lazy("autograd", "Quack"),
    }
    | _ON_BOTH,
}
DEFAULT = {"cpu": ("cunorm", "torch", "cunorm-ungated"), "cuda": tuple(LOADERS["cuda"])}


def load(device: str, names: Iterable[str]) -> list[Provider]:
    """Return the providers of these names; print why others are left out."""
    found = []
    for name in names:
        try:
            provider = LOADERS[device][name]()
            if device == "cuda":
                require_gpu(provider.arrays)
            elif provider.arrays == "torch":
                import_module("torch")
            found.append(provider)
        except Exception as error:  # another library may raise anything
            if name.startswith("cunorm") and not isinstance(error, ImportError):
                raise
            print(f"{name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    return found


__all__ = ["DEFAULT", "LOADERS", "Cunorm", "Provider", "Ungated", "load"]
