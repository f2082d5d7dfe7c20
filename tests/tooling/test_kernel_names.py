# SPDX-License-Identifier: MIT
"""items.cuh lists the names that kernels use of the headers that a GPU and a CPU both have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ON_GPU, ON_CPU = ROOT / "kernels_cu", ROOT / "cunorm/_backends/cpu/include/host"
LIST = re.compile(r"^//   (\w+\.cuh) +(.+(?:\n//    +.+)*)", re.M)
NAMES = {
    file: re.findall(r"\w+", names)
    for file, names in LIST.findall((ON_GPU / "items.cuh").read_text("utf-8"))
}


def code(path: Path) -> str:
    """Return a file's text without comments."""
    return re.sub(r"//.*", "", path.read_text("utf-8"))


def defines(text: str, name: str) -> bool:
    kinds = rf"(?:struct|using|#define|constexpr \w+|::)\s+{name}\b|using ::{name}\b"
    return bool(re.search(rf"^.*(?:{kinds}|\b(?!return)[\w>:]+&? {name}\().*$", text, re.M))


@pytest.mark.parametrize("file", NAMES)
def test_the_list_has_the_names_that_kernels_use_from_a_replaced_header(file):
    shared = "".join(code(path) for path in ON_GPU.iterdir() if path.name not in NAMES)
    own_to_kernels = set(re.findall(r"\bclass (\w+)", shared))  # parameters of templates
    header = re.sub(r"^ .*", "", code(ON_GPU / file), flags=re.M)  # without members
    used = set(re.findall(r"\w+", shared)) - own_to_kernels
    assert {name for name in used if defines(header, name)} <= set(NAMES[file])
    whole = (ON_GPU / file).read_text("utf-8")
    assert [name for name in NAMES[file] if not defines(whole, name)] == []


def test_each_header_that_a_cpu_replaces_is_in_the_list():
    replaced = {path.name for path in ON_CPU.glob("*.cuh")} & {p.name for p in ON_GPU.iterdir()}
    assert replaced == NAMES.keys() - {"items.cuh"}
