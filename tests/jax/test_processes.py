# SPDX-License-Identifier: MIT
"""cunorm.jax in interpreters of their own: several devices, ends of processes, imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import in_process

pytest.importorskip("jax", reason="JAX is not installed")

FOUR_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
SETUP = """
import sys
import jax, jax.numpy as jnp, numpy as np
import cunorm, cunorm.jax
from jax import P

rng = np.random.default_rng(0)
x, residual, weight = (
    jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((8, 16), (8, 16), (16,))
)

def formula(x, residual, weight):
    s = x + residual
    return s * jax.lax.rsqrt((s * s).mean(-1, keepdims=True) + 1e-6) * weight, s

def loss(norm, *arrays):
    y, stream = norm(*arrays)
    return (y**2 * jnp.arange(16.0)).sum() + (stream**3).sum()

def assert_alike(actual, expected):
    for got, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # A few roundings of float32, in sums of 8 terms of up to about 100.
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-4)
"""


def test_shard_map_and_pmap_over_four_devices_with_gradients():
    """dweight is summed over the devices; kernels of several threads run on all of them at once."""
    script = Path(__file__).parents[1] / "support" / "jax_devices.py"
    printed = in_process(
        f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')",
        setup="",
        **FOUR_DEVICES,
    )
    assert len(printed.split()) == 7


@pytest.mark.parametrize("end", ["", "sys.exit()", "del pending", "raise SystemExit(0)"])
def test_a_process_ends_with_calls_still_to_be_run(end):
    in_process(
        f"""
@jax.jit
def slow(x):
    again = lambda _, x: cunorm.jax.rms_norm(jnp.tanh(x @ x))
    return jax.lax.fori_loop(0, 400, again, x)

x = jnp.ones((256, 256))
slow.lower(x).compile()
pending = [slow(jax.device_put(x, device)) for device in jax.devices()]
{end}
""",
        setup=SETUP,
        timeout=60,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )


def test_an_executable_of_another_process_runs_in_this_one(tmp_path):
    path = tmp_path / "executable"
    names = "from jax.experimental.serialize_executable import deserialize_and_load, serialize"
    in_process(
        f"""
import pickle
from pathlib import Path
{names}
derived = jax.jit(jax.grad(lambda w, x: cunorm.jax.rms_norm(x, w).sum()))
compiled = derived.lower(weight, x).compile()
Path({str(path)!r}).write_bytes(pickle.dumps(serialize(compiled)))
""",
        setup=SETUP,
    )
    in_process(
        f"""
import pickle
from pathlib import Path
{names}
compiled = deserialize_and_load(*pickle.loads(Path({str(path)!r}).read_bytes()))
y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
assert_alike(compiled(weight, x), y.sum(0))
""",
        setup=SETUP,
    )


def test_without_a_compiler_the_reference_does_the_work_with_one_warning():
    in_process(
        """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        assert_alike(cunorm.jax.add_rms_norm(x, residual, weight), formula(x, residual, weight))
        both = [
            jax.grad(lambda *a, f=f: loss(f, *a), (0, 1, 2))(x, residual, weight)
            for f in (cunorm.jax.add_rms_norm, formula)
        ]
        assert_alike(*both)
    narrow = cunorm.jax.layer_norm(x.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
assert ["no C++ compiler" in str(warning.message) for warning in caught] == [True], caught
""",
        setup=SETUP,
        PATH="",
        CXX="no-such-compiler",
        JAX_PLATFORMS="cpu",
    )


def test_imports_bring_in_no_other_framework():
    printed = in_process(
        "import sys, cunorm\n"
        "print([name for name in ('jax', 'jaxlib', 'torch') if name in sys.modules])\n"
        "import cunorm.jax\n"
        "cunorm.jax.rms_norm(cunorm.jax._launch.jnp.ones((2, 8)))\n"
        "print([name for name in ('torch', 'cupy') if name in sys.modules])\n",
        setup="",
    )
    assert printed.split("\n")[:2] == ["[]", "[]"]
