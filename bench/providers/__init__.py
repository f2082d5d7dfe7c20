# SPDX-License-Identifier: MIT
"""The providers of the operators, by the names of the command line; each is loaded when asked for.

`copy` is none of them: it is the device's, and is always timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from bench.providers.base import Provider, require_gpu
from bench.providers.ours import Cunorm, Ungated


def _of(module: str, name: str) -> Callable[[], Provider]:
    def load() -> Provider:
        provider: Provider = getattr(import_module(f"bench.providers.{module}"), name)()
        return provider

    return load


def _of_torch(of: type[Cunorm], name: str) -> Callable[[], Provider]:
    def load() -> Provider:
        import_module("torch")
        return of(name, "torch")

    return load


_ON_BOTH: dict[str, Callable[[], Provider]] = {
    "cunorm": _of_torch(Cunorm, "cunorm"),
    "cunorm-ungated": _of_torch(Ungated, "cunorm-ungated"),
    "cunorm-jax": _of("traced", "CunormJax"),
    "torch": _of("autograd", "Torch"),
    "torch.compile": _of("autograd", "TorchCompile"),
    "jax": _of("traced", "Jax"),
}
LOADERS: dict[str, dict[str, Callable[[], Provider]]] = {
    "cpu": {"cunorm-numpy": lambda: Cunorm("cunorm-numpy", "own")} | _ON_BOTH,
    "cuda": {
        "cunorm-cupy": lambda: Cunorm("cunorm-cupy", "own"),
        "liger": _of("triton_kernels", "Liger"),
        "fla": _of("triton_kernels", "Fla"),
        "quack": _of("quack", "Quack"),
    }
    | _ON_BOTH,
}
DEFAULT = {"cpu": ("cunorm", "torch", "cunorm-ungated"), "cuda": tuple(LOADERS["cuda"])}


def load(device: str, names: Iterable[str]) -> tuple[list[Provider], dict[str, Exception]]:
    """Return the providers of these names, and what kept the others from being loaded."""
    found, failures = [], {}
    for name in names:
        try:
            provider = LOADERS[device][name]()
            if device == "cuda":
                require_gpu(provider.arrays)
            found.append(provider)
        except Exception as error:  # of any kind, as it is another library's
            failures[name] = error
    return found, failures


__all__ = ["DEFAULT", "LOADERS", "Cunorm", "Provider", "load"]
