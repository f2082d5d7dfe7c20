# SPDX-License-Identifier: MIT
"""`python -m bench accuracy` measures known errors; in its table, cunorm is within its bounds."""

from __future__ import annotations

import math
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


def of_size(size, shape):
    """Return an exact result: numbers from -0.001 to 3, times `size`."""
    return np.linspace(-1e-3, 3, math.prod(shape)).reshape(shape) * size


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_error_has_the_unit_of_its_own_row_and_not_of_its_element(dtype):
    exact = np.concatenate([of_size(1, (1, 100)), of_size(1024, (1, 100))])
    for row, size in enumerate((1, 1024)):
        result = exact.copy()
        result[row, 0] += 7 * size * SPACING[dtype]
        worst, rms = errors(LAYER_NORM, "dx", result, exact, dtype)
        assert worst == pytest.approx(7, rel=1e-6)
        assert rms == pytest.approx(7 / math.sqrt(200), rel=1e-6)


def test_the_unit_of_an_error_depends_on_the_group_of_a_sample_or_on_the_vector_of_sums():
    groups = [of_size(4.0**number, (2, 3, 3)) for number in range(32)]
    exact = np.concatenate(groups)[None]
    result = exact.copy()
    result[0, 2, 0, 0] += 5 * 4 * SPACING["float32"]  # the second group
    assert errors(GROUP_NORM, "y", result, exact, "float32")[0] == pytest.approx(5, rel=1e-6)
    exact = of_size(1, (64,))
    result = exact.copy()
    result[0] += 3 * SPACING["float32"]
    for name in ("dweight", "dbias"):
        assert errors(GROUP_NORM, name, result, exact, "float32")[0] == pytest.approx(3, rel=1e-6)


def test_rounding_costs_half_an_ulp_and_a_nan_is_an_infinite_error():
    exact = np.random.default_rng(0).standard_normal((4, 1000))
    for name, dtype in DTYPES.items():
        rounded = reference.round_to(exact, dtype)
        assert 0.49 < errors(LAYER_NORM, "y", rounded, exact, name)[0] <= 0.5
        rounded[0, 0] = np.nan
        assert errors(LAYER_NORM, "y", rounded, exact, name) == (math.inf, math.inf)


class Known(Provider):
    """A provider of exact results, except that one element of y is off by a number of ulps."""

    name = "known"

    def __init__(self, ulps: float) -> None:
        self.ulps = ulps

    def calls(self, operator, direction, sets):
        return [lambda host=host: self._results(operator, direction, host) for host in sets]

    def results_by_name(self, operator, direction, result):
        return result

    def _results(self, operator, direction, host):
        results = oracle(operator, direction, host)
        if direction == "forward":
            largest = np.abs(results["y"][1]).max()
            results["y"][1, 0] += self.ulps * 2.0 ** (math.floor(math.log2(largest)) - 23)
        return results


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_provider_that_is_off_by_known_ulps_is_measured_so(name):
    operator, shape = BY_LABEL[name], (3, 40)
    kinds = ("mean 0", MEAN, "tails")
    sets = {kind: accuracy_data.operands(operator, kind, "float32", shape) for kind in kinds}
    for found in accuracy.measure(Known(9), operator, "float32", sets).values():
        assert found.pop("y_worst") == "9"
        assert found.pop("y_rms") == f"{9 / math.sqrt(3 * 40):.3g}"
        assert set(found.values()) == ({"0", ""} if name == "rms_norm" else {"0"})


def test_a_mean_of_few_digits_costs_thousands_of_ulps():
    host = accuracy_data.operands(LAYER_NORM, MEAN, "float32", (8, 256))
    x, weight, bias = host["x"], host["weight"], host["bias"]
    exact = oracle(LAYER_NORM, "forward", host)["y"]
    q = x - x.mean(-1, keepdims=True)
    for corrected, low, high in ((False, 500, 5e4), (True, 0.5, 4)):
        if corrected:
            q = q - q.mean(-1, keepdims=True)
        r = q / np.sqrt((q * q).mean(-1, keepdims=True) + np.float32(LAYER_NORM.eps))
        worst, _ = errors(LAYER_NORM, "y", r * weight + bias, exact, "float32")
        assert low < worst < high


def test_a_mean_that_a_dtype_does_not_resolve_is_left_out():
    resolved = {
        dtype: [kind for kind in accuracy_data.KINDS if accuracy_data.exists(kind, dtype, (2, 9))]
        for dtype in DTYPES
    }
    means = ["mean 0", "mean 1", "mean 100"]
    assert resolved["float16"] == resolved["bfloat16"] == [*means, "tails"]
    assert resolved["float32"] == [*means, MEAN, "mean 1e6", "tails"]
    assert accuracy_data.exists("activations", "float16", (2, 128))


def test_the_command_writes_a_table_and_a_picture_and_reads_the_table_again(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out, picture = tmp_path / "accuracy.csv", tmp_path / "accuracy.svg"
    chosen = ["--op", "rms_norm", "--dtype", "float32", "--providers", "cunorm,torch"]
    assert accuracy.main([*chosen, "--shapes", "8x96", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = read_csv(out, Row)
    assert {row.provider for row in rows} == {"cunorm", "torch"}
    assert len(rows) == 2 * 6
    assert all(float(row.dx_worst) < 8 for row in rows)
    assert printed.splitlines()[2].startswith("| rms_norm 8x96, mean 0 | ")
    assert accuracy.main(["--read", str(out), "--plot", str(picture)]) == 0
    assert capsys.readouterr().out == printed
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
