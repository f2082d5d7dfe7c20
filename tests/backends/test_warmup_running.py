# SPDX-License-Identifier: MIT
"""How `warmup` and its command run: parallel builds, a progress bar, clear errors."""

from __future__ import annotations

import re
import sys
import threading
import time
from inspect import signature

import numpy as np
import pytest

import cunorm
from tests.support.calls import raises
from tests.support.internals import _command, _compile, _info, _processes, _warmup, main

TRAINING = ("rms_norm_forward", "rms_norm_backward")  # three builds


def warm(ops=TRAINING, widths=64, dtypes="float32", **more):
    return cunorm.warmup(ops, widths, dtypes, **{"device": "cpu", "rows": 8} | more)


# --- builds at once -------------------------------------------------------------------------------


def while_loading(monkeypatch, action):
    """Run an action on each build before the build is loaded."""
    load = _compile._load
    monkeypatch.setattr(_compile, "_load", lambda build: (action(build), load(build))[1])


@pytest.mark.parametrize("workers", [1, 3, None])
def test_as_many_builds_as_workers_or_cores_are_compiled_at_once(loads, monkeypatch, workers):
    monkeypatch.setattr(_warmup, "available_cores", lambda: 3)
    together, running = threading.Barrier(workers or 3), threading.Semaphore(workers or 3)

    def load(build):
        assert running.acquire(blocking=False)
        together.wait(timeout=30)
        time.sleep(0.01)
        running.release()

    while_loading(monkeypatch, load)
    assert warm(workers=workers, progress=False).builds == 3


def test_a_build_that_fails_is_named_after_the_others_were_made(loads, monkeypatch):
    failed, error = [], OSError("no space left")

    def load(build):
        if build.kernel != "param_grad":
            failed.append(build)
            raise error

    while_loading(monkeypatch, load)
    with pytest.raises(RuntimeError) as caught:
        warm(workers=1, progress=False)
    assert [build.kernel for build in loads] == ["param_grad"]
    first = f"warmup: 2 of 3 builds failed, the first of them: {failed[0]}: {error}"
    assert str(caught.value) == first
    assert caught.value.__cause__ is error


def test_an_interrupt_does_not_wait_for_builds_that_have_not_begun(loads, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    while_loading(monkeypatch, lambda build: time.sleep(0.05))
    monkeypatch.setattr(_processes, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        warm(workers=1, progress=False)
    time.sleep(0.3)  # enough for a worker to make the other builds
    assert len(loads) <= 1


def test_without_needed_gradients_nothing_is_compiled(loads):
    assert warm("rms_norm_backward", needs=("gate",), progress=False)[:2] == (0, 0)
    assert loads == []


# --- the bar --------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", ["", "progress", "tqdm"])
def test_a_bar_counts_the_builds_unless_disabled_or_without_tqdm(
    loads, monkeypatch, capsys, without
):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    if without == "tqdm":
        for name in ("tqdm", "tqdm.auto"):
            monkeypatch.setitem(sys.modules, name, None)
    before = threading.active_count()
    assert warm(progress=without != "progress").builds == 3
    printed = capsys.readouterr().err
    assert printed == "" if without else "3/3" in printed
    assert threading.active_count() == before


# --- errors ---------------------------------------------------------------------------------------

GROUP = {"ops": "group_norm", "num_groups": 4, "positions": 9}
GATE, BRANCH = {"gate": True}, {"gate": True, "gate_position": "branch"}
FLOATS = "expected float16, bfloat16, float32 or float64"


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"ops": "rms"}, ValueError, "ops is 'rms', expected 'add_layer_norm', "),
        ({"widths": [64, 0]}, ValueError, "widths is 0, expected at least 1"),
        ({"dtypes": np.array("float32")}, TypeError, "dtypes is array('float32', dtype='<U7'), "),
        ({"rows": -1}, ValueError, "rows is -1, expected at least 1"),
        ({"dtypes": "float8"}, TypeError, f"dtypes is 'float8', {FLOATS}"),
        ({"d_residual": "half"}, TypeError, f"d_residual is 'half', {FLOATS}, or True, False or N"),
        ({"groups": 3}, ValueError, "groups is 3, expected a divisor of 64"),
        ({"center": True}, ValueError, "center is True, which none of ['rms_norm_forward', "),
        ({"ops": "l2_norm", "bias": True}, ValueError, "bias is True, which l2_norm does not "),
        ({"gate_position": "pre"}, ValueError, "gate_position is 'pre', expected 'post' as gate"),
        ({"weight_per": "head"}, ValueError, "weight_per is 'head', expected 'all', 'sample' or '"),
        ({"weight_per": 1}, TypeError, "weight_per is 1, expected 'all', 'sample' or 'row'"),
        ({"bias_per": "row"}, ValueError, "bias_per is 'row', expected 'all' as bias is absent"),
        ({"gate_per": "all"}, ValueError, "gate_per is 'all', expected 'row' as gate is absent"),
        (GATE | {"gate_per": "all"}, ValueError, "gate_per is 'all', expected 'row' as the gate "),
        (BRANCH | {"gate_per": "scalar"}, ValueError, "gate_per is 'scalar', expected 'all', 'sa"),
        (BRANCH | {"ops": "rms_norm"}, ValueError, "gate_position is 'branch', which rms_norm do"),
        ({"ops": "l2_norm", "weight_per": "row"}, ValueError, "weight_per is 'row', which l2_nor"),
        (GROUP | {"weight_per": "row"}, ValueError, "weight_per is 'row', expected 'all' or 'sam"),
        (GROUP | {"gate_per": "all"}, ValueError, "gate_per is 'all', which group_norm does not "),
        ({"positions": 9}, ValueError, "positions is 9, which none of ['rms_norm_forward', "),
        ({"ops": "instance_norm"}, TypeError, "positions is None, expected an int"),
        (GROUP | {"num_groups": 3}, ValueError, "num_groups is 3, expected a divisor of 64, the"),
        (GROUP | {"activation": "mish"}, ValueError, "activation is 'mish', expected 'identity'"),
        (GROUP | {"layout": "nchw"}, ValueError, "layout is 'nchw', expected 'channels_last' or"),
        ({"needs": np.float32(1)}, TypeError, f"needs is {np.float32(1)!r}, expected a tuple of"),
        ({"ops": "l2_norm", "needs": (np.ones(2),)}, ValueError, "needs is (array([1., 1.]),), wh"),
        ({"workers": 0}, ValueError, "workers is 0, expected at least 1"),
        ({"progress": None}, TypeError, "progress is None, expected True or False"),
        ({"device": "gpu"}, ValueError, "device is 'gpu', expected "),
    ],
)
def test_wrong_input_is_named_before_anything_is_compiled(loads, wrong, error, text):
    with pytest.raises(error) as caught:
        warm(**wrong)
    assert str(caught.value).startswith(f"warmup: {text}")
    assert loads == []


def test_an_option_counts_for_the_functions_that_have_it(loads):
    assert warm(("rms_norm", "layer_norm", "l2_norm"), bias=True, progress=False).builds == 3


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(_warmup, "compiler", lambda: None)
    remedy = "install g++ or clang++, or point CXX at one"
    with raises(RuntimeError, "warmup: no C++ compiler is found: ", remedy):
        warm()


@pytest.mark.gpu
def test_without_a_device_the_error_is_the_drivers():
    with pytest.raises(RuntimeError, match=r"(?i)^warmup: device is 'cuda:99': .*invalid"):
        warm(device="cuda:99")


# --- the command ----------------------------------------------------------------------------------


def test_the_command_passes_on_its_options(monkeypatch, capsys):
    given = {}

    def warmed(*args, **more):
        given.update(signature(cunorm.warmup).bind(*args, **more).arguments)
        return _warmup.Warmup(7, 5, 1.25)

    monkeypatch.setattr(_command, "warmup", warmed)
    command = "--op rms_norm group_norm --width 64 128 --dtype bfloat16 --device cpu --y-dtype "
    command += "float64 --weight float32 no auto yes --weight-offset 1 --groups 2 4 --needs x "
    assert main(["warmup", *command.split(), "--workers", "3", "--center", "--quiet"]) == 0
    right = {"ops": ["rms_norm", "group_norm"], "widths": [64, 128], "dtypes": ["bfloat16"]}
    right |= {"device": "cpu", "weight": ["float32", False, "auto", True], "dtype": ["float64"]}
    right |= {"weight_offset": [1.0], "groups": [2, 4], "needs": ["x"], "workers": 3}
    assert given.items() >= (right | {"center": True, "progress": False}).items()
    output = capsys.readouterr().out
    assert output.startswith("cpu: 7 builds, 5 of them compiled now, in 1.2 s, kept in ")


def test_every_argument_is_an_option_of_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["warmup", "--help"])
    options = set(re.findall(r"--([a-z-]+)", capsys.readouterr().out))
    named = {"ops": "op", "widths": "width", "dtypes": "dtype", "dtype": "y-dtype"}
    named["progress"] = "quiet"
    for name in signature(cunorm.warmup).parameters:
        assert named.get(name, name.replace("_", "-")) in options


def test_the_command_warms_up_the_cpu_and_says_what_is_wrong(loads, monkeypatch, capsys):
    monkeypatch.setattr(_info, "cuda_devices", lambda: (0, "none"))
    command = ["warmup", "--op", "rms_norm_backward", "--width", "64", "--dtype", "float32"]
    assert main([*command, "--rows", "8", "--quiet"]) == 0
    assert {build.kernel for build in loads} == {"row_norm_backward", "param_grad"}
    assert capsys.readouterr().out.startswith("cpu: 2 builds, 0 of them compiled now, in 0.0 s")
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--device", "gpu"])
    assert stopped.value.code == 2
    assert "error: warmup: device is 'gpu', expected" in capsys.readouterr().err
    monkeypatch.setattr(_warmup, "compiler", lambda: None)
    assert main([*command, "--device", "cpu"]) == 1
    assert capsys.readouterr().err.startswith("warmup: no C++ compiler is found")
