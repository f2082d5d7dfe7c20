# SPDX-License-Identifier: MIT
"""`python -m cunorm demo`: its output, and figures that could be wrong unnoticed."""

from __future__ import annotations

import io
import os
import re
import sys
from functools import partial, wraps
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import cunorm
from cunorm import reference
from cunorm.reference.tolerance import worst_error
from tests import softgpu
from tests.support.caches import fresh_process
from tests.support.described import with_empty_caches
from tests.support.internals import (
    _compile,
    _demo,
    _demo_operators,
    _demo_plot,
    _warmup,
    main,
    operators,
    row_operands,
)
from tests.support.processes import python

ALL, IN_16_BITS, QUICK = 19, 6, 5  # numbers of norms that have two rows in the table
ROWS_OF_ALL, ROWS_OF_QUICK = 2 * (ALL + IN_16_BITS) + 4, 2 * QUICK + 1  # some are quantised
ROW = re.compile(r"(.{26}) (forward |backward) +([\dx]+) (b?float\d+) .*")
RANDOM = np.random.default_rng(0).standard_normal((20, 24))


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Time each call once, and plot two sizes."""
    monkeypatch.setattr(_demo, "REPEATS", 1)
    monkeypatch.setattr(_demo_operators, "CUDA_CALLS", 1)
    monkeypatch.setattr(_demo_plot, "SIZES", (1 << 15, 1 << 20))
    monkeypatch.setattr(_demo_plot, "_ROUNDS", 1)


@pytest.fixture
def demo(tmp_path, capsys):
    """Return a function that runs the demo on an array, and returns its status and output."""

    def run(array=RANDOM, *options, device="cpu"):
        path = tmp_path / "input.npy"
        if isinstance(array, bytes):
            path.write_bytes(array)
        elif array is not None:
            np.save(path, array)
        status = main(["demo", "--device", device, "--input", str(path), *options])
        return status, capsys.readouterr().out

    return run


def table(output: str) -> list[tuple[str, ...]]:
    """Return operator, direction, shape and dtype of each row."""
    found = map(ROW.fullmatch, output.splitlines())
    return [tuple(map(str.strip, row.groups())) for row in found if row]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_every_function_is_right_in_both_directions_on_a_text_of_the_installation(
    compiled, capsys, monkeypatch
):
    monkeypatch.setattr(_demo.operators.text, "__defaults__", (256,))
    with fresh_process(**({} if compiled else {"CXX": "", "PATH": os.devnull})):
        assert main(["demo", "--device", "cpu"]) == 0
    output, results = capsys.readouterr().out, ROWS_OF_ALL
    assert re.match(
        r"input:  Python's pydoc.py, its first 256 bytes, each as a row of 256 ", output
    )
    if compiled:
        assert f"\nall {results} results are within their bounds\n" in output
    else:
        assert f"no kernel ran: NumPy computed the {results} results, " in output
    rows = table(output)
    assert len(set(rows)) == len(rows) == results
    assert [row[:2] for row in rows[:2]] == [("rms_norm", "forward"), ("rms_norm", "backward")]
    public = {
        name for name in _warmup.FUNCTIONS if not name.endswith(("_forward", "_backward", "_jvp"))
    }
    derived = {name for name in public if not name.endswith("_quantized")}
    for direction, names in (("forward", public), ("backward", derived)):
        assert {name.partition(",")[0] for name, way, *_ in rows if way == direction} == names


def test_a_quick_demo_of_an_array_shows_some_rows_of_the_whole_demo(demo):
    with fresh_process(CXX="", PATH=os.devnull):
        whole = table(demo(RANDOM.reshape(2, 10, 24))[1])
    quick = table(demo(RANDOM, "--quick")[1])
    assert (len(whole), len(quick)) == (ROWS_OF_ALL, ROWS_OF_QUICK)
    assert set(quick) < set(whole)
    assert {row[2] for row in whole} == {"20x24", "4x5x24", "4x24x5"}


ODD = {
    "one element": np.array([3.0]),
    "zeros": np.zeros((2, 4)),
    # In float32, squares of numbers about 1e-24 are 0, and numbers about 1e-44 are subnormal.
    **{f"{m}": (m * RANDOM).astype(np.float32) for m in (1e-24, 1e-44)},
    "tiny and large rows": (np.tile([[1e-40], [1e9]], (10, 1)) * RANDOM).astype(np.float32),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_input_is_within_the_bounds_in_each_dtype_that_can_hold_it(what, demo, monkeypatch):
    shown = ("rms_norm", "layer_norm", "l2_norm", "group_norm, silu")
    monkeypatch.setitem(operators.__globals__["_SHOWN"], ("float32", False), shown)
    status, output = demo(ODD[what])
    assert status == 0
    too_large = "float16 is left out: the input has values beyond 10000" in output
    assert too_large == (what == "tiny and large rows")


@pytest.mark.parametrize(
    ("content", "options", "text"),
    [
        (np.arange(6), (), "dtype int64, expected floats in rows along the last axis"),
        (np.zeros((0, 4)), (), "shape (0, 4) and dtype float64, expected floats in rows"),
        (np.array([1.0, np.nan]), (), "largest magnitude of nan, expected finite values"),
        (np.array([2e10]), (), "of 20000000000.0, expected finite values of at most 1e+10"),
        (np.ones(4, np.float16).view("V2"), (), "; if it is bfloat16, save it as float32"),
        (b"no array", (), "cannot be read as a .npy file"),
        (None, (), "No such file or directory"),
        (RANDOM, ("--device", "cuda"), "--device cuda: no CuPy"),
        (RANDOM, ("--plot", "/nowhere/a.png"), "--plot /nowhere/a.png: "),
        (RANDOM, ("--plot", "a.jpgg"), "--plot a.jpgg: "),
    ],
)
def test_wrong_input_and_options_are_named_before_any_work(
    content, options, text, demo, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(_demo, "_table", lambda *args: pytest.fail("this is work"))
    with pytest.raises(SystemExit, match="2"):
        demo(content, *options)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["", "ml_dtypes", "rich", "matplotlib"])
def test_missing_packages_are_named_and_without_a_compiler_numpy_computes(missing, tmp_path):
    path = tmp_path / "input.npy"
    np.save(path, RANDOM)
    code = f"from cunorm.__main__ import main; import sys; sys.modules[{missing!r}] = None;"
    words = ["demo", "--device", "cpu", "--quick", "--input", str(path)]
    words += ["--plot", str(tmp_path / "a.png")] if missing == "matplotlib" else []
    code += f"sys.exit(main({words}))"
    done = python("-c", code, PATH="", CXX="/nowhere/c++")
    if missing in ("rich", "matplotlib"):
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"the demo needs {missing}: python -m pip install {missing}\n"
        return
    assert (done.returncode, done.stderr) == (0, "")
    loops = ", NumPy's loops as there is no C++ compiler (CXX=/nowhere/c++ does not answer)\n"
    assert loops in done.stdout
    assert "\nno kernel ran: NumPy computed the " in done.stdout
    assert ("bfloat16 is left out: pip install ml_dtypes" in done.stdout) == bool(missing)


def test_a_wrong_cxx_is_a_usage_error_and_a_failed_build_is_not(monkeypatch, capsys):
    done = python("-m", "cunorm", "demo", "--device", "cpu", CXX='g++ "')
    assert (done.returncode, done.stdout) == (2, "")
    assert """error: CXX is 'g++ "', expected a command of a shell""" in done.stderr

    def fails(*args):
        raise RuntimeError("reason")

    monkeypatch.setattr(_demo, "call_concurrently", fails)
    assert main(["demo", "--quick", "--device", "cpu"]) == 1
    assert capsys.readouterr().err == "reason\n"


@pytest.mark.parametrize(
    ("name", "label", "factor"),
    [("group_norm", "group_norm, silu", 1.1), ("layer_norm_backward", "layer_norm", np.nan)],
)
def test_a_wrong_result_is_marked_and_makes_the_status_1(name, label, factor, demo, monkeypatch):
    function = getattr(cunorm, name)

    @wraps(function)
    def wrong(*args, **more):
        result = function(*args, **more)
        (result if isinstance(result, np.ndarray) else result.dx)[-1] *= factor
        return result

    monkeypatch.setattr(cunorm, name, wrong)
    status, output = demo(RANDOM, "--quick")
    assert status == 1
    assert re.findall("\n(.*?)  .* [\\d.inf]+  WRONG\n", output) == [label]
    assert f"\n1 of {ROWS_OF_QUICK} results are further off than their bounds" in output
    for name, is_coloured in (("FORCE_COLOR", True), ("NO_COLOR", False)):
        monkeypatch.setenv(name, "1")
        assert ("\033[31m" in demo(RANDOM, "--quick")[1]) == is_coloured


def test_only_a_terminal_shows_which_builds_compile(demo, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", demo(RANDOM, "--quick")[1])
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    demo(RANDOM, "--quick")
    assert "compiling norms 2 to 6 of 6" in sys.stdout.getvalue()


def test_nothing_compiles_while_a_call_is_timed_and_the_first_row_waits_for_one_kernel(
    demo, monkeypatch
):
    with_empty_caches(monkeypatch)
    load, seconds, events = _compile._load, _demo_operators.Device.seconds, []

    def timed(self, call):
        before = events.count("load")
        result = seconds(self, call)
        assert events.count("load") == before
        events.append("time")
        return result

    monkeypatch.setattr(_demo_operators.Device, "seconds", timed)
    monkeypatch.setattr(_compile, "_load", lambda build: events.append("load") or load(build))
    assert demo(RANDOM, "--quick")[0] == 0
    assert events[:5] == ["load", "time", "load", "load", "time"]
    assert events.count("time") == ROWS_OF_QUICK


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_quantised_result_is_wrong_if_a_number_is_a_step_off_or_the_scales_are_too_large(dtype):
    (norm,) = (one for one in operators(24) if one.label == "rms_norm_quantized")
    host = norm.operands(row_operands(RANDOM, dtype))
    found = norm.calls(host, None)["forward"]()
    exact, bounds = next(norm.expected(host))

    def error(found):
        (result,) = norm.checked("forward", found, None)
        return worst_error(result, exact, bounds)

    assert error(found) <= 1
    codes = found.q.view(np.uint8).copy()
    codes[3, 5] += 1
    assert error(found._replace(q=codes.view(found.q.dtype))) > 1
    assert error(found._replace(scale=found.scale * np.float32(1.02))) > 1


N, D = 32, 48
ROWS, WIDTH, STAT = 2 * N * D, 4 * D, 4 * N  # bytes; arrays like x are float16, others float32
OF_GROUPS = 4 * 16 * 16  # bytes of a statistic of 16 samples with 16 groups
SAMPLES = 4 * 16 * D  # bytes of a parameter with a row for each sample
# Forward and backward, counted by hand: what is read, and what is written.
BYTES = {
    "rms_norm": (ROWS + WIDTH + ROWS, 2 * ROWS + WIDTH + STAT + ROWS + WIDTH),
    "layer_norm": (ROWS + 2 * WIDTH + ROWS, 2 * ROWS + WIDTH + 2 * STAT + ROWS + 2 * WIDTH),
    "l2_norm": (ROWS + ROWS, 2 * ROWS + STAT + ROWS),
    # forward: x and residual, y and the stream; backward: stream, dy and d_residual, dx
    "add_rms_norm": (4 * ROWS + WIDTH, 3 * ROWS + WIDTH + STAT + ROWS + WIDTH),
    # forward: x and gate, y; backward: x, gate and dy, dx and dgate
    "rms_norm, post-gate": (3 * ROWS + WIDTH, 3 * ROWS + WIDTH + STAT + 2 * ROWS + WIDTH),
    # the backward reads the bias, too, for the activation
    "group_norm, silu": (2 * (ROWS + WIDTH), 3 * ROWS + 2 * WIDTH + 2 * OF_GROUPS + 2 * WIDTH),
    "layer_norm, adaLN": (2 * (ROWS + SAMPLES), 3 * ROWS + 3 * SAMPLES + 2 * STAT),
    # forward: also the residual, the gate and the stream; backward: d_residual, the branch, the
    # gate, dresidual and dgate
    "add_layer_norm, adaLN-Zero": (4 * ROWS + 3 * SAMPLES, 6 * ROWS + 5 * SAMPLES + 2 * STAT),
    "group_norm, AdaGN": (2 * (ROWS + SAMPLES), 3 * ROWS + 4 * SAMPLES + 2 * OF_GROUPS),
}


@pytest.mark.parametrize("label", BYTES)
def test_a_row_has_the_time_of_a_call_and_the_bytes_of_its_operands_per_second(label, monkeypatch):
    (norm,) = (one for one in operators(D) if one.label == label)
    times, lines = iter([1e-6, 2e-3]), []
    monkeypatch.setattr(_demo_operators.Device, "seconds", lambda self, call: next(times))
    host = norm.operands(row_operands(np.random.default_rng(0).standard_normal((N, D)), np.float16))
    device = _demo_operators.chosen_device("cpu")
    out = SimpleNamespace(print=lambda text: lines.append(text.plain))
    rows = list(_demo._rows(norm, host, device))
    for row in rows:
        _demo._timed(row, device, out)
    assert [call.func.__name__ for _, call, _, _ in rows] == [norm.name, f"{norm.base}_backward"]
    assert f" 1.0 us {BYTES[label][0] / 1e3:6.1f} " in lines[0]
    assert f" 2.00 ms {BYTES[label][1] / 2e6:6.1f} " in lines[1]


def test_a_time_is_the_mean_of_calls_including_the_last_wait(monkeypatch):
    made, readings = [], iter([3.0, 10.5])
    clock = SimpleNamespace(perf_counter=lambda: made.append("clock") or next(readings))
    monkeypatch.setattr(_demo_operators, "time", clock)
    device = _demo_operators.Device("a title", np, wait=lambda: made.append("wait"), calls=2)
    assert device.seconds(lambda: made.append("call")) == (10.5 - 3.0) / 2
    assert made == ["wait", "clock", "call", "call", "wait", "clock"]


def test_speeds_are_bytes_over_medians_of_calls_that_each_follow_an_untimed_call(monkeypatch):
    monkeypatch.setattr(_demo_plot, "_ROUNDS", 3)
    monkeypatch.setattr(_demo_plot, "SIZES", (1 << 13,))
    times, made = {"cunorm": iter([9e-6, 1e-6, 3e-6]), "b": iter([2e-6, 7e-6, 8e-6])}, []
    calls = {who: partial(made.append, who) for who in times}
    seconds = lambda self, call: made.append("time") or next(times[call.args[0]])  # noqa: E731
    monkeypatch.setattr(_demo_operators.Device, "seconds", seconds)
    monkeypatch.setattr(_demo_plot, "calls", lambda *args: calls)
    monkeypatch.setattr(_demo_operators, "bytes_moved", lambda *args: 30_000)
    speeds = _demo_plot._speeds(operators(1024)[0], "forward", _demo_operators.chosen_device("cpu"))
    assert speeds == {"cunorm": pytest.approx([30.0 / 3]), "b": pytest.approx([30.0 / 7])}
    assert made == ["cunorm", *["cunorm", "time", "b", "time"] * 3]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("label", _demo_plot.NORMS)
def test_each_timed_provider_of_the_plot_computes_the_norm_anew(label, direction):
    (norm,) = (one for one in operators(1024) if one.label == label)
    rows, device = RANDOM[:4].astype(np.float32), _demo_operators.chosen_device("cpu")
    operands = norm.operands(row_operands(rows, np.float32))
    for name in {"x", "residual"} & operands.keys():
        operands[name] *= 1e-3  # so that eps matters
    operands["dy"][:], operands["weight"][3] = operands["x"][::-1], 3.0
    calls = _demo_plot.calls(norm, direction, operands, device)
    assert calls.keys() == {"cunorm", "NumPy", *["PyTorch"] * bool(find_spec("torch"))}
    names = ["y", "residual", "dx", *["dresidual"] * ("residual" in operands), "dweight", "dbias"]
    for changed in (1.0, 2.0):
        operands["weight" if direction == "forward" else "dy"][:] *= changed
        exact = norm.forward(reference, operands)()
        exact = exact if direction == "forward" else norm.backward(reference, operands, exact)()
        right = [one for name in names if (one := getattr(exact, name, None)) is not None]
        for call in calls.values():
            found = call()
            if hasattr(found, "_fields"):
                found = [one for name in names if (one := getattr(found, name, None)) is not None]
            found = found if isinstance(found, list | tuple) else [found]
            for array, exact_array in zip(found, right, strict=True):
                atol = 1e-5 * abs(exact_array).max()
                np.testing.assert_allclose(array, exact_array, rtol=0, atol=atol)


def test_a_plot_is_drawn_and_its_speeds_are_printed(demo, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "speed.png"
    output = demo(RANDOM, "--quick", "--plot", str(path))[1]
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert f"drawn to {path}\n" in output
    for name, direction in product(_demo_plot.NORMS, ("forward", "backward")):
        assert re.search(rf"\n{name} +{direction} +cunorm [\d.]+, NumPy [\d.]+", output)


@pytest.mark.gpu
def test_the_demo_is_within_the_bounds_on_cuda(demo):
    # The software GPU takes seconds for all norms, which tests of the operators run on it, too.
    options, count = (["--quick"], ROWS_OF_QUICK) if softgpu.is_loaded() else ([], ROWS_OF_ALL)
    status, output = demo(RANDOM[:6, :20], *options, device="cuda")
    assert status == 0
    assert "\ndevice: cuda, " in output
    assert len(table(output)) == count
