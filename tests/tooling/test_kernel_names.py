# SPDX-License-Identifier: MIT
"""Headers for a GPU and for a CPU both define the names that kernels use."""

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


def text_of(folder: Path, file: str) -> str:
    """Return a header's text, and that of the headers that it includes from the same folder."""
    text = (folder / file).read_text("utf-8")
    included = re.findall(r'^#include "(.+)"$', text, re.M)
    return text + "".join(text_of(folder, name) for name in included if (folder / name).is_file())


def code(path: Path) -> str:
    """Return a file's text without comments."""
    return re.sub(r"//.*", "", path.read_text("utf-8"))


def defines(text: str, name: str) -> bool:
    kinds = rf"(?:struct|using|#define|constexpr \w+|::)\s+{name}\b|using ::{name}\b"
    return bool(re.search(rf"^.*(?:{kinds}|\b(?!return)[\w>:]+&? {name}\().*$", text, re.M))


def test_a_name_that_is_only_used_is_not_defined():
    assert defines("inline void f(int) {", "f")
    assert not defines("  return f(1);", "f")
    assert not defines("  x = f(1);", "f")


@pytest.mark.parametrize("file", NAMES)
def test_a_gpu_and_a_cpu_provide_the_names_that_kernels_use(file):
    there = file if (ON_CPU / file).is_file() else "memory.cuh"
    on_gpu, on_cpu = (ON_GPU / file).read_text("utf-8"), text_of(ON_CPU, there)
    assert [name for name in NAMES[file] if not defines(on_gpu, name)] == []
    assert [name for name in NAMES[file] if not defines(on_cpu, name)] == []


@pytest.mark.parametrize("file", NAMES)
def test_each_name_that_kernels_use_from_a_replaced_header_is_in_the_list(file):
    shared = "".join(code(path) for path in ON_GPU.iterdir() if path.name not in NAMES)
    own_to_kernels = set(re.findall(r"\bclass (\w+)", shared))  # parameters of templates
    header = re.sub(r"^ .*", "", code(ON_GPU / file), flags=re.M)  # without members
    used = set(re.findall(r"\w+", shared)) - own_to_kernels
    assert {name for name in used if defines(header, name)} <= set(NAMES[file])


def test_each_header_that_a_cpu_replaces_is_in_the_list():
    replaced = {path.name for path in ON_CPU.glob("*.cuh")} & {p.name for p in ON_GPU.iterdir()}
    assert replaced == NAMES.keys() - {"items.cuh"}
