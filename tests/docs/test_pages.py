# SPDX-License-Identifier: MIT
"""Examples and commands of the README and the documentation run; files that README names exist."""

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import cunorm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.M)
MODULES = re.compile(
    r"^ *(?:import|from) (torch|ml_dtypes|jax|cupy|transformers|flax|keras)\b", re.M
)


class Example(NamedTuple):
    """The code of a block of a page, and of the blocks that continue it."""

    name: str
    code: str


def examples() -> list[Example]:
    """Return the pages' programs; a block without an import or docstring at first continues one."""
    found: list[Example] = []
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for block in BLOCK.finditer(text := page.read_text(encoding="utf-8")):
            if block[1] != "python":
                continue
            if re.match(r"import |from |\"\"\"", block[2]):
                line = text.count("\n", 0, block.start()) + 1
                found.append(Example(f"{name}:{line}", block[2]))
            else:
                assert found and found[-1].name.startswith(name), f"{name}: imports are missing"
                found[-1] = found[-1]._replace(code=f"{found[-1].code}\n{block[2]}")
    return found


def as_parameter(example: Example) -> Any:
    marks = []
    if "cupy" in example.code or '"cuda"' in example.code:
        marks.append(pytest.mark.gpu)
    if '"cuda"' in example.code or "cupy.cuda." in example.code:
        marks.append(pytest.mark.real_gpu("PyTorch, JAX and CUDA graphs need a real GPU"))
    return pytest.param(example.code, id=example.name, marks=marks)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of torch.func.jvp
@pytest.mark.parametrize("code", [as_parameter(example) for example in examples()])
def test_an_example_prints_what_it_says(code, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # Keras reads it when imported
    for module in MODULES.findall(code):
        pytest.importorskip(module, reason=f"{module} is not installed")
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "example.py"  # fuse_activations reads the source
    program.write_text(code, encoding="utf-8")
    exec(compile(code, str(program), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert printed == PRINTED.findall(code)
    assert printed or "assert " in code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_code_has_a_form_that_is_tested(page):
    fences = re.findall(r"^.*(?:```|~~~).*$", page.read_text(encoding="utf-8"), re.M)
    assert set(fences[1::2]) <= {"```"}
    languages = {"python", "sh", "cpp", "text"}
    parts = {"{toctree}", "{eval-rst}", "{include}", "{image}", "{figure}"}
    assert {fence.split()[0] for fence in fences[::2]} <= {f"```{one}" for one in languages | parts}


def commands() -> dict[tuple[str, ...], set[str]]:
    """Return the options that the pages give to each program; a key is `program_of` a command."""
    found: dict[tuple[str, ...], set[str]] = {}
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            if block[1] != "sh":
                continue
            lines = block[2].replace("\\\n", " ").replace("&&", "\n").splitlines()
            for words in (shlex.split(line, comments=True) for line in lines):
                if words[:1] == ["python"] and (program := program_of(words[1:])):
                    options = {word for word in words if word.startswith("--")}
                    found.setdefault(program, set()).update(options)
    return found


def program_of(words: list[str]) -> tuple[str, ...]:
    """Return the words that name a program of cunorm with a help text; none for other programs."""
    if words[0] != "-m":
        return (words[0],) if words[0].endswith(".py") else ()
    if words[1] not in ("cunorm", "bench"):
        return ()
    count = 2 if len(words) == 2 or words[2].startswith("-") else 3
    return tuple(words[:count])


COMMANDS = [pytest.param(*both, id=" ".join(both[0])) for both in commands().items()]


@pytest.mark.parametrize(("program", "options"), COMMANDS)
def test_a_command_has_the_options_that_a_page_gives_it(program, options, capsys, monkeypatch):
    *is_module, name = program[:2]
    monkeypatch.setattr(sys, "argv", [name, *program[2:], "--help"])
    monkeypatch.syspath_prepend((ROOT / name).parent)  # as for a script
    monkeypatch.delitem(sys.modules, f"{name}.__main__", raising=False)
    run = runpy.run_module if is_module else runpy.run_path
    try:
        run(name, run_name="__main__")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    except SystemExit as end:
        assert end.code == 0
    assert options <= set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))


def test_every_public_function_is_named_in_the_readme():
    readme = PAGES[0].read_text(encoding="utf-8")
    functions = {name for name in cunorm.__all__ if not isinstance(getattr(cunorm, name), type)}
    assert {name for name in functions if name not in readme} == set()


def test_every_file_that_the_readme_links_or_lists_is_there():
    text = PAGES[0].read_text(encoding="utf-8")
    paths = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    paths += re.findall(r"^\| `([\w/]+/)` \|", text, re.M)
    assert len(paths) > 4
    assert [path for path in paths if not (ROOT / path).exists()] == []
