# SPDX-License-Identifier: MIT
"""`python -m cunorm demo --plot`."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from cunorm import reference
from tests.support.described import with_empty_caches
from tests.support.internals import (
    _compile,
    _demo,
    _demo_device,
    _demo_inputs,
    _demo_plot,
    main,
    operators,
)

CASES = [
    pytest.param(operator, direction, id=f"{operator}-{direction}")
    for operator in operators(1024)
    if str(operator) in _demo_plot.NORMS
    for direction in _demo_plot.DIRECTIONS
]


def timed(operator, direction):
    """Return operands of an operator, for which eps matters, and the calls that are timed."""
    operands = _demo_plot._operands(operator, 4)
    for name in {"x", "residual"} & set(operands):
        operands[name] *= 1e-3
    operands["dy"][:], operands["weight"][3] = operands["x"][::-1], 3.0
    device = _demo_device.chosen_device("cpu")
    return operands, _demo_plot.calls(operator, direction, operands, device)


def assert_near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize(("operator", "direction"), CASES)
@pytest.mark.parametrize("who", ["cunorm", "NumPy"])
def test_what_is_timed_is_the_norm(operator, direction, who):
    operands, calls = timed(operator, direction)
    exact = operator.forward(reference, operands)
    if direction == "backward":
        exact = operator.backward(reference, operands, exact)
    found = calls[who]()
    found = {"y": found} if isinstance(found, np.ndarray) else found._asdict()
    found = {name: array for name, array in found.items() if array is not None}
    assert {"y", "dx"} & set(found)
    for name, array in found.items():
        assert_near(array, getattr(exact, name))


@pytest.mark.parametrize(("operator", "direction"), CASES)
def test_pytorch_computes_the_same(operator, direction):
    pytest.importorskip("torch")
    operands, calls = timed(operator, direction)
    plain, found = calls["NumPy"](), calls["PyTorch"]()
    if direction == "backward":  # one gradient for each operand
        expected = (*[plain.dx] * (1 + ("residual" in operands)), plain.dweight, plain.dbias)
    else:
        expected = plain
    expected = [array for array in expected if array is not None]
    for tensor, array in zip(found, expected, strict=True):
        assert_near(tensor, array)


@pytest.fixture
def short(monkeypatch):
    """Limit the plot to two sizes, each timed once, and the table to its first row."""
    monkeypatch.setattr(_demo_plot, "SIZES", (1 << 15, 1 << 16))
    for name, value in (("_PRINTED", 1), ("_LEAST", 1), ("_MOST", 1), ("_SECONDS", 0.0)):
        monkeypatch.setattr(_demo_plot, name, value)
    monkeypatch.setattr(_demo_plot, "keep_freed_memory", lambda: True)  # not in this process
    monkeypatch.setattr(_demo_inputs, "LARGEST", {"float32": 1e10})
    monkeypatch.setattr(_demo_device, "REPEATS", 1)
    monkeypatch.setattr(_demo, "shown", lambda dtype, width, is_quick: operators(width)[:1])


def test_without_pytorch_it_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert set(timed(operators(1024)[0], "forward")[1]) == {"cunorm", "NumPy"}


def test_a_plot_is_drawn_and_its_figures_are_printed(short, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed.png"
    assert main(["demo", "--device", "cpu", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    output = capsys.readouterr().out
    for norm in _demo_plot.NORMS:
        for direction in _demo_plot.DIRECTIONS:
            figures = rf"^{norm} +{direction} +cunorm [\d.]+, NumPy [\d.]+"
            figures += r", PyTorch [\d.]+$" if find_spec("torch") else "$"
            assert len(re.findall(figures, output, re.MULTILINE)) == 1
    assert f"drawn to {path}\n" in output
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_kept", [True, False])
def test_freed_memory_is_kept_before_anything_is_timed_and_nothing_compiles_then(
    is_kept, short, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("matplotlib")
    with_empty_caches(monkeypatch)
    load, speeds, events = _compile._load, _demo_plot._speeds, []
    monkeypatch.setattr(_compile, "_load", lambda build: events.append("load") or load(build))
    monkeypatch.setattr(_demo_plot, "_speeds", lambda *a: events.append("time") or speeds(*a))
    monkeypatch.setattr(_demo_plot, "keep_freed_memory", lambda: events.append("keep") or is_kept)
    _demo_plot.draw(tmp_path / "speed.png", _demo_device.chosen_device("cpu"))
    loads = events.count("load")
    assert loads > len(_demo_plot.NORMS)
    assert sorted(events[: loads + 1]) == ["keep", *["load"] * loads]
    assert events[loads + 1 :] == ["time"] * len(_demo_plot.NORMS)
    note = "calls allocate their results" + is_kept * ", and freed memory is kept"
    assert f";\n{note}:\n" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["no matplotlib", "no folder", "a folder", "no kind", "read only"])
def test_a_plot_that_cannot_be_drawn_is_an_error_before_any_work(
    short, what, tmp_path, monkeypatch, capsys
):
    if what == "no matplotlib":
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    else:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(_demo, "chosen_device", lambda name: pytest.fail("this is work"))
    path, text = {
        "no matplotlib": (tmp_path / "a.png", "--plot needs matplotlib: pip install matplotlib"),
        "no folder": (tmp_path / "none" / "a.png", "cannot write to "),
        "a folder": (tmp_path / "folder.png", "is no file that can be written to"),
        "no kind": (tmp_path / "a.jpgg", "expected a name that ends in ."),
        "read only": (tmp_path / "a.png", "is no file that can be written to"),
    }[what]
    if what == "a folder":
        path.mkdir()
    if what == "read only":
        path.touch()
        monkeypatch.setattr(_demo_plot.os, "access", lambda *args: False)  # root may write to all
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--device", "cpu", "--plot", str(path)])
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert text in " ".join(output.err.split())
