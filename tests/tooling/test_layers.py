# SPDX-License-Identifier: MIT
"""Modules of cunorm import only modules below them, without circles.

Every import statement counts, also one in a function or for type checkers only. Imports by string
do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cunorm"
MAX_FILES = 8  # Python files directly in the package

# For each part, the other parts that its modules may import; `cunorm` is cunorm/__init__.py.
FAMILY = {"_core", "_dispatch", "reference", "results"}
BELOW = FAMILY | {"_arrays", "_backends", "_group_norm", "_row_norm"}
PUBLIC = {"_cache", "_warmup", "_workspace"}
COMMAND = BELOW | PUBLIC | {"_info", "cunorm"}
LAYERS: dict[str, set[str]] = {
    "_core": set(),
    "results": set(),
    "_arrays": {"_core"},
    "_backends": {"_core"},
    "reference": {"results"},
    "_dispatch": {"_arrays", "_backends", "_core"},
    "_group_norm": FAMILY,
    "_row_norm": FAMILY,
    "jax": BELOW,
    "torch": BELOW,
    "_cache": BELOW | PUBLIC,
    "_warmup": BELOW | PUBLIC,
    "_workspace": BELOW | PUBLIC,
    "cunorm": BELOW | PUBLIC,
    "_info": COMMAND,
    "_demo": COMMAND,
    "__main__": COMMAND | {"_demo"},
}

Imports = dict[str, set[str]]


def imports(package: Path) -> Imports:
    """Return, for each module of the package, the modules of the package that it imports.

    This includes the packages that contain an imported module, unless they contain the importer.
    """
    files = {module_name(path, package): path for path in package.rglob("*.py")}
    found: Imports = {}
    for name, path in sorted(files.items()):
        is_package = path.name == "__init__.py"
        tree = ast.parse(path.read_text("utf-8"))
        named = set(imported(tree, name.split(".")[: None if is_package else -1], files))
        around = {
            outer for inner in named for outer in accumulate(inner.split("."), "{}.{}".format)
        }
        around -= set(accumulate(name.split("."), "{}.{}".format))
        found[name] = {one for one in named | around if one.split(".")[0] == package.name}
    return found


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, package: list[str], files: dict[str, Path]) -> Iterator[str]:
    """Yield the modules in the import statements of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*start, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield inner if inner in files else origin


def part(module: str) -> str:
    """Return the part of the package that contains a module."""
    return module.split(".")[:2][-1]


def wrong_imports(found: Imports) -> Iterator[str]:
    """Yield the errors: modules in no layer, and imports of modules that are not below."""
    for name, targets in found.items():
        if part(name) not in LAYERS:
            yield f"{name} is in no layer"
            continue
        allowed = {part(name), *LAYERS[part(name)]}
        if wrong := sorted(one for one in targets if part(one) not in allowed):
            yield f"{name} may not import {', '.join(wrong)}"


def circle(found: Imports) -> list[str]:
    """Return a cycle of modules, each of which imports the next, or []."""
    try:
        TopologicalSorter({name: sorted(found[name]) for name in sorted(found)}).prepare()
    except CycleError as error:
        modules: list[str] = error.args[1]
        return modules[::-1]
    return []


def test_imports_point_down():
    wrong = list(wrong_imports(imports(PACKAGE)))
    assert not wrong, "\n".join(wrong)


def test_imports_make_no_circle():
    found = circle(imports(PACKAGE))
    assert not found, " imports\n".join(found)


def test_few_modules_are_directly_in_the_package():
    names = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(names) <= MAX_FILES, f"{len(names)}: {', '.join(names)}"


# --- on small packages ----------------------------------------------------------------------------

SOUND = {
    "__init__": "if TYPE_CHECKING:\n    from ._warmup import warmup",
    "__main__": "import cunorm\nfrom cunorm import _demo, _info",
    "results": "import numpy",
    "_core/__init__": "from cunorm._core.dtypes import DTYPES",
    "_core/dtypes": "",
    "_core/tensor": "from . import dtypes",
    "_arrays/__init__": "",
    "_arrays/numpy": "from cunorm._core.tensor import TensorSpec",
    "_backends/store": "from .._core import dtypes",
    "_dispatch": "from cunorm import _core, _arrays\nfrom ._backends.store import load",
    "reference/__init__": "from cunorm.results import NormGrads",
    "_row_norm/plan": "from cunorm import _dispatch, reference, results",
    "_group_norm/plan": "def f():\n    from cunorm._dispatch import dispatch",
    "_cache": "import cunorm._backends.store as store",
    "_warmup": "from cunorm._row_norm.plan import plan\nfrom cunorm._cache import cache_info",
    "_info": "import cunorm\nimport torch",
    "_demo/__init__": "from cunorm import rms_norm, reference",
    "torch/__init__": "from torch import Tensor\nfrom cunorm._row_norm import plan",
}


@pytest.fixture
def package(tmp_path):
    """Return a function that writes a valid package with changed files, and reads its imports."""

    def write(**changed: str) -> Imports:
        for name, text in (SOUND | changed).items():
            path = tmp_path / "cunorm" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return imports(tmp_path / "cunorm")

    return write


def test_a_sound_package_has_no_wrong_import(package):
    found = package()
    assert (list(wrong_imports(found)), circle(found)) == ([], [])
    assert found["cunorm._core.tensor"] == {"cunorm._core.dtypes"}
    assert found["cunorm._arrays.numpy"] == {"cunorm._core", "cunorm._core.tensor"}
    assert found["cunorm._info"] == {"cunorm"}


WRONG = {
    "_core/tensor": ("import cunorm.results", "cunorm.results"),
    "results": ("from ._core.dtypes import DTYPES", "cunorm._core, cunorm._core.dtypes"),
    "_arrays/numpy": (
        "def f():\n    from .._backends import store",
        "cunorm._backends, cunorm._backends.store",
    ),
    "_backends/store": ("from cunorm import reference", "cunorm.reference"),
    "reference/rows": ("from cunorm import _core", "cunorm._core"),
    "_dispatch": (
        "from cunorm._row_norm.plan import plan",
        "cunorm._row_norm, cunorm._row_norm.plan",
    ),
    "_row_norm/plan": ("if TYPE_CHECKING:\n    import cunorm._group_norm", "cunorm._group_norm"),
    "_group_norm/plan": ("from cunorm import _arrays", "cunorm._arrays"),
    "torch/modules": ("import cunorm.jax", "cunorm.jax"),
    "jax/vjp": ("from cunorm._cache import cache_info", "cunorm._cache"),
    "torch/__init__": ("from cunorm import rms_norm", "cunorm"),
    "_warmup": ("import cunorm.torch", "cunorm.torch"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_import_that_points_up_or_sideways_is_named(name, package):
    text, target = WRONG[name]
    module = f"cunorm.{name.removesuffix('/__init__').replace('/', '.')}"
    (wrong,) = wrong_imports(package(**{name: text}))
    assert wrong == f"{module} may not import {target}"


def test_a_module_in_no_layer_is_named(package):
    assert list(wrong_imports(package(_again=""))) == ["cunorm._again is in no layer"]


@pytest.mark.parametrize(
    "text",
    [
        "from cunorm._core import TensorSpec",
        "def f():\n    from . import tensor",
        "if TYPE_CHECKING:\n    import cunorm._core.tensor",
    ],
)
def test_a_circle_is_named(text, package):
    found = circle(package(**{"_core/dtypes": text}))
    assert found[0] == found[-1]
    assert "cunorm._core.dtypes" in found
    assert len(found) == 3
