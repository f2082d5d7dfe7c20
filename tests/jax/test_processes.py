# SPDX-License-Identifier: MIT
"""cunorm.jax in separate interpreters: several devices, exits, imports."""

from __future__ import annotations

import pickle

import pytest

from tests.support.processes import in_process
from tests.support.real_gpu import XLA_FLAGS

jax = pytest.importorskip("jax", reason="JAX is not installed")

from jax.experimental.serialize_executable import serialize  # noqa: E402

import cunorm.jax  # noqa: E402
from tests.support import jax_devices  # noqa: E402

ON_CPU = {"JAX_PLATFORMS": "cpu"}


def test_four_devices_and_an_executable_of_another_process_are_right(tmp_path):
    """The process exits while calls are pending."""
    path, devices = tmp_path / "executable", jax_devices
    derived = jax.jit(jax.grad(lambda w, x: cunorm.jax.rms_norm(x, w).sum()))
    compiled = derived.lower(devices.WEIGHT, devices.X).compile()
    path.write_bytes(pickle.dumps(serialize(compiled)))
    script = "import runpy, sys; sys.argv[1:] = [{!r}]; runpy.run_path({!r}, run_name='__main__')"
    flags = f"--xla_force_host_platform_device_count=4 {XLA_FLAGS}"
    script = script.format(str(path), devices.__file__)
    assert in_process(script, setup="", timeout=300, **ON_CPU, XLA_FLAGS=flags) == "checked\n"


def test_without_a_compiler_the_reference_does_the_work_with_one_warning():
    in_process(
        """
import warnings
import jax, jax.numpy as jnp
import cunorm.jax
from tests.support.jax_devices import RESIDUAL, WEIGHT, X, assert_close, exact, loss
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    derived = jax.grad(lambda *arrays: loss(cunorm.jax.add_rms_norm, *arrays), (0, 1, 2))
    for _ in range(2):
        assert_close(derived(X, RESIDUAL, WEIGHT), exact(X, RESIDUAL, WEIGHT))
    narrow = cunorm.jax.layer_norm(X.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
text = "no C++ compiler (CXX=no-such-compiler does not answer), so"
assert [text in str(warning.message) for warning in caught] == [True], caught
""",
        setup="",
        PATH="",
        CXX="no-such-compiler",
        **ON_CPU,
    )


def test_cunorm_jax_refuses_a_jax_of_another_interface_but_plain_functions_serve_it(tmp_path):
    """Also, cunorm imports no framework, and cunorm.jax only JAX."""
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 7\n\n#define XLA_FFI_API_MINOR 12\n")
    in_process(
        rf"""
import sys, cunorm
assert not [name for name in ("jax", "jaxlib", "torch") if name in sys.modules]
import jax, numpy as np, pytest
jax.ffi.include_dir = lambda: {str(tmp_path)!r}
import cunorm.jax
x = jax.numpy.arange(1.0, 17).reshape(2, 8)
refusal = r"cunorm\.jax: this JAX's .* is of version 7\.12, expected 0\.3 or a later 0\.x"
with pytest.raises(ImportError, match=refusal):
    cunorm.jax.rms_norm(x)
y = cunorm.rms_norm(x)
assert isinstance(y, jax.Array)
np.testing.assert_allclose(y, cunorm.reference.rms_norm(np.asarray(x)), rtol=1e-6)
assert not [name for name in ("torch", "cupy") if name in sys.modules]
""",
        setup="",
        **ON_CPU,
    )
