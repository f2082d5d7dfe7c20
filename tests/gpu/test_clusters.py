# SPDX-License-Identifier: MIT
"""Rows that clusters of blocks share, on a GPU: held to the same bounds, and to the bit."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import cunorm
from cunorm import _again, _cuda
from cunorm._builds import Build, Launch
from cunorm._features import LEAST_CAPABILITY, VARIABLE
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import OnCupy, get_all, put_all
from tests.support.operands import assert_same_bits, at, draw

pytestmark = pytest.mark.gpu

# Widths, and the blocks that share a row of float32 in a forward and in a backward.
SIZES = {
    16384: (2, 2),
    20001: (4, 4),
    65536: (8, 8),
    100003: (16, 16),
    131072: (16, 16),
    262144: (16, 1),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Build]]:
    """Turn clusters on, and list the builds that are launched."""
    capability = OnCupy().cupy.cuda.Device().compute_capability
    if int(capability) < LEAST_CAPABILITY["clusters"]:
        pytest.skip(f"clusters need compute capability 9.0, this GPU is sm_{capability}")
    builds: list[Build] = []
    launch = _cuda.launch

    def noted(what: Launch, *rest: object) -> None:
        builds.append(what.build)
        launch(what, *rest)

    monkeypatch.setenv(VARIABLE, f"{os.environ.get(VARIABLE, '')},clusters")
    monkeypatch.setattr(_cuda, "launch", noted)
    _cuda.device_limits.cache_clear()
    _again.forget()  # what runs without clusters
    yield builds
    _cuda.device_limits.cache_clear()
    _again.forget()


def cluster(builds: list[Build], kernel: str) -> int:
    """Return the size of the clusters of the last launch of a kernel."""
    return next(build.cluster for build in reversed(builds) if build.kernel == kernel)


def drawn(shape: tuple[int, int], dtype: str, *, gate: bool = False) -> dict:
    names = ("x", "residual", "dy", "d_residual", *(("gate",) if gate else ()))
    given = {name: draw(name, shape, dtype) for name in names}
    return given | {name: draw(name, shape[1], dtype) for name in ("weight", "bias")}


def run(on: dict, norm: dict):
    """Run a forward with every operand, and its backward."""
    parameters = {name: on[name] for name in ("weight", "bias", "gate") if name in on}
    forward = cunorm.normalize_forward(on["x"], residual=on["residual"], **parameters, **norm)
    statistics = {name: getattr(forward, name) for name in ("mean", "rstd")}
    given = {**parameters, **statistics, "d_residual": on["d_residual"], **norm}
    return forward, cunorm.normalize_backward(on["dy"], forward.residual, **given)


def check(given: dict, norm: dict) -> None:
    """Hold both to the oracle."""
    gpu = OnCupy()
    forward, grads = (get_all(gpu, result) for result in run(put_all(gpu, given), norm))
    told = norm | {"gate": given.get("gate"), "eps": 1e-6}
    parameters = (given["weight"], given["bias"])
    check_forward(forward, given["x"], *parameters, given["residual"], **told)
    back = (given["dy"], forward.residual, *parameters, given["d_residual"])
    worst = check_backward(grads, *back, **told)
    assert worst.keys() >= {"dx", "dweight", "dbias"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("width", SIZES)
def test_rows_are_right_in_clusters_of_every_size(launched, width, dtype):
    """One row, and so many that the clusters of an H200's backward walk two and three."""
    for rows in (1, 2_500_000 // width):
        with at(f"{rows} rows"):
            check(drawn((rows, width), dtype), {"center": True})
    if dtype == "float32":
        assert cluster(launched, "row_norm_forward") == SIZES[width][0]
        assert cluster(launched, "row_norm_backward") == SIZES[width][1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("position", ["pre", "post"])
def test_gated_groups_of_columns_are_right_in_clusters(launched, position, dtype):
    for width in (20001, 32768):
        norm = {"groups": 3, "gate_position": position}
        check(drawn((7, 3 * width), dtype, gate=True), norm)
        assert cluster(launched, "row_norm_forward") > 1
        assert cluster(launched, "row_norm_backward") > 1


@pytest.mark.parametrize("width", SIZES)
def test_a_row_of_a_cluster_does_not_depend_on_the_others_and_repeats_to_the_bit(launched, width):
    gpu = OnCupy()
    given = drawn((40, width), "float32")
    norm = {"center": True}
    whole, again = (run(put_all(gpu, given), norm) for _ in range(2))
    assert cluster(launched, "row_norm_forward") == SIZES[width][0]
    one = {name: array[5:6] if array.ndim == 2 else array for name, array in given.items()}
    alone = run(put_all(gpu, one), norm)
    for results, same, part in zip(whole, again, alone, strict=True):
        for name, array in get_all(gpu, results)._asdict().items():
            if array is None:
                continue
            assert_same_bits(gpu.get(getattr(same, name)), array, name)
            if name not in ("dweight", "dbias"):
                assert_same_bits(gpu.get(getattr(part, name)), array[5:6], name)


def test_rows_of_more_clusters_than_run_at_a_time_are_right(launched):
    """Each of 4000 rows is one of two, so that two answers are all that there are."""
    gpu = OnCupy()
    given = drawn((2, 65536), "bfloat16")
    weight = gpu.put(given["weight"])
    x = gpu.put(given["x"])
    y = gpu.get(cunorm.rms_norm(x, weight))
    check_forward(cunorm.NormForward(y), given["x"], given["weight"], None, eps=1e-6)
    many = gpu.get(cunorm.rms_norm(gpu.cupy.tile(x.view("u2"), (2000, 1)).view(x.dtype), weight))
    assert cluster(launched, "row_norm_forward") == 4
    for row in (0, 1):
        assert_same_bits(many[row::2], y[[row] * 2000])
