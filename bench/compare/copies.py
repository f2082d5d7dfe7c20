# SPDX-License-Identifier: MIT
"""Import another checkout's cunorm beside this one, and choose the CPU for which both compile.

Modules of cunorm import each other by full name, at import time. So this checkout's modules are
taken out of `sys.modules` while the other's are imported, and each copy gets its own modules.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from cunorm._backends.cpu.compile import base_options
from cunorm._backends.cpu.compiler import compiler

_FLAGS = "CUNORM_CXXFLAGS"
_NOT_LOADED = ("__main__.py", "_demo", "jax", "torch")  # the plain functions do not need them


def load(checkout: Path) -> ModuleType:
    """Return the cunorm of another checkout; ImportError if it would share modules with ours."""
    package = checkout.resolve() / "cunorm"
    if not (package / "__init__.py").is_file():
        raise ImportError(f"{checkout} is no checkout of cunorm")
    if late := list(late_imports(package)):
        raise ImportError(f"{late[0]} imports cunorm in a function, where it would get this one")
    ours = _pop_modules()
    sys.path.insert(0, str(package.parent))
    try:
        copy = import_module("cunorm")
        if Path(str(copy.__file__)).parent != package:
            raise ImportError(f"{copy.__file__} was imported, expected what is in {package}")
        for name in copy.__all__:  # import modules that would be imported at first use
            getattr(copy, name)
        copy.workspace_size("rms_norm_backward", torch.empty(1, 1))  # imports torch's adapter
    finally:
        sys.path.remove(str(package.parent))
        _pop_modules()
        sys.modules.update(ours)
    return copy


def _pop_modules() -> dict[str, ModuleType]:
    """Take cunorm's modules out of `sys.modules`, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "cunorm"]
    return {name: sys.modules.pop(name) for name in names}


def late_imports(package: Path) -> Iterator[str]:
    """Yield each import of cunorm inside a function, in modules that a CPU's calls may load."""
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] in _NOT_LOADED:
            continue
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        for node in (inner for function in functions for inner in ast.walk(function)):
            is_import = isinstance(node, (ast.Import, ast.ImportFrom))
            if is_import and re.match(r"from \.|(from|import) (.*, )?cunorm\b", ast.unparse(node)):
                yield f"{path}:{node.lineno}"


def compile_for(copies: Iterable[ModuleType], march: str | None) -> None:
    """Let the copies compile for the architecture `march`.

    If that architecture has no AVX-512, cunorm's options for AVX-512 are left out.
    """
    more = [os.environ.get(_FLAGS, ""), f"-march={march}" if march else ""]
    os.environ[_FLAGS] = " ".join(filter(None, more))
    for copy in () if has_avx512() else copies:
        module = copy._backends.cpu.compiler
        identity = re.sub(r"\bavx512\w*", "", module.cpu_identity())
        module.cpu_identity = lambda text=identity: text


def has_avx512() -> bool:
    """Whether compiled code uses AVX-512; ValueError if the compiler fails."""
    return "__AVX512F__" in macros()


def macros() -> str:
    """Return the macros that the compiler defines; ValueError if it fails."""
    found = compiler()
    if found is None:
        raise ValueError("there is no C++ compiler")
    for native in (["-march=native"], []):  # some compilers refuse the option
        command = [*found.command, *native, *base_options(), "-dM", "-E", "-xc++", os.devnull]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return answer.stdout
    raise ValueError(answer.stderr.strip().partition("\n")[0])
