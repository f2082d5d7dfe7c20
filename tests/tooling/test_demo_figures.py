# SPDX-License-Identifier: MIT
"""The figures of `python -m cunorm demo`: what is called, for how long, and what it moves."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import cunorm
from tests.support.internals import (
    Device,
    _demo,
    _demo_device,
    _demo_inputs,
    _demo_plot,
    _warmup,
    operators,
)
from tests.support.processes import in_process

N, D, SAMPLES = 32, 48, 16
ITEM, STATISTIC = 2, 4  # bytes: x is float16, statistics and parameters are float32
ROWS, WIDTH, STAT = N * D * ITEM, D * STATISTIC, N * STATISTIC
OF_GROUP = SAMPLES * 16 * STATISTIC
# Forward and backward, counted by hand: what is read, and what is written.
BYTES = {
    "rms_norm": (ROWS + WIDTH + ROWS, 2 * ROWS + WIDTH + STAT + ROWS + WIDTH),
    "layer_norm": (ROWS + 2 * WIDTH + ROWS, 2 * ROWS + WIDTH + 2 * STAT + ROWS + 2 * WIDTH),
    "l2_norm": (ROWS + ROWS, 2 * ROWS + STAT + ROWS),
    # x and residual, y and the stream; stream, dy and d_residual, dx
    "add_rms_norm": (4 * ROWS + WIDTH, 3 * ROWS + WIDTH + STAT + ROWS + WIDTH),
    # x and gate, y; x, gate and dy, dx and dgate
    "rms_norm, post-gate": (3 * ROWS + WIDTH, 3 * ROWS + WIDTH + STAT + 2 * ROWS + WIDTH),
    # the backward reads the bias, too, for the activation
    "group_norm, silu": (
        2 * ROWS + 2 * WIDTH,
        2 * ROWS + 2 * WIDTH + 2 * OF_GROUP + ROWS + 2 * WIDTH,
    ),
}


@pytest.mark.parametrize("name", BYTES)
def test_the_bytes_of_a_call_are_those_of_its_operands_and_results(name):
    (operator,) = (one for one in operators(D) if str(one) == name)
    rows = np.random.default_rng(0).standard_normal((N, D))
    operands = operator.operands(_demo_inputs.row_operands(rows, np.float16))
    assert operator.moved_bytes(operands, operator.run(operands)) == BYTES[name]


def test_a_row_has_the_time_of_one_call_and_its_bytes_over_that_time(monkeypatch):
    (norm,) = (one for one in operators(D) if str(one) == "add_rms_norm")
    rows = np.random.default_rng(0).standard_normal((N, D))
    host = norm.operands(_demo_inputs.row_operands(rows, np.float16))
    times, names, lines = iter([1e-6, 2e-3]), [], []
    made = counted(monkeypatch, cunorm, _warmup.FUNCTIONS)

    def shortest(self, call):
        made.clear()
        call()
        names.append(dict(made))
        return next(times)

    monkeypatch.setattr(_demo_device.Device, "shortest_seconds", shortest)
    list(_demo._both_directions(norm, host, device(), SimpleNamespace(line=lines.append)))
    assert names == [{"add_rms_norm": 1}, {"rms_norm_backward": 1}]
    forward, backward = BYTES["add_rms_norm"]
    assert f" 1.0 us {forward / 1e3:6.1f} " in lines[0]
    assert f" 2.00 ms {backward / 2e6:6.1f} " in lines[1]


class Clock:
    """A clock that only calls advance, each by the next of its times; keeps the calls' names."""

    def __init__(self, monkeypatch):
        self.now, self.made = 100.0, []
        for module in (_demo_device, _demo_plot):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def call(self, name, times):
        left = iter(times)

        def made():
            self.made.append(name)
            self.now += next(left)

        return made


def device(calls=1, wait=lambda: None):
    place, same = Device("cpu", 0), np.asarray
    return _demo_device.Device("cpu", "a title", place, np, same, same, wait, calls)


def test_a_time_is_the_shortest_of_some_each_the_mean_of_calls_and_the_last_wait(monkeypatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(_demo_device, "REPEATS", 3)
    call = clock.call("call", [3.0, 4.0, 1.0, 2.0, 5.0, 6.0])
    wait = clock.call("wait", [50.0, 0.5] * 3)
    assert device(2, wait).shortest_seconds(call) == (1.0 + 2.0 + 0.5) / 2
    assert clock.made == ["wait", "call", "call", "wait"] * 3


def test_medians_are_of_calls_in_turn_that_each_follow_one_that_is_not_timed(monkeypatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(_demo_plot, "_SECONDS", 0.0)
    least = _demo_plot._LEAST
    assert least == 5

    def times(*timed):
        return [time for one in timed for time in (1000.0, one)]

    calls = {
        "a": clock.call("a", times(9.0, 1.0, 3.0, 2.0, 8.0)),
        "b": clock.call("b", times(1.0, 1.0, 7.0, 8.0, 9.0)),
    }
    assert _demo_plot._medians(calls, device()) == {"a": 3.0, "b": 7.0}
    assert clock.made == ["a", "a", "b", "b"] * least


def test_there_are_more_rounds_until_a_time_or_a_number_is_reached(monkeypatch):
    clock = Clock(monkeypatch)
    for seconds, rounds in ((6.5, 7), (1e9, _demo_plot._MOST)):
        monkeypatch.setattr(_demo_plot, "_SECONDS", seconds)
        clock.made.clear()
        _demo_plot._medians({"a": clock.call("a", [0.5] * 1000)}, device())
        assert len(clock.made) == 2 * rounds


def test_speeds_are_bytes_over_medians_at_each_size(monkeypatch):
    sizes = (1 << 13, 1 << 14)
    monkeypatch.setattr(_demo_plot, "SIZES", sizes)
    medians = iter([{"a": 1e-6, "b": 2e-6}, {"a": 3e-6, "b": 4e-6}] * 2)
    monkeypatch.setattr(_demo_plot, "_medians", lambda *args: next(medians))
    (rms_norm,) = (one for one in operators(1024) if str(one) == "rms_norm")
    speeds = _demo_plot._speeds(rms_norm, _demo_device.chosen_device("cpu"))
    weight = 4096
    forward = [2 * size + weight for size in sizes]
    backward = [3 * size + 2 * weight + size // 1024 for size in sizes]
    expected = {
        "forward": {"a": [m / 1e3 for m in forward], "b": [m / 2e3 for m in forward]},
        "backward": {"a": [m / 3e3 for m in backward], "b": [m / 4e3 for m in backward]},
    }
    for direction, of_direction in expected.items():
        assert speeds[direction].keys() == of_direction.keys()
        for who, speed in of_direction.items():
            assert speeds[direction][who] == pytest.approx(speed)


def test_each_panel_of_the_picture_has_its_speeds():
    pytest.importorskip("matplotlib")
    numbers = iter(range(1, 10_000))
    norms, directions, sizes = _demo_plot.NORMS, _demo_plot.DIRECTIONS, _demo_plot.SIZES
    speeds = {
        (norm, direction): {who: [float(next(numbers)) for _ in sizes] for who in ("cunorm", "b")}
        for norm in norms
        for direction in directions
    }
    figure = _demo_plot._picture(speeds, "the title", "the note")
    drawn = {
        tuple(panel.get_title().split(", ")): {
            line.get_label(): line.get_ydata().tolist() for line in panel.lines
        }
        for panel in figure.axes
    }
    assert drawn == speeds
    assert all(tuple(line.get_xdata()) == sizes for panel in figure.axes for line in panel.lines)
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["cunorm", "b"]
    assert figure.get_suptitle().startswith("the title: bytes ")
    assert figure.get_supxlabel() == "the note"


PLOTTED = [
    pytest.param(operator, direction, id=f"{operator}-{direction}")
    for operator in operators(1024)
    if str(operator) in _demo_plot.NORMS
    for direction in _demo_plot.DIRECTIONS
]


def counted(monkeypatch, module, names):
    """Count the calls of a module's functions."""
    made: Counter[str] = Counter()

    def counting(name, function):
        def call(*args, **more):
            made[name] += 1
            return function(*args, **more)

        return call

    for name in names:
        monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return made


@pytest.mark.parametrize(("operator", "direction"), PLOTTED)
def test_each_timed_call_makes_one_call_of_the_norm(operator, direction, monkeypatch):
    operands = _demo_plot._operands(operator, 4)
    calls = _demo_plot.calls(operator, direction, operands, _demo_device.chosen_device("cpu"))
    made = counted(monkeypatch, cunorm, _warmup.FUNCTIONS)
    calls["cunorm"]()
    name = operator.name if direction == "forward" else f"{operator.base}_backward"
    assert made == {name: 1}
    made.clear()
    calls["NumPy"]()
    assert not made


@pytest.mark.parametrize(("operator", "direction"), PLOTTED)
def test_each_timed_call_of_pytorch_makes_one_call_of_the_norm(operator, direction, monkeypatch):
    torch = pytest.importorskip("torch")
    operands = _demo_plot._operands(operator, 4)
    calls = _demo_plot.calls(operator, direction, operands, _demo_device.chosen_device("cpu"))
    norms = counted(monkeypatch, torch.nn.functional, ("rms_norm", "layer_norm"))
    grads = counted(monkeypatch, torch.autograd, ("grad",))
    calls["PyTorch"]()
    if direction == "forward":
        assert norms == {operator.base: 1}
        assert not grads
    else:
        assert grads == {"grad": 1}
        assert not norms


@pytest.mark.parametrize(("operator", "direction"), PLOTTED)
def test_each_timed_call_computes_anew(operator, direction):
    operands = _demo_plot._operands(operator, 4)
    calls = _demo_plot.calls(operator, direction, operands, _demo_device.chosen_device("cpu"))
    changed = "x" if direction == "forward" else "dy"

    def first(who):
        result = calls[who]()
        return np.asarray(result[0] if isinstance(result, tuple) else result)

    before = {who: first(who) for who in calls}
    operands[changed][:] = operands[changed][::-1].copy()
    for who, result in before.items():
        assert not np.allclose(result, first(who)), who


@pytest.mark.parametrize("total", [8, 9])
def test_batches_keep_the_order_and_compile_headers_for_many_builds(total, monkeypatch):
    """The first case is alone, the others come in batches of at least so many builds."""
    kernels = [f"kernel {number}" for number in range(total)]
    left, cases, events = iter(kernels), [], []
    for number, count in enumerate([2, 1, 0, 1, 1, 0, total - 5]):
        builds = [SimpleNamespace(kernel=next(left)) for _ in range(count)]
        cases.append(_demo.Case(SimpleNamespace(name=f"case {number}"), {}, builds))

    def compile_builds(self, builds, step, *, with_headers=False):
        events.append(([build.kernel for build in builds], with_headers))

    def timed(operator, *args):
        events.append(operator.name)
        return iter([0.25, 0.5])

    monkeypatch.setattr(_demo_device.Device, "compile", compile_builds)
    monkeypatch.setattr(_demo, "_both_directions", timed)
    monkeypatch.setattr(_demo, "available_cores", lambda: 1)
    errors = _demo._table(cases, device())
    assert errors == [0.25, 0.5] * len(cases)
    assert events == [
        (kernels[:2], False),
        "case 0",
        (kernels[2:5], total == 9),
        *("case 1", "case 2", "case 3", "case 4"),
        (kernels[5:], False),
        *("case 5", "case 6"),
    ]


FAULTS = """
import resource
from cunorm._demo.device import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.empty(5 << 20, np.float64).fill(1.0)  # 40 MiB, which glibc would map anew
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(keep_freed_memory())
faults()
print(faults())
"""


def test_freed_memory_is_kept_where_glibc_allocates_it():
    kept, faults = in_process(FAULTS).split()
    if kept == "False":
        pytest.skip("glibc does not allocate")
    assert int(faults) < 100, "ten arrays have 200 huge pages or 102,400 others"
