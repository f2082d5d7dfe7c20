# SPDX-License-Identifier: MIT
"""Operands of JAX arrays, which go in and out through DLPack capsules."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from cunorm._arrays import CPU, contiguous_form, describe, numpy_view
from cunorm._arrays._dlpack import read_capsule
from cunorm._arrays._jax import JAX, _Exporter
from cunorm._dtypes import BFLOAT16, DTYPES, FLOAT32, FLOAT64

jax = pytest.importorskip("jax")
jnp = jax.numpy

DTYPE_NAMES = ["float16", "bfloat16", "float32"]


def some_array(dtype="float32"):
    return jnp.arange(12).reshape(3, 4).astype(dtype)


def filled_output(dtype=FLOAT32, shape=(3, 4)):
    operand = JAX.allocate(contiguous_form(shape, dtype, CPU))
    numpy_view(operand)[...] = np.arange(np.prod(shape)).reshape(shape)
    return operand


def run_script(script, **environment):
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_an_array_is_described_without_a_copy_and_never_to_be_written(dtype):
    array = some_array(dtype)
    operand = describe("f", "x", array)
    assert operand.pointer == array.unsafe_buffer_pointer()
    assert (operand.shape, operand.strides) == ((3, 4), (4, 1))
    assert operand.dtype is DTYPES[dtype]
    assert (operand.device, operand.framework.name, operand.writable) == (CPU, "jax", False)


def test_float64_arrays_are_described_and_made_where_x64_is_on():
    with jax.enable_x64(True):
        operand = describe("f", "x", some_array("float64"))
        assert operand.dtype is FLOAT64
        assert JAX.export(filled_output(FLOAT64)).dtype == "float64"


def test_a_float64_output_is_refused_where_jax_would_cut_it_to_float32():
    with pytest.raises(TypeError, match=r"float64 JAX array .*'jax_enable_x64', True"):
        JAX.allocate(contiguous_form((3,), FLOAT64, CPU))


@pytest.mark.parametrize("shape", [(), (0, 4), (1, 1)])
def test_scalars_and_empty_arrays_go_both_ways(shape):
    assert describe("f", "x", jnp.ones(shape)).shape == shape
    assert JAX.export(filled_output(shape=shape)).shape == shape


def test_an_input_is_described_only_once_its_values_are_there():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ x), x))
    x = jnp.eye(300) * 1e-3 + 0.5
    expected = np.asarray(slow(x))
    for _ in range(3):
        assert np.array_equal(numpy_view(describe("f", "x", slow(x))), expected)


def test_an_operand_keeps_the_memory_of_a_deleted_array():
    array = some_array()
    operand = describe("f", "x", array)
    array.delete()
    assert np.array_equal(numpy_view(operand), np.arange(12).reshape(3, 4))


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_a_tracer_is_refused_and_pointed_to_the_jax_front_end(transform):
    def function(x):
        describe("rms_norm", "x", x)
        return x.sum()

    with pytest.raises(TypeError, match=r"^rms_norm: x is a JAX tracer.*: use cunorm\.jax there"):
        getattr(jax, transform)(function)(some_array())


def test_a_deleted_array_is_refused():
    array = some_array()
    array.delete()
    with pytest.raises(ValueError, match=r"^rms_norm: x is a deleted or donated.*copy\(x\)$"):
        describe("rms_norm", "x", array)


def test_a_donated_array_is_refused():
    array = some_array()
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    with pytest.raises(ValueError, match="deleted or donated"):
        describe("rms_norm", "x", array)


def test_an_array_over_several_devices_is_refused_and_one_on_the_second_is_not():
    run_script(
        "import jax\n"
        "from cunorm._arrays import describe\n"
        "devices = jax.devices()\n"
        "x = jax.numpy.ones((4, 4))\n"
        "second = jax.device_put(x, devices[1])\n"
        "assert describe('f', 'x', second).pointer == second.unsafe_buffer_pointer()\n"
        "mesh = jax.sharding.Mesh(devices, 'd')\n"
        "for spec in (jax.P('d'), jax.P()):\n"
        "    y = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))\n"
        "    try:\n"
        "        describe('rms_norm', 'x', y)\n"
        "    except ValueError as error:\n"
        "        assert 'rms_norm: x is spread over 2 devices' in str(error), error\n"
        "        assert 'jax.device_put(x, one_device)' in str(error), error\n"
        "    else:\n"
        "        raise SystemExit('not refused')\n",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: jnp.arange(3), "int32"),
        (lambda: jnp.ones(3, "complex64"), "complex64"),
        (lambda: jnp.ones(3, "float8_e4m3fn"), "float8_e4m3fn"),
        (lambda: jax.random.key(0), "key<fry>"),
    ],
)
def test_other_dtypes_are_refused_by_name(make, name):
    with pytest.raises(TypeError, match=f"^rms_norm: x has dtype {name}, expected float16, bfl"):
        describe("rms_norm", "x", make())


def test_a_shape_without_values_is_no_array():
    with pytest.raises(TypeError, match=r"^f: x is of type ShapeDtypeStruct, expected a NumPy"):
        describe("f", "x", jax.ShapeDtypeStruct((3,), "float32"))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_an_output_becomes_a_jax_array_at_the_very_address_that_was_written_to(dtype):
    operand = filled_output(DTYPES[dtype])
    array = JAX.export(operand)
    assert isinstance(array, jax.Array)
    assert array.unsafe_buffer_pointer() == operand.pointer
    assert operand.pointer % 64 == 0
    assert (array.dtype, array.shape) == (dtype, (3, 4))
    assert jnp.array_equal(array, some_array(dtype))


def test_an_exported_array_outlives_every_reference_of_ours_and_frees_the_buffer_at_its_end():
    operand = filled_output(BFLOAT16)
    array = JAX.export(operand)
    buffer = weakref.ref(operand.owner)
    del operand
    gc.collect()
    assert buffer() is not None
    assert jnp.array_equal(array, some_array("bfloat16"))
    del array
    gc.collect()
    assert buffer() is None


def test_an_exported_array_may_die_on_another_thread():
    operand = filled_output()
    holder, buffer = [JAX.export(operand)], weakref.ref(operand.owner)
    del operand
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert buffer() is None


def test_a_capsule_that_nobody_consumes_frees_the_buffer():
    operand = filled_output(BFLOAT16)
    buffer = weakref.ref(operand.owner)
    capsule = _Exporter(operand).__dlpack__()
    del operand
    gc.collect()
    assert buffer() is not None
    read_capsule(capsule)
    del capsule
    gc.collect()
    assert buffer() is None


def test_an_exception_on_its_way_up_survives_the_end_of_an_exported_array():
    def fail(array):
        raise KeyError("mine")

    for _ in range(100):
        with pytest.raises(KeyError, match="mine"):
            fail(JAX.export(filled_output()))


def test_arrays_that_are_alive_at_exit_do_no_harm():
    run_script(
        "import jax, builtins\n"
        "from cunorm._arrays import CPU, contiguous_form, describe\n"
        "from cunorm._dtypes import BFLOAT16\n"
        "jax_of = describe('f', 'x', jax.numpy.ones(3)).framework\n"
        "form = contiguous_form((1 << 22,), BFLOAT16, CPU)\n"
        "builtins.kept = jax_of.export(jax_of.allocate(form))\n"
        "kept_too = jax_of.export(jax_of.allocate(form))\n"
        "pending = jax.jit(lambda x: jax.numpy.sin(x).sum())(kept_too)\n"
        "operand = describe('f', 'x', builtins.kept)\n"
    )


def test_contiguous_copies_into_c_order():
    operand = describe("f", "x", some_array())
    copy = JAX.contiguous(operand)
    assert copy.pointer != operand.pointer
    assert (copy.strides, copy.framework) == ((4, 1), operand.framework)
    assert np.array_equal(numpy_view(copy), some_array())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_cuda_array_goes_both_ways_without_a_copy(dtype):
    cupy = pytest.importorskip("cupy")
    if jax.default_backend() != "gpu":
        pytest.skip("jax sees no CUDA device")
    array = some_array(dtype)
    with cupy.cuda.Stream():
        operand = describe("f", "x", array)
        assert operand.pointer == array.unsafe_buffer_pointer()
        assert operand.device == ("cuda", 0)
        output = JAX.allocate(contiguous_form((3, 4), DTYPES[dtype], operand.device))
        cupy.cuda.runtime.memcpyAsync(
            output.pointer, operand.pointer, array.nbytes, 3, JAX.stream(operand.device)
        )
        result = JAX.export(output)
    assert result.unsafe_buffer_pointer() == output.pointer
    assert (result.dtype, result.devices()) == (dtype, array.devices())
    assert jnp.array_equal(result, array)
