# SPDX-License-Identifier: MIT
"""cunorm.jax in interpreters of their own: several devices, ends of processes, imports."""

from __future__ import annotations

import pytest

from tests.support.processes import in_process

pytest.importorskip("jax", reason="JAX is not installed")

from tests.support import jax_devices

ON_CPU = {"JAX_PLATFORMS": "cpu"}
SETUP = """
import pickle, sys, warnings
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
import cunorm, cunorm.jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from tests.support.jax_devices import (
    RESIDUAL, WEIGHT, X, assert_alike, formula, loss, slow
)
"""


def test_shard_map_and_pmap_over_four_devices_with_gradients():
    """dweight is summed over the devices; kernels of several threads run on all of them at once.

    The process ends by itself, with calls still to be run.
    """
    script = f"import runpy; runpy.run_path({jax_devices.__file__!r}, run_name='__main__')"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    printed = in_process(script, setup="", timeout=300, **ON_CPU, **flags)
    assert len(printed.split()) == 7


def test_an_executable_of_another_process_runs_in_this_one_and_processes_end_while_calls_run(
    tmp_path,
):
    path = tmp_path / "executable"
    in_process(
        f"""
derived = jax.jit(jax.grad(lambda w, x: cunorm.jax.rms_norm(x, w).sum()))
compiled = derived.lower(WEIGHT, X).compile()
Path({str(path)!r}).write_bytes(pickle.dumps(serialize(compiled)))
pending = jax.jit(slow)(jnp.ones((256, 256)))
del pending
sys.exit()
""",
        setup=SETUP,
        **ON_CPU,
    )
    in_process(
        f"""
compiled = deserialize_and_load(*pickle.loads(Path({str(path)!r}).read_bytes()))
assert_alike(compiled(WEIGHT, X), formula(X, 0, jnp.ones(16))[0].sum(0))
""",
        setup=SETUP,
        **ON_CPU,
    )


def test_without_a_compiler_the_reference_does_the_work_with_one_warning():
    in_process(
        """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        assert_alike(cunorm.jax.add_rms_norm(X, RESIDUAL, WEIGHT), formula(X, RESIDUAL, WEIGHT))
        both = [
            jax.grad(lambda *a, f=f: loss(f, *a), (0, 1, 2))(X, RESIDUAL, WEIGHT)
            for f in (cunorm.jax.add_rms_norm, formula)
        ]
        assert_alike(*both)
    narrow = cunorm.jax.layer_norm(X.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
assert ["no C++ compiler" in str(warning.message) for warning in caught] == [True], caught
""",
        setup=SETUP,
        PATH="",
        CXX="no-such-compiler",
        **ON_CPU,
    )


def test_a_jax_of_another_interface_is_refused_and_served_by_the_plain_functions(tmp_path):
    """Nor does an import of cunorm.jax bring in another framework."""
    place = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    place.parent.mkdir(parents=True)
    place.write_text("#define XLA_FFI_API_MAJOR 7\n\n#define XLA_FFI_API_MINOR 12\n")
    in_process(
        f"""
import sys, cunorm
assert not [name for name in ("jax", "jaxlib", "torch") if name in sys.modules]
import jax, numpy as np
jax.ffi.include_dir = lambda: {str(tmp_path)!r}
import cunorm.jax
x = jax.numpy.arange(1.0, 17).reshape(2, 8)
try:
    cunorm.jax.rms_norm(x)
except ImportError as error:
    assert "cunorm.jax: this JAX's" in str(error), error
    assert "is of version 7.12, expected 0.3 or a later 0.x" in str(error), error
else:
    raise AssertionError("not refused")
y = cunorm.rms_norm(x)
assert isinstance(y, jax.Array)
np.testing.assert_allclose(y, cunorm.reference.rms_norm(np.asarray(x)), rtol=1e-6)
assert not [name for name in ("torch", "cupy") if name in sys.modules]
""",
        setup="",
        **ON_CPU,
    )
