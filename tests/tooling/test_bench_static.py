# SPDX-License-Identifier: MIT
"""`python -m bench static`: the table matches the compiled GPU plans, and the gate finds faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.plans import planned
from bench.plans.plan import ONE_ROW, Plan
from bench.plans.planned import feature_sets, grid
from tests.support.internals import KernelBuild

pytest.importorskip("cupy", reason="CuPy is not installed")
from bench.plans.command import differences, main, report
from bench.plans.model import GPUS
from bench.plans.rows import Row, measure
from bench.plans.sass import disassembler
from bench.report.records import read_csv, write_csv
from bench.timing.cases import QUANTIZED

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
        ["--sample", "4"],
        ["--arch", "90", "--only", "rms_norm+fp8:*:*:4096:all"],  # quantised
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


def test_quantised_rows_do_not_spill_below_compute_capability_9():
    of_row, added, *_ = QUANTIZED
    for operator, width, arch in ((of_row, 5120, "75"), (added, 1024, "89")):
        features = feature_sets(arch)[0]
        (plan,) = planned.plans(operator, "forward", "bfloat16", (width,), arch, features)
        assert report(measure(plan)) == 0


def test_the_gate_fails_for_a_plan_that_spills(plans, capsys):
    plan = plan_of(plans, "layer_norm", "forward", "float32", "4096", ONE_ROW)
    sizes = {"WIDTH": "98304", "PACKS": "24", "THREADS": "1024", "THREADS_PER_ROW": "1024"}
    assert report(measure(with_macros(plan, **sizes))) == 1
    assert "layer_norm forward float32 4096 row_norm_forward: spills" in capsys.readouterr().out


def test_the_gate_fails_for_narrow_accesses_and_for_late_loads(plans, capsys):
    plan = plan_of(plans, "rms_norm", "forward", "bfloat16")
    row = measure(with_macros(plan, ACCESS="1"))[0]
    assert report([row, replace(row, narrowest_bytes=16, late_loads="2")]) == 1
    shown = capsys.readouterr().out
    assert "accesses 2 bytes at once, planned are 16" in shown
    assert "2 loads come after a row's first store" in shown
    assert replace(row, narrowest_bytes=row.planned_bytes).faults() == []
    for fault in ({"stack": 8}, {"blocks_per_sm": 0}):
        assert report([replace(row, narrowest_bytes=row.planned_bytes, **fault)]) == 1


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
