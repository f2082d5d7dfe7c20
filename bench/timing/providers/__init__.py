# SPDX-License-Identifier: MIT
"""The providers of the operators, by name on the command line; libraries are imported on demand.

The copy, which is always timed, comes from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from bench.timing.providers.base import Provider, require_gpu
from bench.timing.providers.ours import Cunorm, Ungated


def _lazy(module: str, name: str) -> Callable[[], Provider]:
    def load() -> Provider:
        provider: Provider = getattr(import_module(f"bench.timing.providers.{module}"), name)()
        return provider

    return load


def _lazy_cunorm(provider_class: type[Cunorm], name: str) -> Callable[[], Provider]:
    def load() -> Provider:
        import_module("torch")
        return provider_class(name, "torch")

    return load


_ON_BOTH: dict[str, Callable[[], Provider]] = {
    "cunorm": _lazy_cunorm(Cunorm, "cunorm"),
    "cunorm-ungated": _lazy_cunorm(Ungated, "cunorm-ungated"),
    "cunorm-jax": _lazy("traced", "CunormJax"),
    "torch": _lazy("autograd", "Torch"),
    "torch.compile": _lazy("autograd", "TorchCompile"),
    "jax": _lazy("traced", "Jax"),
}
LOADERS: dict[str, dict[str, Callable[[], Provider]]] = {
    "cpu": {"cunorm-numpy": lambda: Cunorm("cunorm-numpy", "own")} | _ON_BOTH,
    "cuda": {
        "cunorm-cupy": lambda: Cunorm("cunorm-cupy", "own"),
        "liger": _lazy("triton_kernels", "Liger"),
        "fla": _lazy("triton_kernels", "Fla"),
        "quack": _lazy("quack", "Quack"),
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
            found.append(provider)
        except Exception as error:  # another library may raise anything
            failures[name] = error
    return found, failures


__all__ = ["DEFAULT", "LOADERS", "Cunorm", "Provider", "load"]
