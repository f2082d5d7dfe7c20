# SPDX-License-Identifier: MIT
"""`where=` of the row norms of `cunorm.jax`: statistics of some elements of each row."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.support.operands import at
from tests.support.processes import in_process
from tests.support.real_gpu import XLA_FLAGS

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import cunorm.jax  # noqa: E402

NORMS = {"rms_norm": {}, "layer_norm": {}, "normalize": {"c": 3.0, "center": True}}
SHAPE = (4, 3, 10)


def drawn(seed, *shape, dtype=np.float32, mean=0.0):
    return np.random.default_rng(seed).normal(mean, 2, shape).astype(dtype)


def some(*shape, seed=9):
    """Return a mask with at least two True elements in each row of the last axis."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., :2] = True
    return mask


def exact(name, x, where, weight=None, bias=None, *, eps=1e-3, axis=-1, offset=0.0):
    """Return y in float64, row by row from the elements that are chosen."""
    x, where = np.asarray(x, np.float64), np.broadcast_to(where, x.shape)
    rows = x.reshape(*x.shape[: axis % x.ndim], -1)
    y = np.empty_like(rows)
    for row in np.ndindex(rows.shape[:-1]):
        chosen = rows[row][where.reshape(rows.shape)[row]]
        mean = 0.0 if name == "rms_norm" else chosen.mean()
        y[row] = (rows[row] - mean) / np.sqrt(np.mean((chosen - mean) ** 2) + eps)
        y[row] *= 3.0 / np.sqrt(chosen.size) if name == "normalize" else 1.0
    y = y.reshape(x.shape)
    y = y if weight is None else y * (np.asarray(weight, np.float64) + offset)
    return y if bias is None else y + np.asarray(bias, np.float64)


def norm_of(name, **options):
    function = partial(getattr(cunorm.jax, name), **{"eps": 1e-3} | NORMS[name] | options)

    def call(x, where, weight=None, bias=None):
        given = {"weight": weight, "bias": bias}
        return function(x, where=where, **{n: v for n, v in given.items() if v is not None})

    return call


@pytest.mark.parametrize("name", NORMS)
def test_statistics_are_those_of_the_chosen_elements(name):
    weight, bias, x = drawn(1, 10), drawn(2, 10), drawn(0, *SHAPE)
    for where in (some(*SHAPE), some(10), some(3, 10), some(4, 1, 10), some(3, 10).tolist()):
        with at(np.shape(where)):
            y = norm_of(name)(x, where, weight, bias)
            right = exact(name, x, np.asarray(where), weight, bias)
            np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)
    where = some(4, 1, 10)
    y = norm_of(name, axis=1)(x, where, drawn(1, 3, 10))
    right = exact(name, x, where, drawn(1, 3, 10), axis=1)
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-5)
    last, weight = partial(np.moveaxis, source=1, destination=-1), drawn(1, 3)
    where = np.moveaxis(some(4, 10, 3), -1, 1)
    for axis, parameter in (
        ((1,), weight),
        ((-2,), weight[:, None]),
        ((1,), weight[None, :, None]),
    ):
        y = norm_of(name, axis=axis)(x, where, parameter, weight)
        right = exact(name, last(x), last(where), weight, weight)
        np.testing.assert_allclose(last(np.asarray(y)), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_a_mask_that_is_true_everywhere_gives_the_norm_without_one(name):
    x = jnp.asarray(drawn(0, 4, 3, 256), "bfloat16")
    for options in (
        {},
        {"dtype": "float32"},
        {"weight_offset": 1.0},
        {"round_before_weight": True},
        {"round_before_weight": True, "dtype": "float16", "weight_offset": 0.5},
    ):
        weight = jnp.asarray(drawn(1, 256), "float32" if options else "bfloat16")
        ours = norm_of(name, **options)(x, True, weight, weight)
        function = partial(getattr(cunorm.jax, name), **{"eps": 1e-3} | NORMS[name] | options)
        usual = function(x, weight, bias=weight)
        assert ours.dtype == usual.dtype
        # One rounding may differ in the last digit of y.
        tolerance = float(jnp.finfo(ours.dtype).eps)
        ours, usual = (np.asarray(one, np.float32) for one in (ours, usual))
        # A row that is rounded the other way differs by a digit of bfloat16.
        share = 0.01 if "round_before_weight" in options else 0.0
        differs = ~np.isclose(ours, usual, rtol=max(tolerance, 1e-5), atol=1e-5)
        assert differs.mean() <= share
        rtol = max(tolerance, float(jnp.finfo("bfloat16").eps) if share else 1e-5)
        np.testing.assert_allclose(ours, usual, rtol=2 * rtol, atol=2 * rtol)


def test_a_large_mean_costs_no_digits():
    where = some(64, 1024)
    x = drawn(0, 64, 1024, mean=1e4)
    y = norm_of("layer_norm")(x, where)
    np.testing.assert_allclose(y, exact("layer_norm", x, where), rtol=0, atol=1e-5)


def test_elements_that_are_not_chosen_do_not_reach_other_elements():
    where = some(4, 10)
    x = np.where(where, drawn(0, 4, 10), np.inf)
    y = np.asarray(norm_of("layer_norm")(x, where))
    right = exact("layer_norm", np.where(where, x, 0), where)
    np.testing.assert_allclose(y[where], right[where], rtol=1e-5, atol=1e-5)


def test_a_row_without_a_chosen_element_is_nan_as_in_flax_and_others_are_not():
    where = np.array([[False] * 10, [True] * 10])
    x = drawn(0, 2, 10)
    for name in NORMS:
        y = np.asarray(norm_of(name)(x, where))
        assert np.isnan(y[0]).all()
        assert np.isfinite(y[1]).all()
    remedy = where | ~where.any(-1, keepdims=True)
    y = norm_of("layer_norm")(x, remedy)
    np.testing.assert_allclose(y, exact("layer_norm", x, True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_derivatives_to_the_second_order_are_those_of_differences(name):
    with jax.enable_x64(True):
        where = some(3, 6)
        given = drawn(0, 3, 6, dtype="f8"), drawn(1, 6, dtype="f8"), drawn(2, 6, dtype="f8")
        norm = norm_of(name, weight_offset=1.0, eps=0.1)
        check_grads(lambda x, *more: norm(x, where, *more), given, order=2, modes=("fwd", "rev"))


def test_derivatives_of_half_precision_are_rounded_once_to_the_dtype_of_the_operand():
    x, weight, where = jnp.asarray(drawn(0, 64, 32), "bfloat16"), drawn(1, 32), some(64, 32)

    norm = norm_of("layer_norm")

    def loss(x, weight):
        return (norm(x, where, weight).astype("float32") ** 2 * jnp.arange(32.0)).sum()

    dx, dweight = jax.grad(loss, (0, 1))(x, weight)
    assert (dx.dtype, dweight.dtype) == ("bfloat16", "float32")
    with jax.enable_x64(True):
        wide = jnp.asarray(x, "float64"), jnp.asarray(weight, "float64")
        dy = jax.grad(loss, (0, 1))(*wide)
    # y is rounded to bfloat16, so the gradient that reaches y has an error of 2^-8.
    scale = np.abs(dy[0]).max()
    np.testing.assert_allclose(dx.astype("float32"), dy[0], rtol=0.02, atol=0.005 * scale)
    np.testing.assert_allclose(dweight, dy[1], rtol=0.02)


def test_transformed_calls_equal_those_for_each_example():
    x, weight, where = drawn(0, *SHAPE), drawn(1, 10), some(*SHAPE)
    norm = norm_of("layer_norm")
    right = exact("layer_norm", x, where, weight)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(jax.jit(norm)(x, where, weight), right)
    close(jax.vmap(norm, (0, 0, None))(x, where, weight), right)
    close(
        jax.vmap(norm, (0, None, None))(x, where[0], weight),
        exact("layer_norm", x, where[0], weight),
    )
    close(
        jax.vmap(norm, (None, 0, None))(x[0], where, weight),
        exact("layer_norm", x[:1].repeat(4, 0), where, weight),
    )
    of_each = jax.vmap(jax.grad(lambda *given: (norm(*given) ** 2).sum(), 2), (0, 0, None))
    found = of_each(x, where, weight)
    for got, own, mask in zip(found, x, where, strict=True):
        close(got, (2 * exact("layer_norm", own, mask) ** 2 * weight).sum(0), rtol=1e-4)


ON_DEVICES = """
import jax, numpy as np
import cunorm.jax
from tests.jax.test_where import drawn, exact, some

mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
x, weight, where = drawn(0, 4, 10), drawn(1, 10), some(4, 10)
P = jax.P
specs = (P("rows"), P("rows"), P())
norm = jax.shard_map(
    lambda x, where, weight: cunorm.jax.rms_norm(x, weight, where=where, eps=1e-3),
    mesh=mesh, in_specs=specs, out_specs=P("rows"),
)
y = jax.jit(norm)(x, where, weight)
assert len(y.sharding.device_set) == 2
np.testing.assert_allclose(y, exact("rms_norm", x, where, weight), rtol=1e-5, atol=1e-5)
dweight = jax.jit(jax.grad(lambda *arrays: (norm(*arrays) ** 2).sum() / 2, 2))(x, where, weight)
right = (exact("rms_norm", x, where) ** 2 * weight).sum(0)
np.testing.assert_allclose(dweight, right, rtol=1e-4)
print("checked")
"""


def test_rows_on_several_devices_have_masks_of_their_own():
    flags = f"--xla_force_host_platform_device_count=2 {XLA_FLAGS}"
    found = in_process(ON_DEVICES, setup="", JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    assert found == "checked\n"


BROADCASTS = "expected one that broadcasts to (2, 8), the shape of x"
WRONG = [
    ({"where": np.ones(7, bool)}, ValueError, f"where has shape (7,), {BROADCASTS}"),
    ({"where": np.ones((3, 2, 8), bool)}, ValueError, f"where has shape (3, 2, 8), {BROADCASTS}"),
    ({"where": np.ones(8, "f4")}, TypeError, "where has dtype float32, expected bool: pass where "),
    ({"where": "all"}, TypeError, "where is 'all', expected a bool array"),
    ({"groups": 2}, ValueError, "groups is given beside where, expected groups=1"),
    ({"gate": np.ones((2, 8), "f4")}, ValueError, "gate is given beside where, expected gate=None"),
    ({"axis_name": "a"}, ValueError, "axis_name is given beside where, expected axis_name=None"),
    ({"dtype": "float64"}, TypeError, "a result of dtype float64"),
    ({"eps": -1.0}, ValueError, "eps is -1.0, expected a finite number of at least 0"),
    ({"weight": np.ones(7, "f4")}, ValueError, "weight has shape (7,), expected (8,) to match"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG)
def test_wrong_input_beside_where_is_named(options, error, text):
    given = {"where": True} | options
    for name in NORMS:
        with pytest.raises(error) as raised:
            getattr(cunorm.jax, name)(np.ones((2, 8), "f4"), **given)
        assert str(raised.value).startswith(f"{name}: {text}")


def test_statistics_are_those_of_flax_with_a_mask():
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    where, x = some(*SHAPE), drawn(0, *SHAPE)
    kinds = (nnx.LayerNorm, cunorm.jax.layer_norm), (nnx.RMSNorm, cunorm.jax.rms_norm)
    sparse = where & (where.sum(-1, keepdims=True) > 5)  # some rows have no chosen element
    assert 0 < (~sparse.any(-1)).sum() < 12
    for kind, function in kinds:
        theirs = kind(10, use_fast_variance=False, rngs=nnx.Rngs(0))
        for mask in (where, sparse):
            found = function(x, where=mask, eps=theirs.epsilon)
            np.testing.assert_allclose(found, theirs(x, mask=mask), rtol=1e-5, atol=1e-5)
