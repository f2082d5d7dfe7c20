# SPDX-License-Identifier: MIT
"""`python -m bench static`: the table matches the compiled GPU plans, and the gate finds faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.plans.plan import ONE_ROW, Plan
from bench.plans.planned import grid
from bench.plans.ptx import Access, accesses
from tests.support.internals import KernelBuild

pytest.importorskip("cupy", reason="CuPy is not installed")
from bench.plans.command import differences, main, report
from bench.plans.model import GPUS
from bench.plans.rows import Row, measure
from bench.report.records import read_csv, write_csv

TABLE = Path(__file__).parents[2] / "bench" / "results" / "static.csv"


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return grid(("90",))


def plan_of(plans: list[Plan], *columns: str) -> Plan:
    return next(plan for plan in plans if set(columns) <= set(plan[:-1]))


def with_macros(plan: Plan, **macros: str) -> Plan:
    build = tuple((name, macros.get(name, value)) for name, value in plan.build.macros)
    return plan._replace(build=KernelBuild(plan.build.kernel, build))


def test_the_committed_table_matches_the_builds_of_nvrtc():
    assert main(["--check", str(TABLE), "--sample", "7", "--jobs", "1"]) == 0


def test_a_table_of_another_nvrtc_is_said_to_be_compared_only_in_part(monkeypatch, capsys):
    monkeypatch.setattr("bench.plans.command.nvrtc_version", lambda: "0.0")
    assert main(["--check", str(TABLE), "--arch", "90"]) == 0
    assert "not by NVRTC 0.0: only plans were compared\n" in capsys.readouterr().out


def test_the_committed_table_passes_the_gate_and_is_small():
    assert report(read_csv(TABLE, Row)) == 0
    assert TABLE.stat().st_size < 1 << 20


def test_the_committed_table_has_each_launch_once_or_for_each_gpu_of_its_architecture():
    launches: dict[tuple[str, ...], list[str]] = {}
    for row in read_csv(TABLE, Row):
        launches.setdefault((row.arch, *row.key), []).append(row.gpu)
    for (arch, *_), gpus in launches.items():
        of_arch = [gpu for gpu, model in GPUS.items() if arch == f"sm_{model.architecture}"]
        assert gpus in ([""], of_arch)


def test_the_gate_fails_for_a_plan_that_spills(plans, capsys):
    crowded = with_macros(
        plan_of(plans, "layer_norm", "forward", "float32", "4096", ONE_ROW),
        WIDTH="98304",
        PACKS="24",
        THREADS="1024",
        THREADS_PER_ROW="1024",
    )
    row = measure(crowded)[0]
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
    rows = [measure(plan)[0] for plan in few]
    write_csv(tmp_path / "table.csv", Row, rows)
    assert read_csv(tmp_path / "table.csv", Row) == rows
    assert not list(differences(rows, few, 2, 1))
    for column, wrong in {
        "registers": rows[0].registers + 9,
        "spill_loads": 4,
        "narrowest_bytes": 8,
        "regime": "streamed",
    }.items():
        table = [replace(rows[0], **{column: wrong}), rows[1]]
        (difference,) = differences(table, few, 2, 1)
        assert f"{column} is {getattr(rows[0], column)}, the table has {wrong}" in difference
    assert "only in the plans" in next(differences(rows[1:], few, 2, 1))
    assert "only in the table" in next(differences(rows, few[1:], 2, 1))


# PTX of NVRTC: an address in its own register, one in a loop, and one of a copy to shared memory.
PTX = """
.visible .entry row_norm_forward(
	.param .align 8 .b8 row_norm_forward_param_0[320]
)
{
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
	// begin inline asm
	cp.async.cg.shared.global [%r8], [%rd10], 16;
	// end inline asm
	@%p2 st.global.v2.b64 	[%rd11+16], {%rd12, %rd13};
	st.global.u16 	[%rd11], %rs1;
	st.global.u16 	[%rd11+2], %rs2;
}
"""


def test_accesses_are_counted_by_size_and_by_the_pointer_that_they_are_computed_from():
    assert accesses(PTX, frozenset((0, 48, 144))) == Counter(
        {
            Access("ld", 16, 0): 1,
            Access("ld", 16, 48): 1,
            Access("st", 16, 144): 1,
            Access("st", 2, 144): 2,
        }
    )


def test_an_address_of_no_known_pointer_is_an_error():
    with pytest.raises(ValueError, match=r"st\.global.* computed from the pointers at \[\]"):
        accesses(PTX, frozenset((0, 48)))
    with pytest.raises(ValueError, match=r"computed from the pointers at \[0, 8\]"):
        accesses(PTX, frozenset((0, 8, 48, 144)))
