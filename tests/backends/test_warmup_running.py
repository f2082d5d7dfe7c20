# SPDX-License-Identifier: MIT
"""How `warmup` goes about it: several builds at once, a bar, clear errors; and its command."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

import cunorm
from cunorm import _cpu, _cuda, _info, _warmup
from cunorm.__main__ import main
from cunorm._builds import Build
from cunorm._cpu import _compile
from tests.backends.test_cuda_backend import FakeCupy
from tests.support import described
from tests.support.calls import raises

TRAINING = ("rms_norm_forward", "rms_norm_backward")  # three builds


@pytest.fixture
def loads(monkeypatch) -> list[Build]:
    return described.loads(monkeypatch)


def warm(ops=TRAINING, widths=64, dtypes="float32", **more):
    return cunorm.warmup(ops, widths, dtypes, **{"device": "cpu", "rows": 8} | more)


# --- builds at once -------------------------------------------------------------------------------


def while_loading(monkeypatch, action):
    """Do something with each build, before it counts as loaded."""
    load = _compile._load
    monkeypatch.setattr(_compile, "_load", lambda build: (action(build), load(build))[1])


def test_as_many_builds_as_workers_are_compiled_at_once(loads, monkeypatch):
    together = threading.Barrier(3)
    while_loading(monkeypatch, lambda build: together.wait(timeout=30))
    assert warm(workers=3, progress=False).builds == 3


def test_one_worker_compiles_one_after_the_other(loads, monkeypatch):
    alone = threading.Lock()

    def load(build):
        assert alone.acquire(blocking=False)
        time.sleep(0.01)
        alone.release()

    while_loading(monkeypatch, load)
    assert warm(workers=1, progress=False).builds == 3


def test_there_are_as_many_workers_as_cores(loads, monkeypatch):
    asked = []
    pool = _warmup.ThreadPoolExecutor
    monkeypatch.setattr(_warmup, "ThreadPoolExecutor", lambda n: (asked.append(n), pool(n))[1])
    monkeypatch.setattr(_cpu, "available_cores", lambda: 5)
    warm(progress=False)
    assert asked == [5]


@pytest.mark.parametrize("error", [RuntimeError("no"), OSError("no space left")])
def test_a_build_that_fails_is_named_after_the_others_were_made(loads, monkeypatch, error):
    failed = []

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


def test_who_interrupts_does_not_wait_for_what_has_not_begun(loads, monkeypatch):
    def interrupt(tasks):
        raise KeyboardInterrupt

    while_loading(monkeypatch, lambda build: time.sleep(0.05))
    monkeypatch.setattr(_warmup, "as_completed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        warm(workers=1, progress=False)
    assert len(loads) <= 1


def test_where_no_gradient_is_wanted_nothing_is_compiled(loads):
    assert warm("rms_norm_backward", needs=("gate",), progress=False)[:2] == (0, 0)
    assert loads == []


# --- the bar --------------------------------------------------------------------------------------


def test_a_bar_counts_the_builds_and_leaves_no_thread(loads, capsys):
    pytest.importorskip("tqdm")
    before = threading.active_count()
    warm()
    assert "3/3" in capsys.readouterr().err
    assert threading.active_count() == before


@pytest.mark.parametrize("without", ["progress", "tqdm"])
def test_without_progress_or_tqdm_nothing_is_shown(loads, monkeypatch, capsys, without):
    if without == "tqdm":
        for name in ("tqdm", "tqdm.auto"):
            monkeypatch.setitem(sys.modules, name, None)
    assert warm(progress=without != "progress").builds == 3
    assert capsys.readouterr() == ("", "")


# --- errors ---------------------------------------------------------------------------------------

GROUP = {"ops": "group_norm", "num_groups": 4, "positions": 9}
FLOATS = "expected float16, bfloat16, float32 or float64"


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"ops": "rms"}, ValueError, "ops is 'rms', expected 'add_layer_norm', "),
        ({"ops": "workspace_size"}, ValueError, "ops is 'workspace_size', expected "),
        ({"ops": cunorm.rms_norm}, TypeError, "ops is <function rms_norm"),
        ({"ops": []}, ValueError, "ops is [], expected at least one"),
        ({"widths": ()}, ValueError, "widths is (), expected at least one"),
        ({"widths": [64, 0]}, ValueError, "widths is 0, expected at least 1"),
        ({"widths": 64.0}, TypeError, "widths is 64.0, expected an int"),
        ({"widths": np.array([8, 16])}, TypeError, "widths is array([ 8, 16]), expected an int"),
        ({"widths": np.array([8])}, TypeError, "widths is array([8]), expected an int"),
        ({"rows": np.array(8)}, TypeError, "rows is array(8), expected an int"),
        ({"ops": np.array(["rms_norm"])}, TypeError, "ops is array(['rms_norm'], dtype='<U8'), ex"),
        ({"dtypes": np.array("float32")}, TypeError, "dtypes is array('float32', dtype='<U7'), "),
        ({"widths": 2**31}, ValueError, "x of shape (8, 2147483648) has rows of 2147483648"),
        ({"rows": -1}, ValueError, "rows is -1, expected at least 1"),
        ({"dtypes": "float8"}, TypeError, f"dtypes is 'float8', {FLOATS}"),
        ({"weight": "int8"}, TypeError, f"weight is 'int8', {FLOATS}, or True, False or None"),
        ({"weight": np.ones(3)}, TypeError, f"weight is array([1., 1., 1.]), {FLOATS}, or True, "),
        ({"weight": 1}, TypeError, f"weight is 1, {FLOATS}, or True, False or None"),
        ({"residual": 32}, TypeError, "residual is "),
        ({"d_residual": "half"}, TypeError, f"d_residual is 'half', {FLOATS}, or True, False or N"),
        ({"d_residual": np.ones(2)}, TypeError, f"d_residual is array([1., 1.]), {FLOATS}, or "),
        ({"dtype": float}, TypeError, "dtype is "),
        ({"groups": 3}, ValueError, "groups is 3, expected a divisor of 64"),
        ({"center": True}, ValueError, "center is True, which none of ['rms_norm_forward', "),
        ({"ops": "rms_norm", "bias": True}, ValueError, "bias is True, which rms_norm does not"),
        ({"ops": "l2_norm", "weight": np.dtype("f8")}, ValueError, "weight is dtype('float64'), "),
        ({"ops": "l2_norm", "needs": ("x",)}, ValueError, "needs is ('x',), which l2_norm does"),
        ({"ops": "l2_norm", "weight": np.ones(2)}, ValueError, "weight is array([1., 1.]), which"),
        ({"ops": "l2_norm", "needs": np.ones(4)}, ValueError, "needs is array([1., 1., 1., 1.]),"),
        ({"center": np.ones(2)}, ValueError, "center is array([1., 1.]), which none of ['rms_nor"),
        ({"ops": "rms_norm", "residual": [False, "float32"]}, ValueError, "residual is 'float32'"),
        ({"weight": False, "weight_offset": 1.0}, ValueError, "weight_offset is 1.0, expected 0"),
        ({"gate_activation": "mish"}, ValueError, "gate_activation is 'mish', expected 'ident"),
        ({"round_before_weight": 1}, TypeError, "round_before_weight is 1, expected True or F"),
        ({"needs": ("x", "y")}, ValueError, "needs is ('x', 'y'), expected a tuple of 'x', "),
        ({"accumulate": "no"}, TypeError, "accumulate is 'no', expected True or False"),
        ({"positions": 9}, ValueError, "positions is 9, which none of ['rms_norm_forward', "),
        ({"layout": "channels_first"}, ValueError, "layout is 'channels_first', which none of ["),
        ({"activation": "silu"}, ValueError, "activation is 'silu', which none of ['rms_norm_fo"),
        ({"ops": "instance_norm"}, TypeError, "positions is None, expected an int"),
        (GROUP | {"num_groups": None}, TypeError, "num_groups is None, expected an int"),
        (GROUP | {"num_groups": 3}, ValueError, "num_groups is 3, expected a divisor of 64, the"),
        (GROUP | {"num_groups": [4, 0]}, ValueError, "num_groups is 0, expected a divisor of 64"),
        (GROUP | {"positions": (9, 0)}, ValueError, "positions is 0, expected at least 1"),
        (GROUP | {"layout": "NHWC"}, ValueError, "layout is 'NHWC', expected 'channels_last' or"),
        (GROUP | {"activation": "mish"}, ValueError, "activation is 'mish', expected 'identity'"),
        (GROUP | {"groups": 4}, ValueError, "groups is 4, which group_norm does not take"),
        (GROUP | {"residual": True}, ValueError, "residual is True, which group_norm does not t"),
        (GROUP | {"ops": "instance_norm"}, ValueError, "num_groups is 4, which instance_norm do"),
        ({"workers": 0}, ValueError, "workers is 0, expected at least 1"),
        ({"progress": None}, TypeError, "progress is None, expected True or False"),
        ({"device": "gpu"}, ValueError, "device is 'gpu', expected "),
        ({"device": "cuda:x"}, ValueError, "device is 'cuda:x', expected"),
        ({"device": None}, ValueError, "device is None, expected"),
    ],
)
def test_wrong_input_is_named_before_anything_is_compiled(loads, wrong, error, text):
    with pytest.raises(error) as caught:
        warm(**wrong)
    assert str(caught.value).startswith(f"warmup: {text}")
    assert loads == []


@pytest.mark.parametrize(
    "several",
    [[64, 128], {64, 128}, frozenset((64, 128)), range(64, 129, 64), {64: 0, 128: 0}.keys()],
    ids=lambda several: type(several).__name__,
)
def test_several_widths_are_those_of_any_of_these(loads, several):
    two = warm("rms_norm", several, groups={1: 8, 2: 16}.values(), progress=False)
    assert two.builds == warm("rms_norm", [64, 128], groups=(8, 16), progress=False).builds


def test_an_option_counts_for_the_functions_that_have_it(loads):
    assert warm(("rms_norm", "layer_norm", "l2_norm"), bias=True, progress=False).builds == 3


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(_cpu, "compiler", lambda: None)
    remedy = "install g++ or clang++, or point CXX at one"
    with raises(RuntimeError, "warmup: no C++ compiler is found: ", remedy):
        warm()


def test_without_a_device_the_error_is_the_drivers(monkeypatch):
    def none():
        raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    fake = FakeCupy()
    fake.cuda.runtime.getDevice = none
    _cuda._cupy.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    with pytest.raises(RuntimeError, match=r"^warmup: device is 'cuda': cudaErrorNoDevice: no "):
        warm(device="cuda")
    _cuda._cupy.cache_clear()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_has_every_argument_as_an_option(monkeypatch, capsys):
    given = []
    done = cunorm._warmup.Warmup(7, 5, 1.25)
    monkeypatch.setattr(
        cunorm._warmup_command,
        "warmup",
        lambda *args, **more: (given.append((args, more)), done)[1],
    )
    text = (
        "warmup --op rms_norm_forward rms_norm_backward --width 64 128 --dtype bfloat16 --device "
        "cpu --rows 8 --weight float32 no --bias --residual auto --gate yes --d-residual no "
        "--quiet --y-dtype float32 --residual-dtype float64 --center --groups 2 4 "
        "--weight-offset 1 --round-before-weight --gate-activation tanh --gate-position pre "
        "--num-groups 8 32 --positions 64 --layout channels_last channels_first --activation relu "
        "--needs x --accumulate --workers 3"
    )
    assert main(text.split()) == 0
    assert given == [
        (
            (["rms_norm_forward", "rms_norm_backward"], [64, 128], ["bfloat16"]),
            {
                "device": "cpu",
                "rows": [8],
                "weight": ["float32", False],
                "bias": True,
                "residual": ["auto"],
                "gate": [True],
                "d_residual": [False],
                "dtype": ["float32"],
                "residual_dtype": ["float64"],
                "center": True,
                "groups": [2, 4],
                "weight_offset": [1.0],
                "round_before_weight": True,
                "gate_activation": ["tanh"],
                "gate_position": ["pre"],
                "num_groups": [8, 32],
                "positions": [64],
                "layout": ["channels_last", "channels_first"],
                "activation": ["relu"],
                "needs": ["x"],
                "accumulate": True,
                "workers": 3,
                "progress": False,
            },
        )
    ]
    said = capsys.readouterr().out
    assert said.startswith("cpu: 7 builds, 5 of them compiled now, in 1.2 s, kept in ")


def test_the_command_does_it_on_the_cpu_where_there_is_no_gpu(loads, monkeypatch, capsys):
    monkeypatch.setattr(_info, "cuda_devices", lambda: (0, "none"))
    command = "warmup --op rms_norm_backward --width 64 --dtype float32 --rows 8 --quiet"
    assert main(command.split()) == 0
    assert {build.kernel for build in loads} == {"row_norm_backward", "param_grad"}
    assert capsys.readouterr().out.startswith("cpu: 2 builds, 0 of them compiled now, in 0.0 s")


def test_the_command_says_what_is_wrong(loads, monkeypatch, capsys):
    command = ["warmup", "--op", "rms_norm", "--width", "64", "--dtype", "float32", "--device"]
    with pytest.raises(SystemExit) as stopped:
        main([*command, "gpu"])
    assert stopped.value.code == 2
    assert "error: warmup: device is 'gpu', expected" in capsys.readouterr().err
    monkeypatch.setattr(_cpu, "compiler", lambda: None)
    assert main([*command, "cpu"]) == 1
    assert capsys.readouterr().err.startswith("warmup: no C++ compiler is found")
