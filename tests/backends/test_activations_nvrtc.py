# SPDX-License-Identifier: MIT
"""NVRTC compiles activations to few registers, and float activations without function calls.

No GPU is needed. Each thread of the kernel computes one point.
"""

import pytest

from tests.support.internals import ACTIVATIONS, KernelBuild, source_text

pytest.importorskip("cupy", reason="CuPy is not installed")
from tests.support.nvrtc import compile_build, resource_usage  # it needs CuPy

PROBE = """
#include "activations.cuh"
extern "C" __global__ void probe(const VALUE_T* z, VALUE_T* value, VALUE_T* slope) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  using G = activations::GATE_ACTIVATION;
  if (!SLOPE) {
    value[i] = G::at(z[i]).value;
  } else {
    const auto g = G::at(z[i]);
    value[i] = g.value;
    slope[i] = g.derivative;
  }
}
"""
NAMES = sorted({*ACTIVATIONS.values()})
SLOW_PATH = b"slowpath"  # part of the name of ptxas's subroutine for a division


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvrtc")
    (folder / "probe.cu").write_text(PROBE)
    return source_text("probe", (folder,))


def compiled(text, name, kind, slope=1):
    macros = (("VALUE_T", kind), ("GATE_ACTIVATION", name), ("SLOPE", str(slope)))
    return compile_build(KernelBuild("probe", macros), "90", text)


@pytest.mark.parametrize(("kind", "most"), [("float", 24), ("double", 40)])
@pytest.mark.parametrize("name", NAMES)
def test_an_activation_stays_in_registers_and_a_value_needs_no_derivative(text, name, kind, most):
    cubin, both, log = compiled(text, name, kind)
    usage = resource_usage(log)
    assert (usage.stack, usage.spill_stores, usage.spill_loads, usage.shared) == (0, 0, 0, 0)
    assert usage.registers <= most
    if kind == "float" and name not in ("identity", "relu"):
        assert SLOW_PATH not in cubin
        _, value, _ = compiled(text, name, kind, slope=0)
        assert value.count(";") < both.count(";") - 4, "a value alone takes fewer instructions"
        assert value.count("ex2.") == 1
        assert both.count("ex2.") == (2 if name in ("tanh", "gelu") else 1)


def test_a_division_with_a_slow_path_is_found(text):
    right = "__fdividef(1.0f, v)"
    assert right in text
    assert SLOW_PATH in compiled(text.replace(right, "1.0f / v"), "silu", "float")[0]
