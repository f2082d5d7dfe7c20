# SPDX-License-Identifier: MIT
"""Rows that are split: `axis_name` of cunorm.jax, and the pieces on JAX arrays.

`jax_split` has the checks on four devices, of which test_processes.py runs some.
"""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

import cunorm
from tests.support.calls import fields
from tests.support.operands import draw
from tests.support.processes import in_process
from tests.support.real_gpu import XLA_FLAGS

jax = pytest.importorskip("jax", reason="JAX is not installed")

import cunorm.jax  # noqa: E402
from tests.support import jax_split  # noqa: E402
from tests.support.jax_frames import _ffi, calls_of  # noqa: E402

P = jax.P
TWO = jax.sharding.AbstractMesh((2,), ("tp",))  # enough to trace a function
COLUMNS = P(None, "tp")
COLLECTIVES = ("all_gather", "psum", "all_to_all", "permute", "scatter", "pmax", "pmin")


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", jax_split.MESHES)
def test_rows_that_are_split_over_devices_are_normalised_as_whole_rows(mesh):
    script = "import runpy, sys; sys.argv[1:] = [{!r}]; runpy.run_path({!r}, run_name='__main__')"
    flags = f"--xla_force_host_platform_device_count=4 {XLA_FLAGS}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    script = script.format(mesh, jax_split.__file__)
    assert in_process(script, setup="", **environment) == "checked\n"


# --- exchanges ------------------------------------------------------------------------------------


def equations(jaxpr):
    """Yield all equations, also those of inner functions."""
    for equation in jaxpr.eqns:
        yield equation
        if str(equation.primitive) == "cunorm":
            yield from equations(jaxpr_of(equation))
        for inner in jax.tree.leaves([*equation.params.values()], is_leaf=has_equations):
            if has_equations(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def jaxpr_of(equation):
    """Return what an equation of cunorm's primitive runs on each device."""
    shapes = [(2 * one.aval.shape[0], *one.aval.shape[1:]) for one in equation.invars]
    pairs = zip(shapes, equation.invars, strict=True)
    arrays = [jax.ShapeDtypeStruct(shape, one.aval.dtype) for shape, one in pairs]
    run = jax.shard_map(
        equation.params["function"].run, mesh=TWO, in_specs=P("tp"), out_specs=P("tp")
    )
    return jax.make_jaxpr(run)(*arrays).jaxpr


def has_equations(one):
    return hasattr(one, "eqns") or hasattr(getattr(one, "jaxpr", None), "eqns")


def exchanges(jaxpr):
    """Return the name and the bytes of each array that devices exchange."""
    found = []
    for equation in equations(jaxpr):
        if any(part in str(equation.primitive) for part in COLLECTIVES):
            (sent,) = (one.aval for one in equation.invars)
            found.append((str(equation.primitive), sent.size * sent.dtype.itemsize))
    return found


PRE, BRANCH = ({"gate_position": one} for one in ("pre", "branch"))
# The function, its operands besides x, its options, the operands with a wanted gradient, and the
# bytes that a device sends for each row, forward and backward.
EXCHANGES = [
    ("layer_norm", ("weight", "bias"), {}, "x weight bias", [12, 8]),
    ("layer_norm", ("weight", "bias"), {}, "weight bias", [12]),
    ("rms_norm", ("weight",), {}, "x", [4, 4]),
    ("rms_norm", ("gate",), {}, "gate", [4]),
    ("rms_norm", ("gate",), PRE, "gate", [4, 4]),
    ("l2_norm", (), {}, "x", [4, 4]),
    ("add_rms_norm", ("residual",), {}, "residual", [4, 4]),
    ("add_normalize", ("residual", "gate"), {"center": True} | BRANCH, "gate", [12, 8]),
]


@pytest.mark.parametrize(("function", "given", "options", "wanted", "sizes"), EXCHANGES)
def test_devices_exchange_few_bytes_once_in_each_direction(function, given, options, wanted, sizes):
    rows, width = 6, 32
    shapes = dict.fromkeys(("x", *given), (rows, width))
    shapes |= {name: (width,) for name in ("weight", "bias") if name in given}
    specs = {name: COLUMNS if len(shape) == 2 else P("tp") for name, shape in shapes.items()}
    norm = partial(getattr(cunorm.jax, function), **options, axis_name="tp")
    mapped = jax.shard_map(
        lambda arrays: jax.tree.leaves(norm(**arrays))[0],
        mesh=TWO,
        in_specs=(specs,),
        out_specs=COLUMNS,
    )

    def loss(own, others):
        return mapped(own | others).sum()

    arrays = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    own = {name: arrays.pop(name) for name in wanted.split()}
    forward = jax.make_jaxpr(jax.jit(lambda own, others: jax.vjp(loss, own, others)[0]))
    pushed = jax.make_jaxpr(
        jax.jit(lambda own, others: jax.jvp(partial(loss, others=others), (own,), (own,)))
    )
    both = jax.make_jaxpr(jax.jit(jax.grad(loss)))(own, arrays).jaxpr
    expected = [("all_gather", size * rows) for size in sizes]
    assert exchanges(both) == expected
    assert exchanges(forward(own, arrays).jaxpr) == expected[:1]
    assert exchanges(pushed(own, arrays).jaxpr) == expected


def test_a_stream_that_is_used_alone_exchanges_nothing_backward():
    def norm(x, gate):
        split = partial(cunorm.jax.add_rms_norm, gate_position="branch", axis_name="tp")
        return split(x, None, gate=gate).residual

    mapped = jax.shard_map(norm, mesh=TWO, in_specs=(COLUMNS, COLUMNS), out_specs=COLUMNS)
    array = jax.ShapeDtypeStruct((6, 32), np.float32)
    derived = jax.grad(lambda *arrays: mapped(*arrays).sum(), (0, 1))
    assert exchanges(jax.make_jaxpr(jax.jit(derived))(array, array).jaxpr) == [("all_gather", 24)]


def test_a_batch_of_examples_makes_as_many_calls_as_one_example():
    def derived(x, weight):
        norm = partial(cunorm.jax.layer_norm, axis_name="tp")
        return jax.vjp(norm, x, weight)[1](x)

    def calls(derived, *shapes, columns):
        mapped = jax.shard_map(derived, mesh=TWO, in_specs=columns, out_specs=columns)
        arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        names = [str(one.primitive) for one in equations(jax.make_jaxpr(mapped)(*arrays).jaxpr)]
        assert not {"scan", "while"} & {*names}
        return names.count("all_gather"), names.count("ffi_call")

    one = calls(derived, (6, 32), (32,), columns=(COLUMNS, P("tp")))
    of_three = P(None, None, "tp"), P(None, "tp")
    assert calls(jax.vmap(derived), (3, 6, 32), (3, 32), columns=of_three) == one
    assert one == (2, 2 * 5)  # five calls, each for a CPU and for CUDA


# --- which axes -----------------------------------------------------------------------------------


def test_an_axis_of_one_device_makes_the_calls_of_whole_rows():
    mesh = jax.sharding.Mesh(jax.devices()[:1], "tp")

    def derived(x, **options):
        norm = partial(cunorm.jax.layer_norm, **options)
        mapped = jax.shard_map(norm, mesh=mesh, in_specs=COLUMNS, out_specs=COLUMNS)
        return jax.grad(lambda x: mapped(x).sum())(x)

    x = np.ones((3, 8), np.float32)
    found, right = (calls_of(partial(derived, axis_name=name), x) for name in ("tp", None))
    assert found == right
    assert len(right) == 2


EXPECTED = (
    "expected the name of an axis of jax.shard_map around this call, or a tuple of different names"
)


def mapped_over_columns(norm):
    return jax.shard_map(norm, mesh=TWO, in_specs=COLUMNS, out_specs=COLUMNS)


@pytest.mark.parametrize("name", ["dp", ("tp", "dp"), ("tp", "tp"), (), ["tp"], 0])
def test_a_name_of_no_axis_is_refused(name):
    norm = partial(cunorm.jax.rms_norm, axis_name=name)
    array = jax.ShapeDtypeStruct((6, 32), np.float32)
    for around in (jax.jit, mapped_over_columns):
        with pytest.raises(ValueError, match="rms_norm: axis_name is ") as caught:
            jax.eval_shape(around(norm), array)
        assert str(caught.value) == f"rms_norm: axis_name is {name!r}, {EXPECTED}"


def test_an_axis_of_vmap_is_refused():
    with pytest.raises(ValueError, match=f"layer_norm: axis_name is 'i', {EXPECTED}"):
        jax.vmap(partial(cunorm.jax.layer_norm, axis_name="i"), axis_name="i")(np.ones((2, 3, 8)))


@pytest.mark.parametrize(
    ("options", "specs", "text"),
    [
        ({"groups": 2}, COLUMNS, r"is 'tp' and groups is 2, expected groups=1: give each device"),
        ({}, P(), r"is 'tp', but x does not vary over 'tp', expected rows that are split over it"),
    ],
)
def test_groups_and_rows_that_are_not_split_are_refused(options, specs, text):
    norm = partial(cunorm.jax.rms_norm, axis_name="tp", **options)
    mapped = jax.shard_map(norm, mesh=TWO, in_specs=specs, out_specs=specs)
    with pytest.raises(ValueError, match=f"rms_norm: axis_name {text}"):
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((6, 32), np.float32))


# --- the pieces -----------------------------------------------------------------------------------


def test_moments_have_one_build_for_all_roundings_of_y():
    def moments(**options):
        norm = partial(cunorm.jax.rms_norm, axis_name="tp", **options)
        jaxpr = jax.make_jaxpr(mapped_over_columns(norm))(np.ones((6, 32), jax.numpy.bfloat16))
        texts = [
            str(one.params["attributes"])
            for one in equations(jaxpr.jaxpr)
            if "ffi_call" in str(one.primitive)
        ]
        return [text for text in texts if "row_moments" in text]

    assert moments(round_before_weight=True) == moments()
    assert len(moments()) == 2  # for a CPU and for CUDA


def test_the_pieces_take_jax_arrays_and_give_the_bits_of_numpy(monkeypatch):
    """A second round of the same calls traces nothing."""
    right = pieces(np.asarray)
    first = pieces(jax.numpy.asarray)
    monkeypatch.setattr(_ffi, "_ffi_call", Mock(side_effect=AssertionError("traced again")))
    for found in (first, pieces(jax.numpy.asarray)):
        assert found.keys() == right.keys()
        for name, array in found.items():
            assert isinstance(array, jax.Array), name
            np.testing.assert_array_equal(array, right[name], err_msg=name)


def pieces(put):
    """Return all results of a norm of two parts of rows, by names."""
    shape, results = (3, 64), {}
    x, dy = (put(draw(name, shape, "float32")) for name in ("x", "dy"))
    weight, bias = (put(draw(name, shape[1:], "float32")) for name in ("weight", "bias"))
    moments = cunorm.row_moments(x, center=True)
    parts = [put(np.stack([one, one])) for one in (moments.mean, moments.m2, moments.correction)]
    stacked = cunorm.Moments(*parts[:2], 64, parts[2])
    given = cunorm.combine_moments(stacked, eps=1e-5)
    y = cunorm.layer_norm(x, weight, bias, **given._asdict())
    sums = cunorm.normalize_backward_sums(dy, x, weight, **given._asdict(), center=True)
    grads = cunorm.layer_norm_backward(dy, x, weight, bias, **given._asdict(), sums=sums, count=128)
    assert moments.count == 64
    for number, result in enumerate((moments._replace(count=None), given, y, sums, grads)):
        results |= {f"{name} of {number}": one for name, one in fields(result).items()}
    return results
