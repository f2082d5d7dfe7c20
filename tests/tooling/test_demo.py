# SPDX-License-Identifier: MIT
"""The table of `python -m cunorm demo`."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.calls import empty_call_cache
from tests.support.described import with_empty_caches
from tests.support.internals import (
    _compile,
    _demo,
    _demo_device,
    _demo_inputs,
    _dispatch,
    _warmup,
    main,
    view_at,
)
from tests.support.processes import python

# Rows of the table. Only float32 has all norms.
ROW_NORMS, FORMS, GROUP_NORMS = 7, 5, 4
OF_ROWS, OF_GROUPS = ROW_NORMS + FORMS, GROUP_NORMS
IN_16_BITS = {"bfloat16": (3, 1), "float16": (1, 1)}  # of rows and of groups
IN_ALL_DTYPES = OF_ROWS + OF_GROUPS + sum(map(sum, IN_16_BITS.values()))
RESULTS = 2 * (OF_ROWS + OF_GROUPS)  # each is a line forward and one backward
LARGEST = _demo_inputs.LARGEST
IN_FLOAT32 = {**dict.fromkeys(LARGEST, -1.0), "float32": LARGEST["float32"]}


def saved(folder: Path, array: object) -> str:
    path = folder / "input.npy"
    np.save(path, array)
    return str(path)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Limit the demo to float32, and time each call only once."""
    monkeypatch.setattr(_demo_inputs, "LARGEST", IN_FLOAT32)
    monkeypatch.setattr(_demo_device, "REPEATS", 1)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Return an array of three axes, part of the demo's embedded text."""
    rows = _demo_inputs.embedded(_demo_inputs.text()[1], rows=6)
    return saved(tmp_path, rows.reshape(2, 3, 256)[..., 30:130])


ROW = re.compile(r".* (forward|backward) +[\dx]+ b?float.*")


def table(output: str) -> list[str]:
    return [line for line in output.splitlines() if ROW.fullmatch(line)]


def test_demo_is_within_tolerance_on_the_text_of_the_python_installation(monkeypatch, capsys):
    embedded = partial(_demo_inputs.embedded, rows=512)
    monkeypatch.setattr(_demo_inputs, "embedded", embedded)
    assert main(["demo", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    name = _demo_inputs.text()[0]
    assert output.startswith(f"input:  Python's {name}, its first 512 bytes, each as a row of 256 ")
    assert len(table(output)) == RESULTS
    assert sum(" 512x256 " in line for line in table(output)) == 2 * OF_ROWS
    assert f"all {RESULTS} results are within their bounds; " in output
    assert f" forward and backward: {OF_ROWS + OF_GROUPS} in float32\n" in output


def test_demo_takes_the_rows_of_an_array(small, monkeypatch, capsys):
    monkeypatch.setattr(_demo_inputs, "LARGEST", LARGEST)
    assert main(["demo", "--device", "cpu", "--input", small]) == 0
    lines = table(capsys.readouterr().out)
    assert len(lines) == 2 * IN_ALL_DTYPES
    assert sum(" 6x100 " in line for line in lines) == 2 * (OF_ROWS + 3 + 1)


def listed(output: str) -> list[tuple[str, ...]]:
    """Return the operator, direction, shape and dtype of each row, without figures."""
    return [tuple(re.split(r" {2,}|(?<=ward) | (?=b?float)", line)[:4]) for line in table(output)]


def test_every_norm_is_shown_in_both_directions_and_the_first_is_rms_norm(small, capsys):
    assert main(["demo", "--device", "cpu", "--input", small]) == 0
    rows = listed(capsys.readouterr().out)
    assert [row[:2] for row in rows[:2]] == [("rms_norm", "forward"), ("rms_norm", "backward")]
    public = {name for name in _warmup.FUNCTIONS if not name.endswith(("_forward", "_backward"))}
    for direction in ("forward", "backward"):
        assert {name.partition(",")[0] for name, way, *_ in rows if way == direction} == public


def test_a_quick_demo_shows_some_rows_of_the_whole_one(small, monkeypatch, capsys):
    monkeypatch.setattr(_demo_inputs, "LARGEST", LARGEST)
    shown = []
    for options in ([], ["--quick"]):
        assert main(["demo", "--device", "cpu", "--input", small, *options]) == 0
        shown.append(listed(capsys.readouterr().out))
    whole, quick = shown
    assert len(set(whole)) == len(whole) == 2 * IN_ALL_DTYPES
    assert set(quick) < set(whole)
    assert 0 < len(quick) < len(whole) / 2
    assert quick[0] == whole[0]


def test_rows_need_no_build_beside_those_that_were_compiled_before_them(small, monkeypatch, capsys):
    with_empty_caches(monkeypatch)
    monkeypatch.setattr(_demo_inputs, "LARGEST", LARGEST)
    monkeypatch.setattr(_demo, "available_cores", lambda: 2)
    load, compile_concurrently = _compile._load, _demo_device.compile_concurrently
    batches, loads, rows, headers = [], [], [], []

    def compile_batch(builds, *args, with_headers, **more):
        rows.append(len(table(capsys.readouterr().out)))
        assert len(loads) == sum(map(len, batches)), "a row has compiled what it needs"
        batches.append(builds)
        headers.append(with_headers)
        return compile_concurrently(builds, *args, **more)

    monkeypatch.setattr(_demo_device, "compile_concurrently", compile_batch)
    monkeypatch.setattr(_compile, "_load", lambda build: loads.append(build) or load(build))
    assert main(["demo", "--device", "cpu", "--input", small]) == 0
    rows.append(len(table(capsys.readouterr().out)))
    builds = [build for batch in batches for build in batch]
    assert len(set(builds)) == len(builds) == len(loads)
    assert len(batches[0]) == 3, "rms_norm alone"
    assert rows[:2] == [0, 2]
    assert 0 not in rows[1:]
    assert headers == [number == 1 for number in range(len(batches))]
    kernels = [[build.kernel.rpartition("_")[2] for build in batch] for batch in batches]
    assert kernels[0] == ["grad", "backward", "forward"]


def test_what_does_not_compile_is_an_error_without_a_usage_text(small, monkeypatch, capsys):
    def fail(*args, **more):
        raise RuntimeError("1 of 3 builds failed, the first of them: reason")

    monkeypatch.setattr(_demo_device, "compile_concurrently", fail)
    assert main(["demo", "--device", "cpu", "--input", small]) == 1
    assert capsys.readouterr().err == "1 of 3 builds failed, the first of them: reason\n"


NORMAL = np.random.default_rng(0).standard_normal((20, 24))
ODD = {
    "one element": np.array([3.0]),
    "zeros": np.zeros((2, 4)),
    "constants": np.full((3, 4), 7.0),
    "float16": NORMAL.astype(np.float16),
    # Relative errors are meaningless next to the smallest normal float32; CUDA flushes below it.
    **{f"{m}": (m * NORMAL).astype(np.float32) for m in (1e-15, 1e-24, 1e-30, 1e-44)},
    "tiny and large rows": (np.tile([[1e-40], [1e9]], (10, 1)) * NORMAL).astype(np.float32),
}


@pytest.mark.parametrize("what", ODD)
def test_demo_takes_odd_input(what, tmp_path):
    assert main(["demo", "--device", "cpu", "--input", saved(tmp_path, ODD[what])]) == 0


def test_demo_leaves_float16_out_where_the_input_is_too_large_for_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_demo_inputs, "LARGEST", {**IN_FLOAT32, "float16": LARGEST["float16"]})
    path = saved(tmp_path, np.array([[1e6, 2.0, 3.0, 4.0], [5.0, -5e5, 6.0, 7.0]]))
    assert main(["demo", "--device", "cpu", "--input", path]) == 0
    output = capsys.readouterr().out
    assert "float16 is left out: the input has values beyond 10000" in output
    assert len(table(output)) == RESULTS
    assert main(["demo", "--quick", "--device", "cpu", "--input", path]) == 0
    assert "\nfloat16 is left" not in capsys.readouterr().out, "a quick demo has no float16"


@pytest.mark.parametrize("has_ml_dtypes", [True, False])
def test_demo_runs_without_a_compiler_and_without_ml_dtypes(has_ml_dtypes, small):
    code = "from cunorm.__main__ import main; import sys;"
    code += "" if has_ml_dtypes else "sys.modules['ml_dtypes'] = None;"
    code += f"sys.exit(main(['demo', '--device', 'cpu', '--input', {small!r}]))"
    done = python("-c", code, PATH="", CXX="")
    assert (done.returncode, done.stderr) == (0, "")
    assert ", NumPy's loops as there is no C++ compiler\n" in done.stdout
    assert "\nno kernel ran: NumPy computed the " in done.stdout
    assert "within their bounds" not in done.stdout
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
        ready, slot = loaded(wrong, spec, plan, *rest), wrong.first_output

        def run_and_spoil(pointers):  # y, or dx
            ready.run(pointers)
            view_at(pointers[slot], plan.specs[slot])[-1] *= 1.1

        return ready._replace(run=run_and_spoil) if wrong.name == op else ready

    monkeypatch.setattr(_dispatch, "_loaded", load)
    assert main(["demo", "--device", "cpu", "--input", small]) == 1
    output = capsys.readouterr().out
    assert output.count("  WRONG") == count
    assert all("  WRONG" not in line for line in output.splitlines() if not ROW.fullmatch(line))
    assert f"{count} of {RESULTS} results are further off than their bounds" in output


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (np.arange(6), "dtype int64, expected floats in rows"),
        (np.zeros((0, 4)), "shape (0, 4) and dtype float64, expected floats in rows"),
        (np.array([1.0, np.nan]), "largest magnitude of nan, expected finite values"),
        (np.array([1.0, 2e10]), "of 20000000000.0, expected finite values of at most 1e+10"),
        (np.array([1.0, np.inf], np.float16), "largest magnitude of inf, expected finite values"),
        (np.ones(4, np.float16).view("V2"), "dtype |V2, expected floats in rows along the last "),
        (np.ones(4, np.float16).view("V2"), "; if it is bfloat16, save it as float32"),
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
    assert ("bfloat16" in message) == (
        content is not None and getattr(content, "dtype", "") == "V2"
    )


def test_demo_says_why_there_is_no_cuda_device(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--device", "cuda"])
    assert stopped.value.code == 2
    assert "--device cuda: no CuPy" in capsys.readouterr().err


def test_one_thread_is_one_thread(monkeypatch):
    for count, words in ((1, "1 thread"), (2, "2 threads")):
        monkeypatch.setattr(_demo_device, "thread_count", lambda count=count: count)
        assert _demo_device.chosen_device("cpu").title.endswith(f", {words}")


@pytest.mark.parametrize("is_there", [True, False])
def test_the_last_lines_say_what_a_plot_needs_if_it_is_not_there(
    is_there, small, monkeypatch, capsys
):
    monkeypatch.setattr(_demo, "find_spec", lambda name: name if is_there else None)
    assert main(["demo", "--quick", "--device", "cpu", "--input", small]) == 0
    (line,) = (one for one in capsys.readouterr().out.splitlines() if "--plot" in one)
    assert ("needs matplotlib" in line) != is_there


REAL = pytest.mark.real_gpu("a million elements, a hundred times, are too many for an interpreter")


@pytest.mark.gpu
@pytest.mark.parametrize("on_text", [pytest.param(True, marks=REAL), False])
def test_demo_is_within_tolerance_on_cuda(on_text, small, monkeypatch, capsys):
    monkeypatch.setattr(_demo_inputs, "LARGEST", LARGEST)
    monkeypatch.setattr(_demo_device, "CUDA_CALLS", 1)
    assert main(["demo", *(() if on_text else ("--device", "cuda", "--input", small))]) == 0
    output = capsys.readouterr().out
    assert "\ndevice: cuda, " in output
    assert len(table(output)) == 2 * IN_ALL_DTYPES
