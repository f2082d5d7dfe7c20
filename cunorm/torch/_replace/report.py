# SPDX-License-Identifier: MIT
"""The report of `replace_norms`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class ReplacedNorm(NamedTuple):
    """A module that runs cunorm: its name, "" for the model itself, its class, and what it runs."""

    name: str
    kind: str
    runs: str


class LeftNorm(NamedTuple):
    """A module that may be a norm and was left: its name, its class, and the reason."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Replacement:
    """What `replace_norms` did. Printed, it is a summary by class, with repeated layers as one.

    Attributes
    ----------
    replaced : tuple of ReplacedNorm
        The modules that run cunorm, in the order of ``model.named_modules()``, by first names.
    left : tuple of LeftNorm
        The modules that may be norms and were left.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4))
    >>> done = cunorm.torch.replace_norms(model)
    >>> print(done)
    1 norm replaced
      LayerNorm: layer_norm(eps=1e-05)
        0
    1 module left
      BatchNorm1d: of torch.nn, only RMSNorm, LayerNorm and GroupNorm are replaced
        1
    >>> done.replaced[0].runs
    'layer_norm(eps=1e-05)'
    """

    replaced: tuple[ReplacedNorm, ...]
    left: tuple[LeftNorm, ...]

    def __str__(self) -> str:
        lines: list[str] = []
        parts = [(self.replaced, "norm", "replaced"), (self.left, "module", "left")]
        for norms, noun, verb in parts if self.left else parts[:1]:
            lines.append(f"{len(norms)} {noun}{'s' * (len(norms) != 1)} {verb}")
            names: dict[str, list[str]] = {}
            for name, kind, text in norms:
                names.setdefault(f"  {kind}: {text}", []).append(name)
            for line, those in names.items():
                lines += [line, *_merged(those)]
        return "\n".join(lines)


def _merged(names: list[str]) -> Iterator[str]:
    """Yield lines with the names, those that differ only in numbers as one with their count."""
    patterns: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = name.split(".")
        patterns.setdefault(tuple("*" if p.isdigit() else p for p in parts), []).append(parts)
    for group in patterns.values():
        columns = [set(column) for column in zip(*group, strict=True)]
        joined = ".".join(column.pop() if len(column) == 1 else "*" for column in columns)
        count = f" ({len(group)})" if len(group) > 1 else ""
        yield f"    {joined or '(the model itself)'}{count}"
