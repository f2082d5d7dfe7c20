# SPDX-License-Identifier: MIT
"""The providers of the operators, by name on the command line; libraries are imported on demand.

The copy, which is always timed, comes from the device.
"""

from __future__ import annotations

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
    "cunorm-jax": _lazy("traced", "CunormJax"),
    "torch": _lazy("autograd", "eager"),
    "torch.compile": _lazy("autograd", "compiled"),
    "jax": _lazy("traced", "Jax"),
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


def load(device: str, names: Iterable[str]) -> tuple[list[Provider], dict[str, Exception]]:
    """Return the providers of these names, and the errors of those that did not load."""
    found, failures = [], {}
    for name in names:
        try:
            provider = LOADERS[device][name]()
            if device == "cuda":
                require_gpu(provider.arrays)
            elif provider.arrays == "torch":
                import_module("torch")
            found.append(provider)
        except Exception as error:  # another library may raise anything
            failures[name] = error
    return found, failures


__all__ = ["DEFAULT", "LOADERS", "Cunorm", "Provider", "Ungated", "load"]
