# SPDX-License-Identifier: MIT
"""The public names, signatures, fields, examples and options are those of `public_api.json`.

`python -m tests.tooling.test_public_api` rewrites that file.
"""

from __future__ import annotations

import argparse
import doctest
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from difflib import unified_diff
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

SNAPSHOT = Path(__file__).with_name("public_api.json")
MODULES = ("cunorm", "cunorm.results", "cunorm.reference", "cunorm.torch", "cunorm.jax")
COMMANDS = "python -m cunorm"
STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
ORDINARY, EMPTY = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty

Api = dict[str, list[str]]  # lines for each thing that can change


def module_api(name: str) -> Api:
    """Describe a module by its names and their values."""
    module = importlib.import_module(name)
    names = sorted(getattr(module, "__all__", None) or own_names(module))
    api = {"names": names, "examples": examples(module)}
    for public in names:
        value = getattr(module, public)
        if not inspect.ismodule(value):
            api |= member_api(public, value)
    return {what: lines for what, lines in api.items() if lines}


def own_names(module: Any) -> list[str]:
    """Return the public names of the classes that a module without __all__ defines."""
    found = inspect.getmembers(module, inspect.isclass)
    return [name for name, cls in found if cls.__module__ == module.__name__]


def member_api(name: str, value: Any) -> Api:
    """Describe a function, or a class with its fields and public methods."""
    api = {f"{name} signature": signature(value), f"{name} examples": examples(value)}
    if inspect.isclass(value):
        bases = [cls.__name__ for cls in value.__mro__ if not cls.__name__.startswith("_")]
        fields = [*getattr(value, "_fields", getattr(value, "__dataclass_fields__", ()))]
        api |= {f"{name} bases": bases[1:-1], f"{name} fields": fields}
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if not method.startswith("_") and function.__module__.startswith("cunorm"):
                api |= member_api(f"{name}.{method}", function)
    return api


def signature(value: Any) -> list[str]:
    """Return a line for each parameter, and one for a function's return type."""
    found = inspect.signature(value)
    lines = []
    for one in found.parameters.values():
        kind = "" if one.kind in (*STARS, ORDINARY) else f"{one.kind.description} "
        default = "" if one.default is EMPTY else f" = {one.default!r}"
        name = f"{kind}{STARS.get(one.kind, '')}{one.name}"
        lines.append(f"{name}{annotation(': ', one.annotation)}{default}")
    return lines if inspect.isclass(value) else [*lines, annotation("-> ", found.return_annotation)]


def annotation(mark: str, given: Any) -> str:
    """Return an annotation as text, with only the last part of dotted names."""
    if given is EMPTY:
        return ""
    text = getattr(given, "__forward_arg__", given)
    text = text if isinstance(text, str) else inspect.formatannotation(text)
    return mark + re.sub(r"(\w+\.)+(?=\w)", "", text)


def examples(value: Any) -> list[str]:
    """Return the source and the expected output of each example in a docstring."""
    found = doctest.DocTestParser().get_examples(value.__doc__ or "")
    return [line for one in found for line in f">>> {one.source}{one.want}".splitlines()]


def command_line_api() -> Api:
    """Describe the options of each command from their argparse actions."""
    main = importlib.import_module("cunorm.__main__").main
    with mock.patch.object(argparse.ArgumentParser, "parse_args", autospec=True) as parse:
        parse.side_effect = LookupError  # only the parser is needed
        with suppress(LookupError):
            main([])
    parser = parse.call_args.args[0]
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return {name: [*map(option, one._actions)] for name, one in commands.choices.items()}


def option(one: argparse.Action) -> str:
    attributes = {"nargs": one.nargs, "choices": one.choices and [*one.choices]}
    attributes["required"] = one.required or None
    named = [f"{name}={value}" for name, value in attributes.items() if value is not None]
    return " ".join([*(one.option_strings or [one.dest]), *named])


def current_api(part: str) -> Api:
    return command_line_api() if part == COMMANDS else module_api(part)


def differences(before: Api, now: Api) -> Iterator[str]:
    """Yield the lines that only one of two descriptions has, after the name of the thing."""
    for what in dict.fromkeys([*before, *now]):
        changed = list(unified_diff(before.get(what, []), now.get(what, []), n=0, lineterm=""))
        if changed:
            yield f"{what}:"
            yield from (f"  {line}" for line in changed[2:] if not line.startswith("@@"))


@pytest.mark.parametrize("part", [*MODULES, COMMANDS])
def test_the_public_api_is_that_of_the_snapshot(part):
    if part in ("cunorm.torch", "cunorm.jax"):
        framework = part.removeprefix("cunorm.")
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    found = list(differences(json.loads(SNAPSHOT.read_text("utf-8"))[part], current_api(part)))
    assert not found, "\n".join([f"{part}: - in the snapshot, + now", *found])


def test_a_difference_is_named():
    class Before(NamedTuple):
        y: int = 1

    class After(NamedTuple):
        y: int = 2

    Before.__doc__, After.__doc__ = ">>> 1 + 1\n2", None
    found = "\n".join(differences(member_api("R", Before), member_api("R", After)))
    assert found == ("R signature:\n  -y: int = 1\n  +y: int = 2\nR examples:\n  ->>> 1 + 1\n  -2")


if __name__ == "__main__":
    api = {part: current_api(part) for part in (*MODULES, COMMANDS)}
    SNAPSHOT.write_text(json.dumps(api, indent=1, ensure_ascii=False) + "\n", "utf-8")
