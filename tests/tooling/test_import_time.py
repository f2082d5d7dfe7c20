# SPDX-License-Identifier: MIT
"""`import cunorm` loads no module besides itself and NumPy, and public names load at first use."""

from __future__ import annotations

import types
from importlib.util import find_spec

import pytest

import cunorm
from tests.support.processes import in_process

IMPORTED = """
import sys
import numpy
before = set(sys.modules)
import cunorm
print(*sorted(set(sys.modules) - before))
"""
NAMES = """
import cunorm
names = cunorm.__all__
assert len(set(names)) == len(names)
assert {*names, "__version__"} <= set(dir(cunorm))
import cunorm.results
assert {name for name in dir(cunorm) if not name.startswith("__")} == {*names}
cunorm.torch = "imported"
assert "torch" in dir(cunorm)
values = {name: getattr(cunorm, name) for name in names}
for name, value in values.items():
    assert getattr(cunorm, name) is value, name
    assert callable(value) or name == "reference", name
assert isinstance(cunorm.__version__, str)
assert cunorm.results.NormForward is cunorm.NormForward
assert cunorm.reference.rms_norm is not cunorm.rms_norm
before = set(globals())
from cunorm import *
assert {name: globals()[name] for name in names} == values
assert set(globals()) - before == {*names, "before"}
"""
UNKNOWN = """
import sys
import cunorm
for name in ("nothing", "_nothing"):
    assert not hasattr(cunorm, name)
    try:
        getattr(cunorm, name)
    except AttributeError as error:
        assert str(error) == f"module 'cunorm' has no attribute {name!r}", error
for name in ("torch", "jax", "results"):
    assert not hasattr(cunorm, name)
    assert "torch" not in sys.modules and name not in dir(cunorm)
    try:
        getattr(cunorm, name)
    except AttributeError as error:
        assert str(error).endswith(f"no attribute {name!r}: import cunorm.{name} first"), error
from cunorm import results
assert cunorm.results is results
try:
    from cunorm import nothing
except ImportError as error:
    assert str(error).startswith("cannot import name 'nothing' from 'cunorm'"), error
else:
    raise AssertionError("no error")
"""
USED = """
import sys
import numpy as np
import cunorm
y = cunorm.rms_norm(np.array([[1, 7]], np.float32))
assert np.allclose(y, [[0.2, 1.4]])
for name in ("torch", "jax", "cupy", "ml_dtypes"):
    assert name not in sys.modules, name
"""


def test_import_adds_no_other_module_to_those_of_numpy():
    more = set(in_process(IMPORTED, setup="").split()) - {"cunorm"}
    assert not more, f"{len(more)} more: {', '.join(sorted(more))}"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(NAMES, id="dir lists the public names, which a star import gives"),
        pytest.param(UNKNOWN, id="an unknown name is an error, with a hint for a submodule"),
        pytest.param(USED, id="a function works and imports no framework"),
    ],
)
def test_public_names_work_after_an_import(script):
    in_process(script, setup="")


def test_no_function_hides_a_module_of_its_name():
    """A module that a function hides cannot be reloaded or found by its name."""
    for name in cunorm.__all__:
        if not isinstance(getattr(cunorm, name), types.ModuleType):
            assert find_spec(f"cunorm.{name}") is None, name
