# SPDX-License-Identifier: MIT
"""`cunorm.jax.nnx`: Flax's classes, computed by cunorm where it has the formula, else by Flax."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.support.processes import in_process

pytest.importorskip("flax", reason="Flax is not installed")

import jax
import jax.numpy as jnp
from flax import nnx

import cunorm.jax.nnx

NAMES = {
    "LayerNorm": "layer_norm",
    "RMSNorm": "rms_norm",
    "GroupNorm": "group_norm",
    "InstanceNorm": "instance_norm",
}
SHAPE = (3, 5, 8)
PLAIN = {"use_scale": False}


def drawn(seed, *shape, dtype="float32", mean=0.5):
    return jnp.asarray(np.random.default_rng(seed).normal(mean, 2, shape), dtype)


def pair(name, features=8, **options):
    """Return cunorm's module and Flax's with the same parameters, which are not 1 and 0."""
    found = []
    for module in (cunorm.jax.nnx, nnx):
        given = {"use_fast_variance": False} | options
        norm = getattr(module, name)(features, rngs=nnx.Rngs(0), **given)
        for seed, parameter in enumerate((norm.scale, getattr(norm, "bias", None))):
            if parameter is not None:
                parameter[...] = drawn(seed, features, dtype=parameter[...].dtype)
        found.append(norm)
    return found


@pytest.fixture
def counted(monkeypatch):
    """Return a list of the functions of cunorm.jax that modules call."""
    calls = []
    for name in NAMES.values():
        function = getattr(cunorm.jax, name)

        def call(name=name, function=function, **given):
            calls.append(name)
            return function(**given)

        monkeypatch.setattr(cunorm.jax.nnx.norms, name, call)
    return calls


def assert_same(ours, theirs, tolerance=1e-5):
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    ours, theirs = (np.asarray(one, np.float64) for one in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


GROUPS = {"num_groups": 2}
ROW_OPTIONS = [
    ({}, SHAPE),
    (PLAIN, SHAPE),
    ({"epsilon": 0.5}, (8,)),
    ({"reduction_axes": (1, 2)}, SHAPE),
    ({"reduction_axes": (-1, 1), "feature_axes": 2}, SHAPE),
    ({"reduction_axes": (-2, -1), "feature_axes": (1,)}, (3, 8, 5)),
    ({"reduction_axes": 1, "feature_axes": -2}, (3, 8, 5)),
    ({"reduction_axes": (0, -2), "feature_axes": 1}, (3, 8, 5)),
    ({"dtype": jnp.bfloat16}, SHAPE),
    ({"param_dtype": jnp.float16}, SHAPE),
]
CALLS = [
    *(
        (name, options, shape)
        for name in ("LayerNorm", "RMSNorm")
        for options, shape in ROW_OPTIONS
    ),
    ("LayerNorm", {"use_bias": False}, SHAPE),
    ("LayerNorm", {"promote_dtype": lambda given, dtype: given, "param_dtype": "float16"}, SHAPE),
    (
        "GroupNorm",
        GROUPS | {"promote_dtype": lambda given, dtype: given, "dtype": "float16"},
        SHAPE,
    ),
    ("LayerNorm", {"num_features": 40, "reduction_axes": (1, 2), "feature_axes": (1, 2)}, SHAPE),
    ("GroupNorm", GROUPS, SHAPE),
    ("GroupNorm", {"num_groups": None, "group_size": 2, "use_bias": False}, (2, 3, 5, 8)),
    ("GroupNorm", GROUPS | {"reduction_axes": (1, -1)}, SHAPE),
    ("GroupNorm", GROUPS | {"dtype": jnp.float16} | PLAIN, SHAPE),
    ("GroupNorm", GROUPS, (5, 8)),
    ("InstanceNorm", {}, SHAPE),
    ("InstanceNorm", {"feature_axes": 1, "use_bias": False}, (2, 8, 4, 5)),
    ("InstanceNorm", {"feature_axes": (2,)} | PLAIN, SHAPE),
]


@pytest.mark.parametrize(("name", "options", "shape"), CALLS)
def test_a_module_gives_flaxs_numbers_and_gradients_by_cunorm(name, options, shape, counted):
    options = dict(options)
    ours, theirs = pair(name, options.pop("num_features", 8), **options)
    for dtype in ("float32", "bfloat16", "float32" if "promote_dtype" in options else "int32"):
        x = drawn(2, *shape, dtype=dtype)
        y, right = ours(x), theirs(x)
        tolerance = max(1e-5, 2 * float(jnp.finfo(y.dtype).eps))
        assert_same(y, right, tolerance)
    assert counted == [NAMES[name]] * 3

    def loss(norm, x):
        return (norm(x).astype("float32") ** 2 * drawn(5, *shape)).sum()

    if "dtype" not in options:
        find = nnx.jit(nnx.grad(loss, argnums=(0, 1)))
        grads = [find(norm, drawn(2, *shape)) for norm in (ours, theirs)]
        for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
            largest = float(jnp.abs(other).max())
            assert_same(one / largest, other / largest, 1e-5 if one.dtype == "float32" else 1e-3)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_row_norms_take_a_mask_and_others_leave_it_to_flax(name, counted):
    mask = np.random.default_rng(0).random(SHAPE) < 0.6
    mask[0, 0] = False
    for options in ({}, {"reduction_axes": (1, 2)}, {"dtype": jnp.float16}):
        ours, theirs = pair(name, **options)
        for one in (mask, mask[:1], mask[0, 1:2]):
            x = drawn(2, *SHAPE)
            assert_same(ours(x, mask=one), theirs(x, mask=one), 1e-5 if len(options) < 1 else 2e-3)
    assert counted == [NAMES[name]] * 9


OTHERS = [
    *((name, {"reduction_axes": (1, 3)}, (2, 3, 4, 8), {}) for name in ("LayerNorm", "RMSNorm")),
    ("RMSNorm", {"reduction_axes": 1}, SHAPE, {}),  # the scale is along the last axis
    ("LayerNorm", {"reduction_axes": -1, "feature_axes": 0}, (8, 3), {}),
    ("LayerNorm", {"reduction_axes": (0, 2)}, SHAPE, {}),
    ("LayerNorm", {}, (0, 8), {}),
    ("LayerNorm", PLAIN | {"use_bias": False, "reduction_axes": (), "feature_axes": ()}, SHAPE, {}),
    ("LayerNorm", {"dtype": jnp.complex64}, SHAPE, {}),
    ("GroupNorm", GROUPS, SHAPE, {"mask": np.arange(8) % 4 < 2}),
    ("GroupNorm", GROUPS | {"reduction_axes": (-1,)}, (1, 8), {}),
    ("InstanceNorm", {}, SHAPE, {"mask": (np.arange(5) < 3)[:, None]}),
    ("InstanceNorm", {"feature_axes": 2}, (3, 4, 8, 5), {}),
    ("InstanceNorm", {"feature_axes": (1, 2), "num_features": 40}, (3, 5, 8), {}),
]


@pytest.mark.parametrize(("name", "options", "shape", "given"), OTHERS)
def test_a_call_that_cunorm_has_not_is_flaxs(name, options, shape, given, counted):
    options = dict(options)
    is_usual = options == GROUPS | {"reduction_axes": (-1,)}  # all axes of (1, 8) but the first
    ours, theirs = pair(name, options.pop("num_features", 8), **options)
    x = drawn(2, *shape)
    y, right = ours(x, **given), theirs(x, **given)
    assert y.dtype == right.dtype
    np.testing.assert_allclose(y, right, rtol=0, atol=1e-5 if is_usual else 0)
    assert bool(counted) == is_usual


def test_statistics_over_devices_are_flaxs(counted):
    ours, theirs = pair("LayerNorm", axis_name="devices")
    x = drawn(2, 3, 8)
    found = [jax.vmap(one, axis_name="devices")(x) for one in (ours, theirs)]
    np.testing.assert_array_equal(*found)
    assert not counted


def test_float64_arithmetic_for_a_float32_x_is_flaxs(counted):
    with jax.enable_x64(True):
        options = {"promote_dtype": lambda given, dtype: given, "dtype": "float64"}
        ours, theirs = pair("LayerNorm", **options)
        x = drawn(2, *SHAPE)
        np.testing.assert_array_equal(ours(x), theirs(x))
        assert not counted
        assert_same(ours(x.astype("float64")), theirs(x.astype("float64")), 1e-13)
        assert counted


@pytest.mark.parametrize(
    ("name", "options"),
    [("LayerNorm", {}), ("GroupNorm", {}), ("GroupNorm", PLAIN | {"use_bias": False})],
)
def test_wrong_shapes_are_errors_as_in_flax(name, options):
    shapes = ((3, 5, 7), (8, 3), (3, 16))
    for shape in (*shapes, (8,)) if name == "GroupNorm" else shapes:
        for norm in pair(name, **options, **GROUPS if name == "GroupNorm" else {}):
            with pytest.raises((TypeError, ValueError)):
                norm(drawn(0, *shape))


def test_a_variance_is_not_a_difference_of_squares_even_if_flaxs_would_be():
    ours, theirs = pair("LayerNorm", 1024, use_fast_variance=True, use_scale=False, use_bias=False)
    x = drawn(0, 64, 1024, mean=1e4)
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    errors = [np.abs(np.asarray(norm(x)) - exact).max() for norm in (ours, theirs)]
    assert errors[0] < 1e-5 < 1 < errors[1]


def test_state_loads_both_ways_and_modules_train():
    ours, theirs = pair("LayerNorm")
    other = cunorm.jax.nnx.LayerNorm(8, rngs=nnx.Rngs(3))
    nnx.update(other, nnx.state(theirs))
    x = drawn(2, *SHAPE)
    assert_same(other(x), ours(x), 0)
    assert isinstance(other, nnx.LayerNorm)
    step = nnx.jit(lambda norm, x: nnx.grad(lambda norm: (norm(x) ** 3).sum())(norm))
    batched = partial(nnx.vmap, in_axes=(None, 0))
    assert_same(batched(lambda norm, x: norm(x))(ours, x), theirs(x))
    grads = step(ours, x), step(theirs, x)
    for one, right in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-4, atol=1e-3)


def test_cunorm_jax_does_not_import_flax():
    program = "import sys, cunorm.jax\nprint('flax' in sys.modules)"
    assert in_process(program, setup="") == "False\n"
