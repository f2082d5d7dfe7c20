# SPDX-License-Identifier: MIT
"""`python -m bench accuracy` measures known errors; in its table, cunorm is within its bounds."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the bench compares with PyTorch")
from bench.accuracy import command as accuracy
from bench.accuracy import data as accuracy_data
from bench.accuracy.errors import Row, errors, table
from bench.report.records import read_csv
from bench.timing.cases import DTYPES, OPERATORS, oracle
from bench.timing.providers import Provider
from cunorm import reference

ROOT = Path(__file__).parents[2]
BY_LABEL = {operator.label: operator for operator in OPERATORS}
LAYER_NORM, GROUP_NORM = BY_LABEL["layer_norm"], BY_LABEL["group_norm NCHW"]
SPACING = {"float32": 2.0**-22, "bfloat16": 2.0**-6, "float16": 2.0**-9}  # of numbers next to 3
MEAN = "mean 1e4"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("operator", "name", "shape", "units"),
    [
        (LAYER_NORM, "dx", (2, 100), 2),  # rows
        (GROUP_NORM, "y", (1, 64, 3, 3), 32),  # groups of a sample
        (GROUP_NORM, "dweight", (64,), 1),
        (GROUP_NORM, "dbias", (64,), 1),
    ],
)
def test_an_error_has_the_unit_of_its_row_group_or_vector_and_not_of_its_element(
    operator, name, shape, units, dtype
):
    scales = 4.0 ** np.arange(units)[:, None]
    exact = np.linspace(-1e-3, 3, math.prod(shape) // units) * scales  # [unit, element]
    for unit in (0, units - 1):
        result = exact.copy()
        result[unit, 0] += 7 * scales[unit, 0] * SPACING[dtype]
        found = errors(operator, name, result.reshape(shape), exact.reshape(shape), dtype)
        assert found == pytest.approx((7, 7 / math.sqrt(exact.size)), rel=1e-6)


def test_rounding_costs_half_an_ulp_and_a_nan_is_an_infinite_error():
    exact = np.random.default_rng(0).standard_normal((4, 1000))
    for name, dtype in DTYPES.items():
        rounded = reference.round_to(exact, dtype)
        assert 0.49 < errors(LAYER_NORM, "y", rounded, exact, name)[0] <= 0.5
        rounded[0, 0] = np.nan
        assert errors(LAYER_NORM, "y", rounded, exact, name) == (math.inf, math.inf)


class OffByNine(Provider):
    """A provider of exact results, except that one element of y is off by nine ulp."""

    def calls(self, operator, direction, sets):
        return [partial(self._results, operator, direction, host) for host in sets]

    def results_by_name(self, operator, direction, result):
        return result

    def _results(self, operator, direction, host):
        results = oracle(operator, direction, host)
        if direction == "forward":
            results["y"][1, 0] += 9 * np.spacing(np.float32(np.abs(results["y"][1]).max()))
        return results


def test_a_provider_that_is_off_by_known_ulps_is_measured_so():
    kinds, shape = ("mean 0", MEAN, "tails"), (3, 40)
    sets = {kind: accuracy_data.operands(LAYER_NORM, kind, "float32", shape) for kind in kinds}
    for found in accuracy.measure(OffByNine(), LAYER_NORM, "float32", sets).values():
        assert found.pop("y_worst") == "9"
        assert found.pop("y_rms") == f"{9 / math.sqrt(3 * 40):.3g}"
        assert set(found.values()) == {"0"}


def test_the_command_writes_a_table_and_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out, picture = tmp_path / "accuracy.csv", tmp_path / "accuracy.svg"
    chosen = ["--op", "rms_norm", "--dtype", "float32", "--providers", "cunorm,torch"]
    files = ["--out", str(out), "--plot", str(picture)]
    assert accuracy.main([*chosen, "--shapes", "8x96", *files]) == 0
    printed = capsys.readouterr().out
    rows = read_csv(out, Row)
    assert {row.provider for row in rows} == {"cunorm", "torch"}
    assert len(rows) == 2 * 6
    assert all(float(row.dx_worst) < 8 for row in rows)
    assert printed.splitlines()[2].startswith("| rms_norm 8x96, mean 0 | ")
    drawn = picture.read_text("utf-8")
    assert all(text in drawn for text in ("rms_norm dweight float32", "torch", "tails"))


# --- the committed table --------------------------------------------------------------------------

COMMITTED = read_csv(ROOT / "bench" / "results" / "accuracy.csv", Row)


def test_cunorm_is_within_its_bounds_in_the_committed_table():
    row_norms = [row for row in COMMITTED if row.operator in ("layer_norm", "rms_norm")]
    ours = [row for row in row_norms if row.provider.startswith("cunorm")]
    assert {row.data for row in ours} == set(accuracy_data.KINDS)
    for column, most in (("y_worst", 4), ("dx_worst", 8)):
        for row in ours:
            assert float(getattr(row, column)) <= (most if row.dtype == "float32" else 0.501)


def test_the_readme_has_the_range_of_the_committed_errors():
    alike = [row for row in COMMITTED if (row.dtype, row.data) == ("float32", MEAN)]
    chosen = [row for row in alike if row.operator in ("layer_norm", "group_norm NCHW")]
    ours, theirs = [], []
    for row in chosen:
        (ours if row.provider.startswith("cunorm") else theirs).append(float(row.y_worst))
    readme = (ROOT / "README.md").read_text("utf-8")
    of_theirs = f"{min(theirs):,.0f} to {max(theirs):,.0f} ulp in PyTorch, torch.compile and JAX"
    ours_at_most = f"with mean 1e4 and deviation 1, y is off by at most {max(ours):.0f} ulp"
    assert of_theirs in readme and ours_at_most in readme
    assert max(ours) <= 2


def test_the_page_has_the_numbers_of_the_committed_table():
    chosen = [row for row in COMMITTED if (row.shape, row.data) == ("64x4096", MEAN)]
    line = next(line for line in table(chosen) if line.startswith("| layer_norm"))
    found = [cell.strip().replace(" / ", " and ") for cell in line.split("|")[2:-1]]
    page = " ".join((ROOT / "docs" / "accuracy.md").read_text("utf-8").split())
    ours, softgpu, torch, compiled, jax = found
    errors = "the worst errors of y and dx, in ulp of the row's largest value, are"
    assert f"mean 1e4, {errors} {ours} on a CPU, and {softgpu} on the software GPU" in page
    assert f"PyTorch's errors are {torch}, torch.compile's {compiled}, and JAX's {jax}." in page
    assert "With mean 0 or 1, with heavy tails and on a trained model's activations, all" in page
    usual = ("mean 0", "mean 1", "tails", "activations")
    chosen = [row for row in COMMITTED if row.operator == "layer_norm" and row.data in usual]
    assert max(float(cell) for row in chosen for cell in (row.y_worst, row.dx_worst)) < 4
