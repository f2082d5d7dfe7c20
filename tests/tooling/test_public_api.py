# SPDX-License-Identifier: MIT
"""The public names, signatures, fields and options are those that `public_api.txt` lists.

`python -m tests.tooling.test_public_api > tests/tooling/public_api.txt` rewrites that file.
"""

import importlib
import inspect
import re
from difflib import ndiff
from pathlib import Path

import pytest

from tests.support.processes import python

LIST = Path(__file__).with_name("public_api.txt")
MODULES = ("cunorm", "cunorm.reference", "cunorm.torch", "cunorm.jax", "cunorm.jax.nnx")
NEEDS = {"cunorm.torch": "torch", "cunorm.jax": "jax", "cunorm.jax.nnx": "flax"}


class Annotation(str):
    __repr__ = str.__str__  # in a signature, without quotes


def plain(given):
    """Return an annotation with only the last part of dotted names."""
    text = getattr(given, "__forward_arg__", given)
    text = text if isinstance(text, str) else inspect.formatannotation(text)
    return given if given is inspect.Signature.empty else Annotation(re.sub(r"(\w+\.)+", "", text))


def described(name, value):
    """Yield a line for a function, or lines for a class and its methods."""
    found = inspect.signature(value)
    arguments = [one.replace(annotation=plain(one.annotation)) for one in found.parameters.values()]
    shown = inspect.Signature(arguments, return_annotation=plain(found.return_annotation))
    if not inspect.isclass(value):
        yield f"{name}{shown}"
        return
    bases = [one.__name__ for one in value.__mro__[1:-1] if not one.__name__.startswith("_")]
    is_flax = getattr(value.__init__, "__module__", "").startswith("flax")  # has its arguments
    arguments = "(...)" if is_flax else shown.replace(return_annotation=shown.empty)
    yield f"class {name}{arguments} of {', '.join(bases)}"
    for method, function in inspect.getmembers(value, inspect.isfunction):
        if not method.startswith("_") and function.__module__.startswith("cunorm"):
            yield from described(f"{name}.{method}", function)


def lines_of(part):
    """Return the lines of a module or of a command."""
    if part not in MODULES:
        text = python(*part.split()[1:], "--help").stdout
        return [" ".join([part, *re.findall(r"^  (-[-\w]+(?: \{.*?\})?)", text, re.M)])]
    module = importlib.import_module(part)
    values = {name: getattr(module, name) for name in sorted(module.__all__)}
    return [
        line
        for name, value in values.items()
        if not inspect.ismodule(value)
        for line in described(f"{part}.{name}", value)
    ]


PARTS = (*MODULES, *(f"python -m cunorm {command}" for command in ("demo", "info", "warmup")))


@pytest.mark.parametrize("part", PARTS)
def test_the_public_api_is_that_of_the_list(part):
    if library := NEEDS.get(part):
        pytest.importorskip(library, reason=f"{library} is not installed")
    listed = [
        line
        for line in LIST.read_text("utf-8").splitlines()
        if max((one for one in PARTS if one in line), key=len) == part
    ]
    changed = [line for line in ndiff(listed, lines_of(part)) if not line.startswith(" ")]
    assert not changed, "\n".join(changed)


if __name__ == "__main__":
    print(*(line for part in PARTS for line in lines_of(part)), sep="\n")
