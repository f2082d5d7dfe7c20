# SPDX-License-Identifier: MIT
"""The report of `replace_norms`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ReplacedNorm(NamedTuple):
    """A module that runs cunorm.

    Attributes
    ----------
    name : str
        Its name in the model, "" for the model itself.
    kind : str
        Its class, as it was and will be again.
    runs : str
        The function and options that it runs now.
    """

    name: str
    kind: str
    runs: str


class LeftNorm(NamedTuple):
    """A module that may be a norm and was left as it was.

    Attributes
    ----------
    name, kind : str
        Its name in the model, "" for the model itself, and its class.
    reason : str
        Why.
    """

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Replacement:
    """What `replace_norms` did. Printed, it is a summary by class, with repeated layers as one.

    Attributes
    ----------
    replaced : tuple of ReplacedNorm
        The modules that run cunorm, in the order of ``model.named_modules()``. A module with
        several names has the first.
    left : tuple of LeftNorm
        The modules that may be norms and were left, and why.

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
            for kind, text in dict.fromkeys((kind, text) for _, kind, text in norms):
                names = [name for name, *other in norms if other == [kind, text]]
                lines += [f"  {kind}: {text}", *(f"    {name}" for name in _merged(names))]
        return "\n".join(lines)


def _merged(names: list[str]) -> list[str]:
    """Return the names, with those that differ only in numbers as one and their count."""
    patterns: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = name.split(".")
        pattern = tuple("*" if part.isdigit() else part for part in parts)
        patterns.setdefault(pattern, []).append(parts)
    lines = []
    for group in patterns.values():
        columns = [set(column) for column in zip(*group, strict=True)]
        joined = ".".join(column.pop() if len(column) == 1 else "*" for column in columns)
        count = f" ({len(group)})" if len(group) > 1 else ""
        lines.append((joined or "(the model itself)") + count)
    return lines
