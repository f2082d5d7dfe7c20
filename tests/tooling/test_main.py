# SPDX-License-Identifier: MIT
"""The command line, as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cunorm import _demo
from tests.support.calls import empty_call_cache
from tests.support.internals import _dispatch, main, view_at

ROOT = Path(__file__).parents[2]
# Operators of the demo. float16 has no options of rms_norm and only one group norm; only float32
# has the group norm that is far from zero.
ROW_NORMS, FORMS, GROUP_NORMS, FAR = 7, 5, 3, 1
OF_ROWS, OF_GROUPS = ROW_NORMS + FORMS, GROUP_NORMS + FAR  # on float32
IN_ALL_DTYPES = 3 * ROW_NORMS + 2 * FORMS + 2 * GROUP_NORMS + FAR + 1
RESULTS = 2 * (OF_ROWS + OF_GROUPS)  # each is a line forward and one backward
LARGEST = _demo.LARGEST
IN_FLOAT32 = {**dict.fromkeys(LARGEST, -1.0), "float32": LARGEST["float32"]}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter in a separate process."""
    options = {
        "capture_output": True,
        "text": True,
        "cwd": ROOT,
        "env": {**os.environ, **environment},
    }
    return subprocess.run([sys.executable, *arguments], **options, check=False)


def saved(folder: Path, array: object) -> str:
    path = folder / "input.npy"
    np.save(path, array)
    return str(path)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Limit the demo to float32, and time each call only once."""
    monkeypatch.setattr(_demo, "LARGEST", IN_FLOAT32)
    monkeypatch.setattr(_demo, "_REPEATS", 1)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Return an array of three axes, part of the demo's embedded text."""
    rows = _demo.embedded(_demo.text()[1], rows=6)
    return saved(tmp_path, rows.reshape(2, 3, 256)[..., 30:130])


def table(output: str) -> list[str]:
    return [line for line in output.splitlines() if " float" in line or " bfloat16" in line]


def test_info_reports_versions_devices_compilers_and_caches():
    done = run("-m", "cunorm", "info")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("cunorm", "numpy", "torch", "jax", "model", "threads used", "C++", "CPU builds"):
        assert f"\n  {name} " in done.stdout
    assert np.__version__ in done.stdout


def test_info_finds_no_compiler_where_there_is_none():
    done = run("-m", "cunorm", "info", PATH="", CXX="")
    assert done.returncode == 0
    assert "none found: install g++ or clang++" in done.stdout


def test_info_shows_what_is_wrong_with_the_environment():
    done = run("-m", "cunorm", "info", CXX='g++ "')
    assert done.returncode == 0, done.stderr
    assert """CXX is 'g++ "', expected a command of a shell""" in done.stdout


def test_demo_is_within_tolerance_on_the_text_of_the_python_installation(monkeypatch, capsys):
    monkeypatch.setattr(_demo, "embedded", partial(_demo.embedded, rows=512))
    assert main(["demo", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert len(table(output)) == RESULTS
    assert sum(" 512x256 " in line for line in table(output)) == 2 * OF_ROWS
    assert output.endswith(f"all {RESULTS} results are within their tolerance\n")


def test_demo_takes_the_rows_of_an_array(small, monkeypatch, capsys):
    monkeypatch.setattr(_demo, "LARGEST", LARGEST)
    assert main(["demo", "--device", "cpu", "--input", small]) == 0
    lines = table(capsys.readouterr().out)
    assert len(lines) == 2 * IN_ALL_DTYPES
    assert sum(" 6x100 " in line for line in lines) == 2 * (3 * ROW_NORMS + 2 * FORMS)


NORMAL = np.random.default_rng(0).standard_normal((20, 24))
ODD = {
    "one element": np.array([3.0]),
    "zeros": np.zeros((2, 4)),
    "constants": np.full((3, 4), 7.0),
    # Relative errors are meaningless next to the smallest normal float32; CUDA flushes below it.
    **{f"{m}": (m * NORMAL).astype(np.float32) for m in (1e-15, 1e-24, 1e-30, 1e-44)},
    "tiny and large rows": (np.tile([[1e-40], [1e9]], (10, 1)) * NORMAL).astype(np.float32),
}


@pytest.mark.parametrize("what", ODD)
def test_demo_takes_odd_input(what, tmp_path):
    assert main(["demo", "--device", "cpu", "--input", saved(tmp_path, ODD[what])]) == 0


def test_demo_leaves_float16_out_where_the_input_is_too_large_for_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_demo, "LARGEST", {**IN_FLOAT32, "float16": LARGEST["float16"]})
    path = saved(tmp_path, np.array([[1e6, 2.0, 3.0, 4.0], [5.0, -5e5, 6.0, 7.0]]))
    assert main(["demo", "--device", "cpu", "--input", path]) == 0
    output = capsys.readouterr().out
    assert "float16 is left out: the input has values beyond 10000" in output
    assert len(table(output)) == RESULTS


@pytest.mark.parametrize("has_ml_dtypes", [True, False])
def test_demo_runs_without_a_compiler_and_without_ml_dtypes(has_ml_dtypes, small):
    code = "from cunorm.__main__ import main; import sys;"
    code += "" if has_ml_dtypes else "sys.modules['ml_dtypes'] = None;"
    code += f"sys.exit(main(['demo', '--device', 'cpu', '--input', {small!r}]))"
    done = run("-c", code, PATH="", CXX="")
    assert done.returncode == 0
    assert "cunorm found no C++ compiler" in done.stderr
    assert "compiling" not in done.stdout
    if has_ml_dtypes:
        assert len(table(done.stdout)) == 2 * IN_ALL_DTYPES
    assert ("bfloat16 is left out: pip install ml_dtypes" in done.stdout) != has_ml_dtypes


@pytest.mark.parametrize(
    ("op", "count"),
    [
        ("row_forward", OF_ROWS),
        ("row_backward", OF_ROWS),
        ("group_forward", OF_GROUPS),
        ("group_backward", OF_GROUPS),
    ],
)
def test_demo_fails_where_a_kernel_is_wrong(op, count, small, monkeypatch, capsys):
    loaded = _dispatch._loaded
    empty_call_cache(monkeypatch)

    def load(wrong, spec, plan, *rest):
        run, place = loaded(wrong, spec, plan, *rest), wrong.first_output

        def run_and_spoil(pointers):  # y, or dx
            run(pointers)
            view_at(pointers[place], plan.specs[place])[-1] *= 1.1

        return run_and_spoil if wrong.name == op else run

    monkeypatch.setattr(_dispatch, "_loaded", load)
    assert main(["demo", "--device", "cpu", "--input", small]) == 1
    output = capsys.readouterr().out
    assert output.count("  WRONG") == count
    assert f"{count} of {RESULTS} results are further off than their tolerance" in output


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (np.arange(6), "dtype int64, expected floats in rows"),
        (np.zeros((0, 4)), "shape (0, 4) and dtype float64, expected floats in rows"),
        (np.array([1.0, np.nan]), "largest magnitude of nan, expected finite values"),
        (np.array([1.0, 2e10]), "of 20000000000.0, expected finite values of at most 1e+10"),
        (b"no array", "cannot be read as a .npy file"),
        (None, "No such file or directory"),
    ],
)
def test_demo_says_what_is_wrong_with_an_input(content, text, tmp_path, capsys):
    path = tmp_path / "input.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--device", "cpu", "--input", str(path)])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert str(path) in message
    assert text in message


def test_demo_says_why_there_is_no_cuda_device(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--device", "cuda"])
    assert stopped.value.code == 2
    assert "--device cuda: no CuPy" in capsys.readouterr().err


REAL = pytest.mark.real_gpu("a million elements, a hundred times, are too many for an interpreter")


@pytest.mark.gpu
@pytest.mark.parametrize("on_text", [pytest.param(True, marks=REAL), False])
def test_demo_is_within_tolerance_on_cuda(on_text, small, monkeypatch, capsys):
    monkeypatch.setattr(_demo, "LARGEST", LARGEST)
    monkeypatch.setattr(_demo, "_CUDA_CALLS", 1)
    assert main(["demo", *(() if on_text else ("--device", "cuda", "--input", small))]) == 0
    lines = table(capsys.readouterr().out)
    assert len(lines) == 2 * IN_ALL_DTYPES
    assert all(" cuda " in line for line in lines)
