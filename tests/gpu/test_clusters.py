# SPDX-License-Identifier: MIT
"""On a GPU, results of rows that clusters of blocks share are within bounds, and repeatable."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

import cunorm
from tests import softgpu
from tests.support.bounds import check_forward
from tests.support.cases import Call, call_of
from tests.support.gpu_arrays import OnCupy
from tests.support.internals import KernelBuild, Launch, _cuda
from tests.support.operands import assert_same_bits, at, draw
from tests.support.remembered import clear_plans

pytestmark = pytest.mark.gpu
KERNELS = ("row_norm_forward", "row_norm_backward")

# Widths, and the number of blocks that share a float32 row in a forward and in a backward. Rows of
# the last width are streamed; in a backward, rows of the last three widths are.
SIZES = {
    8196: (2, 4),
    16384: (2, 8),
    20001: (8, 16),
    40004: (8, 16),
    100003: (16, 16),
    131072: (16, 16),
    262144: (16, 16),
}
MIN_CAPABILITY = 90
BY_DEFAULT = range(90, 110)  # capabilities whose plans have clusters by default


def sizes(*also: int) -> list[Any]:
    """Return widths; the software GPU is quick enough for only a few."""
    return [
        width
        if width in (16384, 100003, *also)
        else pytest.param(width, marks=pytest.mark.real_gpu("too long"))
        for width in SIZES
    ]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelBuild]]:
    """Enable clusters; return a list that gets the build of each launch."""
    capability = int(OnCupy().cupy.cuda.Device().compute_capability)
    if capability < MIN_CAPABILITY:
        pytest.skip(f"clusters need compute capability 9.0, this GPU is sm_{capability}")
    builds: list[KernelBuild] = []
    launch = _cuda.launch

    def noted(what: Launch, *rest: object) -> None:
        builds.append(what.build)
        launch(what, *rest)

    monkeypatch.delenv("CUNORM_FEATURES", raising=False)
    if capability not in BY_DEFAULT:
        monkeypatch.setenv("CUNORM_FEATURES", "clusters")
    monkeypatch.setattr(_cuda, "launch", noted)
    clear_plans()  # cached plans may be without clusters
    yield builds
    clear_plans()


def cluster(builds: list[KernelBuild], kernel: str) -> int:
    """Return the size of the clusters of the last launch of a kernel."""
    return next(build.cluster for build in reversed(builds) if build.kernel == kernel)


def assert_cluster(builds: list[KernelBuild], kernel: str, blocks: int) -> None:
    """Expect clusters of `blocks` blocks; a real GPU may have no room for 16, and then has 8."""
    smaller = {8} if blocks == 16 and not softgpu.is_loaded() else set()
    assert cluster(builds, kernel) in {blocks} | smaller


def rows_of(width: int) -> int:
    """Return a number of rows; on an H200, most clusters of a backward get 2 to 8 rows."""
    return 3 if softgpu.is_loaded() else 2_500_000 // width


def call(kernel: str, rows: int, width: int, dtype: str, **more: Any) -> Call:
    """Return a call with every operand but a gate."""
    case = {"shape": (rows, width), "stream": f"+ {dtype}", "center": True}
    case |= dict.fromkeys(("x", "weight", "bias", "dy", "d_residual"), dtype)
    return call_of(kernel, case | more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("width", sizes(8196, 20001, 40004))
def test_rows_are_right_in_clusters_of_every_size(launched, width, dtype):
    if softgpu.is_loaded() and dtype != "float32" and width != 20001:
        pytest.skip("the software GPU is not quick enough")
    for rows in (rows_of(width),) if softgpu.is_loaded() else (1, rows_of(width)):
        for kernel, blocks in zip(KERNELS, SIZES[width], strict=True):
            with at(kernel, f"{rows} rows"):
                call(kernel, rows, width, dtype).check()
                if dtype == "float32":
                    assert_cluster(launched, kernel, blocks)


@pytest.mark.parametrize(
    ("kernel", "dtype"), [("row_norm_forward", "float32"), ("row_norm_backward", "bfloat16")]
)
def test_clusters_of_8_add_in_the_same_order_where_none_of_16_fits(
    launched, monkeypatch, kernel, dtype
):
    one = call(kernel, 2, 70002, dtype)
    usual = one.run()
    assert_cluster(launched, kernel, 16)
    with monkeypatch.context() as patched:
        patched.setattr(_cuda, "fits_cluster", lambda one, device: one.build.cluster <= 8)
        clear_plans()
        other = one.run()
    assert cluster(launched, kernel) == 8
    for name in {"y", "residual", "mean", "rstd", "dx"} & {*usual._fields}:
        assert_same_bits(getattr(other, name), getattr(usual, name), name)


@pytest.mark.parametrize(("position", "dtype"), [("pre", "float32"), ("post", "bfloat16")])
def test_gated_groups_of_columns_are_right_in_clusters(launched, position, dtype):
    more = {"groups": 3, "gate": dtype, "gate_position": position, "center": False}
    rows = 2 if softgpu.is_loaded() else 7
    for width, kernel in product((20001,) if softgpu.is_loaded() else (20001, 32768), KERNELS):
        call(kernel, rows, width, dtype, **more).check()
        assert cluster(launched, kernel) > 1


@pytest.mark.parametrize("width", sizes())
def test_a_row_of_a_cluster_does_not_depend_on_other_rows_and_repeats_to_the_bit(launched, width):
    rows = 4 if softgpu.is_loaded() else 40
    for kernel, blocks in zip(KERNELS, SIZES[width], strict=True):
        whole = call(kernel, rows, width, "float32")
        results, repeated = whole.run(), whole.run()
        assert_cluster(launched, kernel, blocks)
        alone = call(kernel, rows, width, "float32", picked=[2]).run()
        for name, array in results._asdict().items():
            if array is not None:
                assert_same_bits(getattr(repeated, name), array, name)
                if name not in ("dweight", "dbias"):
                    row = getattr(alone, name).reshape(array[2:3].shape)
                    assert_same_bits(row, array[2:3], name)


@pytest.mark.real_gpu("the software GPU runs one cluster at a time")
def test_rows_are_right_where_not_all_clusters_run_at_a_time(launched):
    """The 4000 rows are copies of two rows, so the oracle checks only two results."""
    gpu, x, weight = OnCupy(), draw("x", (2, 65536), "bfloat16"), draw("w", 65536, "bfloat16")
    two, parameter = gpu.put(x), gpu.put(weight)
    y = gpu.get(cunorm.rms_norm(two, parameter))
    check_forward(cunorm.NormForward(y), x, weight, None, eps=1e-6)
    many = gpu.cupy.tile(two.view("u2"), (2000, 1)).view(two.dtype)
    many = gpu.get(cunorm.rms_norm(many, parameter))
    assert cluster(launched, "row_norm_forward") == 4
    for row in (0, 1):
        assert_same_bits(many[row::2], y[[row] * 2000])
