# SPDX-License-Identifier: MIT
"""`python -m bench static`: the table matches the compiled GPU plans, and the gate finds faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.plans.plan import ONE_ROW, Plan
from bench.plans.planned import grid
from bench.plans.ptx import accesses
from tests.support.internals import KernelBuild

pytest.importorskip("cupy", reason="CuPy is not installed")
from bench.plans.command import differences, main, report
from bench.plans.model import GPUS
from bench.plans.rows import Row, measure
from bench.plans.sass import disassembler
from bench.report.records import read_csv, write_csv

TABLE = Path(__file__).parents[2] / "bench" / "results" / "static.csv"
if disassembler() is None:
    pytest.skip("nvdisasm is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return grid(("90",))


def plan_of(plans: list[Plan], *columns: str) -> Plan:
    return next(
        plan for plan in plans if {*columns} <= {plan.regime, *map(str, vars(plan).values())}
    )


def with_macros(plan: Plan, **macros: str) -> Plan:
    build = KernelBuild(plan.build.kernel, tuple((plan.macros | macros).items()))
    return replace(plan, launch=replace(plan.launch, build=build))


# A sample of all plans, and plans of each regime whose counts the others lack.
@pytest.mark.parametrize(
    "chosen",
    [
        ["--sample", "7"],
        ["--arch", "90", "--only", "layer_norm:backward:float32:65536:all"],  # streamed
        ["--arch", "90", "--only", "group_norm+silu:backward:bfloat16:320x64x64:all"],  # cluster
        ["--arch", "80", "--only", "group_norm+silu:forward:bfloat16:512x128x128:1"],  # 2 launches
    ],
    ids=" ".join,
)
def test_the_committed_table_matches_the_builds_of_nvrtc(chosen):
    assert main(["--check", str(TABLE), "--jobs", "1", *chosen]) == 0


def test_a_table_of_another_nvrtc_is_said_to_be_compared_only_in_part(monkeypatch, capsys):
    monkeypatch.setattr("bench.plans.command.nvrtc_version", lambda: "0.0")
    assert main(["--check", str(TABLE), "--arch", "90"]) == 0
    assert "not by NVRTC 0.0: only plans were compared\n" in capsys.readouterr().out


def test_the_committed_table_passes_the_gate_and_has_each_launch_for_each_gpu():
    rows = read_csv(TABLE, Row)
    assert report(rows) == 0
    launches: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        launches.setdefault(row.key, []).append(row.gpu)
    for (arch, *_), gpus in launches.items():
        of_arch = [gpu for gpu, model in GPUS.items() if arch == f"sm_{model.architecture}"]
        assert gpus in ([""], of_arch)


def test_the_gate_fails_for_a_plan_that_spills(plans, capsys):
    plan = plan_of(plans, "layer_norm", "forward", "float32", "4096", ONE_ROW)
    sizes = {"WIDTH": "98304", "PACKS": "24", "THREADS": "1024", "THREADS_PER_ROW": "1024"}
    row = measure(with_macros(plan, **sizes))[0]
    assert row.spill_stores > 0
    assert report([row]) == 1
    assert "layer_norm forward float32 4096 row_norm_forward: spills" in capsys.readouterr().out


def test_the_gate_fails_for_accesses_narrower_than_alignment_allows(plans, capsys):
    plan = plan_of(plans, "rms_norm", "forward", "bfloat16")
    assert (plan.number("ACCESS"), plan.access_bytes(2)) == (8, 16)
    row = measure(with_macros(plan, ACCESS="1"))[0]
    assert (row.planned_bytes, row.narrowest_bytes, row.narrowed) == (16, 2, "x:2 y:2")
    assert report([row]) == 1
    assert "x:2 y:2" in capsys.readouterr().out


def test_a_wrong_table_is_reported(plans, tmp_path):
    few = [plan for plan in plans if plan.operator == "rms_norm" and plan.direction == "forward"]
    few = few[:2]
    rows = [row for plan in few for row in measure(plan)]  # for H100 and H200
    write_csv(tmp_path / "table.csv", Row, rows)
    assert read_csv(tmp_path / "table.csv", Row) == rows
    assert not list(differences(rows, few, 2, 1))
    for column, wrong in {
        "registers": rows[0].registers + 9,
        "spill_loads": 4,
        "narrowest_bytes": 8,
        "prediction": "0.5",
        "regime": "streamed",
    }.items():
        table = [replace(rows[0], **{column: wrong}), *rows[1:]]
        (difference,) = differences(table, few, 2, 1)
        assert f"{column} is {getattr(rows[0], column)}, the table has {wrong}" in difference
    assert "only in the plans" in next(differences(rows[2:], few, 2, 1))
    assert "only in the table" in next(differences(rows, few[1:], 2, 1))


# PTX of NVRTC: an address in its own register, one in a loop, and one of a copy to shared memory.
PTX = """
	mov.b64 	%rd1, row_norm_forward_param_0;
	add.s64 	%rd2, %rd1, 144;
	ld.param.u64 	%rd3, [row_norm_forward_param_0+8];
	ld.param.u64 	%rd4, [%rd1+48];
	ld.param.u64 	%rd5, [%rd2+-144];
	ld.param.u64 	%rd6, [%rd2];
	cvta.to.global.u64 	%rd7, %rd5;
	mad.lo.s64 	%rd8, %rd3, 4, %rd7;
	mov.u64 	%rd9, %rd8;
$L__BB0_1:
	ld.global.nc.L1::no_allocate.v4.u32 	{%r1, %r2, %r3, %r4}, [%rd9+-512];
	add.s64 	%rd9, %rd9, 4096;
	ld.shared.v4.f32 	{%f1, %f2, %f3, %f4}, [%r9];
	@%p1 bra 	$L__BB0_1;
	cvta.to.global.u64 	%rd10, %rd4;
	cvta.to.global.u64 	%rd11, %rd6;
	cp.async.cg.shared.global [%r8], [%rd10], 16;
	@%p2 st.global.v2.b64 	[%rd11+16], {%rd12, %rd13};
	st.global.u16 	[%rd11], %rs1;
"""


def test_accesses_have_their_size_and_the_pointer_that_they_are_computed_from():
    expected = {(16, 0), (16, 48), (16, 144), (2, 144)}
    assert accesses(PTX, frozenset((0, 48, 144))) == expected
    with pytest.raises(ValueError, match=r"access of %rd11 is computed from the pointers \[\]"):
        accesses(PTX, frozenset((0, 48)))
    with pytest.raises(ValueError, match=r"computed from the pointers \[0, 8\]"):
        accesses(PTX, frozenset((0, 8, 48, 144)))
