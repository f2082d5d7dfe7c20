# SPDX-License-Identifier: MIT
"""NVRTC compiles the kernels for every architecture, without a GPU, and nothing spills.

`pytest -m exhaustive tests/test_nvrtc.py` compiles every build of `all_builds` for sm_90.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from covers import Case, everything, pairwise

from cunorm._dtypes import DTYPES, FLOAT32, FLOAT64
from cunorm._plan import (
    BackwardTypes,
    Build,
    ForwardTypes,
    ParamGradTypes,
    cuda_backward,
    cuda_forward,
    cuda_param_grad,
)

pytest.importorskip("cupy", reason="CuPy is not installed")
from nvrtc import compile_cubin, resource_usage  # it needs CuPy

ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")
ROWS, SM_COUNT = 4096, 132
# One width or more of each kind of plan: teams within a warp, of a block, streamed; odd ones too.
WIDTHS = (1, 100, 1000, 5003, 8192, 65536)
MORE_WIDTHS = (256, 3072, 4096, 16384, 32768)

# An operand has x's dtype ("x"), float32, another of them, or is absent (None).
FORWARD = {
    "x": tuple(DTYPES),
    "residual": (None, "x", "float32"),
    "weight": (None, "x", "float32"),
    "bias": (None, "x", "float32"),
    "y": ("x", "float32"),
    "center": (False, True),
    "width": WIDTHS,
    "access": (1, 2, 16),
}
BACKWARD = {
    "x": tuple(DTYPES),
    "dy": ("x", "float16"),
    "d_residual": (None, "x"),
    "outputs": ("dx", "bfloat16 dx and dresidual", "neither"),
    "weight": (None, "x", "float32"),
    "sums": ((), ("dbias",), ("dweight",), ("dweight", "dbias")),
    "center": (False, True),
    "width": WIDTHS,
    "access": (1, 2, 16),
}
PARAM_GRAD = {
    "compute": ("float32", "float64"),
    "dweight": (None, *DTYPES),
    "dbias": (None, *DTYPES),
}


def forward_build(case: Case) -> Build:
    """Return the build of a case of FORWARD."""
    dtype = {"x": DTYPES[case["x"]], None: None, **DTYPES}
    residual = dtype[case["residual"]]
    compute = FLOAT64 if FLOAT64 in (dtype["x"], residual) else FLOAT32
    operands = (dtype[case[name]] for name in ("weight", "bias", "y"))
    types = ForwardTypes(compute, dtype["x"], residual, residual, *operands, case["center"])
    return cuda_forward(types, ROWS, case["width"], case["access"]).build


def backward_build(case: Case) -> Build:
    """Return the build of a case of BACKWARD."""
    dtype = {"x": DTYPES[case["x"]], None: None, **DTYPES}
    x = dtype["x"]
    dx, dresidual = {
        "dx": (x, None),
        "bfloat16 dx and dresidual": (DTYPES["bfloat16"], x),
        "neither": (None, None),
    }[case["outputs"]]
    types = BackwardTypes(
        compute=FLOAT64 if x is FLOAT64 else FLOAT32,
        dy=dtype[case["dy"]],
        x=x,
        d_residual=dtype[case["d_residual"]],
        dx=dx,
        dresidual=dresidual,
        weight=dtype[case["weight"]],
        center=case["center"],
        dweight="dweight" in case["sums"],
        dbias="dbias" in case["sums"],
    )
    return cuda_backward(types, ROWS, case["width"], case["access"], SM_COUNT).build


def param_grad_build(case: Case) -> Build:
    """Return the build of a case of PARAM_GRAD."""
    dtype = {None: None, **DTYPES}
    types = ParamGradTypes(*(dtype[case[name]] for name in ("compute", "dweight", "dbias")))
    return cuda_param_grad(types, 4096).build


def cover() -> list[Build]:
    """Return builds among which every two choices of a kernel's operands meet."""
    builds = [forward_build(case) for case in pairwise(FORWARD)]
    builds += [backward_build(case) for case in pairwise(BACKWARD)]
    builds += [param_grad_build(case) for case in pairwise(PARAM_GRAD)]
    return list(dict.fromkeys(builds))


def all_builds() -> Iterator[Build]:
    """Yield every combination of operands at every width, aligned as arrays usually are."""
    aligned = {"access": (16,), "width": (*WIDTHS, *MORE_WIDTHS)}
    used = {"dy": ("x",), "sums": ((), ("dweight",), ("dweight", "dbias"))}
    yield from map(forward_build, everything(FORWARD | aligned))
    yield from map(backward_build, everything(BACKWARD | aligned | used))
    yield from map(param_grad_build, everything(PARAM_GRAD))


def spilling(builds: list[Build], architecture: str) -> list[str]:
    """Compile builds and return those whose registers do not hold what they need."""
    found = []
    for build in builds:
        cubin, log = compile_cubin(build, architecture)
        usage = resource_usage(log)
        assert cubin
        if usage.spill_stores or usage.spill_loads or usage.stack:
            found.append(f"{build}: {usage}")
    return found


SHARES = 8


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_cover_of_the_builds_compiles_for_every_architecture(architecture, share):
    builds = cover()[share::SHARES]
    spills = spilling(builds, architecture)
    if architecture == "90":
        assert not spills


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", range(200))
def test_every_build_compiles_for_sm_90_and_none_spills(share):
    builds = list(dict.fromkeys(all_builds()))[share::200]
    assert not spilling(builds, "90")


def test_rows_that_fill_a_threads_registers_do_not_spill():
    case = {
        "x": "bfloat16",
        "dy": "x",
        "d_residual": "x",
        "outputs": "bfloat16 dx and dresidual",
        "weight": "float32",
        "sums": ("dweight",),
        "center": True,
        "width": 16384,
        "access": 16,
    }
    assert not spilling([backward_build(case)], "90")


def test_the_check_sees_a_spill():
    types = ForwardTypes(FLOAT64, FLOAT64, None, None, FLOAT64, FLOAT64, FLOAT64, True)
    build = cuda_forward(types, ROWS, 16384, 16).build
    crowded = {
        "WIDTH": "98304",
        "THREADS": "1024",
        "THREADS_PER_ROW": "1024",
        "PACK": "2",
        "PACKS": "48",
    }
    macros = tuple((name, crowded.get(name, value)) for name, value in build.macros)
    assert spilling([Build(build.kernel, macros)], "90")
