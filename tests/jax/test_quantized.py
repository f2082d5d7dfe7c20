# SPDX-License-Identifier: MIT
"""Quantised norms of cunorm.jax: their bits, also in batches and loops, and no derivatives."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.kinds import OnJax, OnJaxCpu
from tests.support.operands import at, draw

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cunorm.jax  # noqa: E402
from tests.support.jax_frames import Call, _adapter, calls_of, lowered  # noqa: E402

rms = partial(cunorm.jax.rms_norm_quantized, return_y=True)
# By name: the options, and the largest magnitude of q.
FORMATS = {
    "float8_e4m3fn": ({"dtype": "float8_e4m3fn"}, 448),
    "float8_e5m2": ({"dtype": "float8_e5m2"}, 57344),
    "int8": ({"dtype": "int8"}, 127),
    "mxfp8": ({"block": 32, "scale_dtype": "float8_e8m0fnu"}, 448),
}


def drawn(*shape, name="x"):
    """Draw rows with magnitudes from about 0.01 to 100."""
    return jnp.asarray(
        draw(name, shape, "float32") * np.float32(np.geomspace(0.01, 100, shape[-1]))
    )


def scales(*shape):
    return jnp.asarray(np.exp(draw("scale", shape, "float32") - 4))


def assert_same(found, right):
    """Compare bits, dtypes and shapes."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    for number, (one, expected) in enumerate(pairs):
        with at(f"result {number}"):
            one, expected = np.asarray(one), np.asarray(expected)
            assert (one.dtype, one.shape) == (expected.dtype, expected.shape)
            assert one.tobytes() == expected.tobytes()


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, OnJaxCpu) for name in FORMATS), pytest.param("mxfp8", OnJax, marks=pytest.mark.gpu)],
)
def test_q_and_scale_have_the_bits_of_the_oracle_and_of_jaxs_clip_and_cast(name, kind):
    options, largest = FORMATS[name]
    with_types = {key: getattr(jnp, str(one), one) for key, one in options.items()}
    with jax.default_device(kind().device):
        x = drawn(4, 72).at[1].set(0).at[3, 2].set(jnp.nan)
        found = rms(x, **options)
        assert_same(jax.jit(partial(rms, **with_types))(x), found)
        assert_same(cunorm.rms_norm_quantized(x, return_y=True, **options), found)
        assert_same(found.y, cunorm.jax.rms_norm(x))
    y, scale = np.asarray(found.y), np.asarray(found.scale)
    assert_same((found.q, scale), reference.quantize(y, **options))
    # NumPy divides, because XLA on a CPU multiplies by inverses instead, which rounds twice.
    each = np.repeat(np.float32(scale), options.get("block", 72), -1)[:, :72]
    quotients = y * (1 / each) if name == "int8" else y / each
    clipped = jnp.clip(quotients[:3], -largest, largest)  # JAX's casts of NaN have other bits
    right = jnp.rint(clipped).astype(jnp.int8) if name == "int8" else clipped.astype(found.q.dtype)
    assert_same(found.q[:3], right)


def test_results_that_xla_does_not_allocate_have_the_same_dtypes_and_bits():
    x = drawn(4, 72)
    mesh = jax.sharding.Mesh([OnJaxCpu().device], "d")
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P()))
    for name, (options, *_) in FORMATS.items():
        with at(name):
            found = cunorm.rms_norm_quantized(sharded, return_y=True, **options)
            assert all(isinstance(one, jax.Array) for one in found[:3])
            assert_same(found, rms(x, **options))
    found = cunorm.rms_norm_quantized(x, scale=np.asarray(scales(4, 1)), return_y=True)
    assert isinstance(found.q, jax.Array)
    assert_same(found, rms(x, scale=scales(4, 1)))


def test_a_layer_norm_of_a_stream_has_the_bits_of_its_namesake_with_numpy():
    arrays = [drawn(4, 72), drawn(72, name="weight"), drawn(72, name="bias")]
    norm, plain = cunorm.jax.layer_norm_quantized, cunorm.layer_norm_quantized
    found = jax.jit(lambda *arrays: norm(*arrays, residual=arrays[0], absmax_bound=2.0))(*arrays)
    x, *others = map(np.asarray, arrays)
    right = plain(x, *others, residual=x, absmax_bound=2.0)
    assert found.residual.shape == x.shape
    assert_same(found, right)


# A tuple is the shape of an array.
ALL_OPTIONS = {
    **{"residual": (2, 3, 8), "bias": (8,), "gate": (2, 3, 8), "residual_dtype": "float16"},
    **{"eps": 0.25, "axis": 2, "groups": 2, "weight_offset": 1.0, "round_before_weight": True},
    **{"gate_activation": "tanh", "gate_position": "pre", "dtype": jnp.float8_e5m2, "block": 64},
    **{"scale_dtype": "float8_e8m0fnu", "absmax_bound": 5.0, "return_y": True},
}
OF_ONE = {
    "rms_norm_quantized": [{}],
    "layer_norm_quantized": [{}],
    "normalize_quantized": [{"c": 0.0, "center": True}, {"c": -0.0, "center": True}],
}


@pytest.mark.parametrize("name", OF_ONE)
def test_every_argument_has_the_meaning_that_it_has_in_the_namesake(name, monkeypatch):
    made = []

    def record(_, op, spec, arrays):
        made.append(Call.on(op, spec, arrays[: op.first_output]).text())
        raise InterruptedError

    monkeypatch.setattr(_adapter.JaxAdapter, "dispatch", record)
    x, weight = jnp.ones((2, 3, 8)), jnp.ones(8)
    with_all = [ALL_OPTIONS | own for own in OF_ONE[name]]
    for options in ({}, {"scale": 0.5}, {"scale": (2, 3, 1)}, *with_all):
        arrays = {key: jnp.ones(one) for key, one in options.items() if isinstance(one, tuple)}
        with at(f"{options}"):
            with pytest.raises(InterruptedError):
                getattr(cunorm, name)(x, weight, **options | arrays)
            (call,) = calls_of(partial(getattr(cunorm.jax, name), **options | arrays), x, weight)
            assert call.text == made.pop()


def test_a_given_scale_is_returned_and_may_be_traced():
    x, scale = drawn(4, 72), jnp.float32(0.5)
    right = rms(x, scale=scale)
    assert right.scale is scale
    assert_same(right[:2], reference.quantize(np.asarray(right.y), scale=0.5))
    found = rms(x, scale=0.5)
    assert found.scale == 0.5
    assert_same((found.q, found.y), (right.q, right.y))
    assert_same(jax.jit(lambda x, scale: rms(x, scale=scale))(x, 0.5), right)
    parameter = type("Parameter", (), {"__jax_array__": lambda self: scale})()
    assert_same(rms(x, scale=parameter), right)


# --- transformations ------------------------------------------------------------------------------

# By name: the axes of examples of x and scale for one vmap or more, the outer one first; the shapes
# of x and scale; the options.
BATCHES = {
    "scales that are found": ([(2,)], [(3, 72, 4)], {}),
    "a number for all": ([(0, None)], [(4, 3, 72), ()], {}),
    "a number of each example": ([(0, 0)], [(4, 3, 72), (4,)], {}),
    "a number of each example, with axes": ([(0, 1)], [(4, 3, 72), (1, 4, 1)], {}),
    "a number of each row, for all examples": ([(0, None)], [(3, 3, 72), (3, 1)], {}),
    "examples along the last axes": ([(2, 2)], [(3, 72, 4), (3, 1, 4)], {}),
    "scales of one x": ([(None, 0)], [(3, 72), (4, 3, 1)], {}),
    "rows without leading axes": ([(0, 0)], [(4, 72), (4,)], {}),
    "rows of two axes": ([(0, 0)], [(4, 3, 2, 36), (4, 3, 1, 1)], {"axis": 1}),
    "groups of columns": ([(1, 1)], [(3, 4, 72), (3, 4, 2)], {"groups": 2}),
    "twice, numbers of the outer examples": ([(0, 0), (1, None)], [(4, 3, 5, 72), (4,)], {}),
    "twice, numbers of the inner examples": ([(0, None), (1, 0)], [(4, 3, 5, 72), (5,)], {}),
}


def over(map_one, levels, function):
    for in_axes in reversed(levels):
        function = map_one(function, in_axes)
    return function


def looped(function, in_axes):
    """Do the work of vmap in a loop."""

    def each(*arrays):
        given = list(zip(arrays, in_axes, strict=True))
        (size,) = {array.shape[axis] for array, axis in given if axis is not None}
        results = [
            function(*(a if axis is None else jnp.take(a, i, axis) for a, axis in given))
            for i in range(size)
        ]
        return jax.tree.map(lambda *found: jnp.stack(found), *results)

    return each


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_one_call_with_the_bits_of_its_examples(name):
    levels, (x_shape, *scale_shape), options = BATCHES[name]
    arrays = [drawn(*x_shape), *(scales(*shape) for shape in scale_shape)]

    def norm(x, scale=None):
        return rms(x, scale=scale, **options)

    batch = over(jax.vmap, levels, norm)
    assert_same(batch(*arrays), over(looped, levels, norm)(*arrays))
    assert "stablehlo.while" not in lowered(batch, *arrays)
    (call,) = calls_of(batch, *arrays)
    if scale_shape == [()]:
        assert call.inputs[1][0] == ()  # it is not expanded


LOOPS = {
    "a call": lambda norm: norm,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": jax.vmap,
    "map": lambda norm: lambda x: jax.lax.map(norm, x),
    "scan": lambda norm: lambda x: jax.lax.scan(lambda c, row: (c, norm(row)), 0.0, x)[1],
    "cond": lambda norm: lambda x: jax.lax.cond(x[0, 0] == x[0, 0], norm, norm, x),
}
DERIVATIVES = {
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "vjp": lambda f: partial(jax.vjp, f),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "linearize": lambda f: partial(jax.linearize, f),
    "hessian": jax.hessian,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_derivatives_are_refused_in_loops_and_stop_gradient_is_the_way_out(loop):
    x = drawn(4, 72)
    assert_same(LOOPS[loop](rms)(x), rms(x))

    def loss(field, dtype, x):
        def norm(x):
            return getattr(rms(x, residual=x, dtype=dtype), field)

        return (x[:, :1] * LOOPS[loop](norm)(x).astype(jnp.float32)).sum()

    for field, dtype in (("q", "int8"), ("q", "float8_e5m2"), ("scale", "int8"), ("y", "int8")):
        for name, derive in DERIVATIVES.items():
            with (
                at(f"{name} of {field} of {dtype}"),
                pytest.raises(NotImplementedError, match=r"^rms_norm_quantized: a derivative is"),
            ):
                derive(partial(loss, field, dtype))(x)

    def straight_through(x):
        q, scale, *_ = LOOPS[loop](lambda x: rms(jax.lax.stop_gradient(x)))(x)
        return (x * q.astype(jnp.float32) * scale).sum()

    q, scale, *_ = rms(x)
    assert_same(jax.jit(jax.grad(straight_through))(x), reference.dequantize(q, scale))


def test_a_derivative_by_any_operand_is_refused():
    x, shapes = drawn(3, 8), {"weight": (8,), "bias": (8,), "scale": (3, 1)}

    def loss(array, name, field):
        found = rms(x, **{"residual": x, name: array})
        return getattr(found, field).astype(jnp.float32).sum()

    for name in ("weight", "bias", "gate", "residual", "scale"):
        for field in ("residual", "q"):  # the new stream depends on the residual alone
            with (
                at(f"{field} by {name}"),
                pytest.raises(NotImplementedError, match=r": .* quantised results have no deriva"),
            ):
                jax.grad(loss)(jnp.ones(shapes.get(name, (3, 8))), name, field)


def test_an_exported_function_has_the_bits_of_the_function():
    def norms(x, scale):
        return [rms(x, **options) for options, *_ in FORMATS.values()] + [rms(x, scale=scale)]

    x, scale = drawn(4, 72), scales(4, 1)
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"cunorm_on_{one}") for one in ("cpu", "cuda")
    ]
    export = jax.export.export(jax.jit(norms), disabled_checks=checks)
    assert_same(export(x, scale).call(x, scale), norms(x, scale))


def test_no_rows_give_empty_results():
    for name, (options, *_) in FORMATS.items():
        with at(name):
            found = rms(jnp.zeros((2, 0, 72)), **options)
            assert found.q.shape == found.y.shape == (2, 0, 72)
            assert found.scale.shape == (2, 0, 3 if name == "mxfp8" else 1)
    batch = jax.vmap(lambda x, scale: rms(x, scale=scale))
    assert batch(jnp.zeros((2, 0, 72)), jnp.ones(2)).q.shape == (2, 0, 72)


# --- errors ---------------------------------------------------------------------------------------

X = np.ones((3, 8), np.float32)
# For each case: a call of a norm, the error and its message.
WRONG = {
    "scale of the wrong shape": (lambda norm: norm(X, scale=X), ValueError, r"expected \(3, 1\)"),
    "scale of the wrong dtype": (
        lambda norm: norm(X, scale=jnp.float16(1)),
        TypeError,
        "scale has dtype float16, expected float32",
    ),
    "scale is a list": (lambda norm: norm(X, scale=[1.0]), TypeError, "scale is of type list, exp"),
    "scale is 0": (lambda norm: norm(X, scale=0), ValueError, "scale is 0, expected a positive"),
    "scale and block": (lambda norm: norm(X, scale=jnp.ones(()), block=32), ValueError, "block is"),
    "dtype": (lambda norm: norm(X, dtype=jnp.float16), TypeError, "dtype is float16, expected flo"),
    "block is traced": (
        lambda norm: jax.jit(norm)(X, block=32),
        TypeError,
        "block is traced by JAX, expected an int: under jax.jit, bind it",
    ),
}


def test_wrong_input_is_refused_also_while_jax_traces_it():
    for name, (call, error, message) in WRONG.items():
        for transform in (lambda f: f, jax.jit):
            with at(name), pytest.raises(error, match=f"^layer_norm_quantized: .*{message}"):
                transform(partial(call, cunorm.jax.layer_norm_quantized))()
