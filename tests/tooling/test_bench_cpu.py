# SPDX-License-Identifier: MIT
"""`python -m bench` runs, checks before it times, and names wrong options."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import cunorm

pytest.importorskip("torch", reason="the bench compares with PyTorch")
import torch

from bench.__main__ import main
from bench.report.records import read_csv
from bench.timing import cases, cpu, grid, operands
from bench.timing import command as timing
from bench.timing.cases import OPERATORS, QUANTIZED
from bench.timing.rows import Row

ROOT = Path(__file__).parents[2]


def bench(code, *arguments, **environment):
    command = [sys.executable, "-c", code, *arguments]
    env = {**os.environ, **environment}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_bench_writes_every_point_and_provider(tmp_path, monkeypatch, capsys):
    """Settings of the process stay as they are, for later tests."""
    monkeypatch.setattr(cpu, "_keep_freed_memory", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(cunorm, "set_num_threads", lambda count: None)
    out = tmp_path / "table.csv"
    options = ("--seconds", "0.01", "--threads", "1", "--shapes", "70x96,2x70x96,1x64x32x30")
    names = "rms_norm+post_gate,group_norm+silu,layer_norm+modulated,rms_norm+fp8"
    operators = ("--op", names, "--dtype", "float32")
    assert main([*options, *operators, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = read_csv(out, Row)
    points = {row.point: [] for row in rows}
    for row in rows:
        points[row.point].append(row.provider)
    named = ["copy", "cunorm", "torch"]
    assert points == {
        (name, memory, direction, "float32", shape): named + more
        for name, memory, shape, more in (
            ("rms_norm+post_gate", "", "70x96", ["cunorm-ungated"]),
            ("layer_norm+modulated", "", "2x70x96", []),
            ("group_norm+silu", "NHWC", "1x64x32x30", []),
            ("group_norm+silu", "NCHW", "1x64x32x30", []),
        )
        for direction in ("forward", "backward")
    } | {("rms_norm+fp8", "", "forward", "float32", "70x96"): named}
    assert all(row.p50_us > 0 for row in rows)
    small = ("70x96", "2x70x96")
    assert all(row.host_us == row.p50_us for row in rows if row.shape in small)  # no GPU
    assert all((row.error is None) == (row.provider == "copy") for row in rows)
    assert {(row.threads, row.driver) for row in rows} == {(1, "")}
    assert all("1 of " in row.device and "torch" in row.versions for row in rows)
    assert re.search(r"\nrms_norm\+post_gate forward float32 +× copy .*× torch ", printed)


WRONG = {
    **{"--op group": "--op: 'group'", "--shapes 64x64 --op group_norm": "--op group_norm"},
    **{"--shapes 4x-3": "'4x-3'", "--threads 0": "'0'", "--seconds nan": "'nan'"},
    **{"--providers liger": "liger is not for --device cpu", "--out /not/there.csv": "/not\n"},
    **{"--device cuda --march x86-64-v3": "--march is for a CPU"},
    **{"--direction backward --op rms_norm+fp8": "--direction is backward"},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bench_names_wrong_options(wrong, capsys):
    with pytest.raises(SystemExit):
        timing.parse(wrong.split())
    assert WRONG[wrong] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_a_provider_that_leaves_out_a_term_of_the_formula_is_wrong_by_more_than_the_tolerance(name):
    operator = next(one for one in OPERATORS if one.name == name)
    drawn = operands.host_operands(operator, "bfloat16", (2, 1 << 15))
    y = cases.oracle(operator, "forward", drawn)["y"]
    dx = cases.oracle(operator, "backward", drawn)["dx"]
    x, dy, weight = (drawn[key].astype(np.float64) for key in ("x", "dy", "weight"))
    bias = drawn["bias"].astype(np.float64) if operator.center else 0.0
    of_squares = np.sqrt((x * x).mean(-1, keepdims=True))
    divisor = x.std(-1, keepdims=True) if operator.center else of_squares
    wrong = [({"y": x * weight + bias}, {"y": y}), ({"dx": dy * weight / divisor}, {"dx": dx})]
    if operator.center:
        wrong.append(({"y": x / of_squares * weight + bias}, {"y": y}))
    for result, right in wrong:
        assert cases.worst_error(result, right) > cases.TOLERANCE["bfloat16"]
    assert cases.worst_error({"y": np.full_like(y, np.nan)}, {"y": y}) == np.inf


def test_a_q_of_another_norm_or_with_another_scale_is_wrong_by_more_than_the_tolerance():
    operator = QUANTIZED[0]
    drawn = operands.host_operands(operator, "bfloat16", (2, 512))
    expected = cases.oracle(operator, "forward", drawn)
    unweighted = cunorm.reference.rms_norm(drawn["x"], eps=operator.eps)
    q, scale = cunorm.reference.quantize(expected["y"].astype(np.float32))
    results = [(q, scale), (q, scale * 1.1), cunorm.reference.quantize(unweighted)]
    named = (dict(zip(("q", "scale"), some, strict=True)) for some in results)
    errors = [cases.worst_error(cases.dequantized(operator, one), expected) for one in named]
    assert [error <= operator.tolerance("bfloat16") for error in errors] == [True, False, False]


def test_norms_with_a_quantised_result_have_only_forwards_and_those_with_blocks_no_odd_widths():
    names, even, odd = [operator.name for operator in QUANTIZED], (8, 96), (8, 99)
    found = {
        (one.operator.name, one.direction, one.shape) for one in grid.points([even, odd], names)
    }
    every = {(name, "forward", shape) for name, shape in product(names, (even, odd))}
    assert found == every - {("rms_norm+fp8_blocks", "forward", odd)}


@pytest.mark.exhaustive
def test_without_avx512_no_provider_uses_it(tmp_path):
    out = tmp_path / "rows.csv"
    point = ("--op", "rms_norm", "--dtype", "float32", "--direction", "forward", "--shapes", "8x64")
    limits = ("--march", "x86-64-v2", "--threads", "1", "--seconds", "0.01", "--out", out)
    code = """
import os, sys
from bench.timing import command as timing
status = timing.main(sys.argv[1:])
from torch._inductor import config, cpu_vec_isa
print(config.cpp.march, cpu_vec_isa.pick_vec_isa().bit_width() <= 256, os.environ["XLA_FLAGS"])
sys.exit(status)
"""
    flags = {"CUNORM_CXXFLAGS": "-O1", "XLA_FLAGS": "--xla_dump_to=x"}
    printed = bench(code, *point, *limits, **flags)
    assert printed.endswith("x86-64-v2 True --xla_dump_to=x --xla_cpu_max_isa=AVX2\n")
    for row in read_csv(out, Row):
        assert "; SIMD cunorm less than AVX2, torch " in row.versions
        assert "AVX-512" not in row.versions
