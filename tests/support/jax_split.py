# SPDX-License-Identifier: MIT
"""Checks of `axis_name` of cunorm.jax on four devices of the host: rows that are split."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.test_util import check_grads

import cunorm.jax
from cunorm.jax import add_layer_norm, layer_norm, rms_norm
from tests.support.jax_checks import without_compiler
from tests.support.jax_derivatives import DERIVATIVES
from tests.support.jax_split_roundings import (
    check_a_float32_stream_of_bfloat16,
    check_large_means,
)
from tests.support.operands import at, draw

SHAPE = (2, 4, 16)
SHAPES = {"x": SHAPE, "weight": (16,), "bias": (16,), "residual": SHAPE, "gate": SHAPE}
SPECS = {"x": P("dp", None, "tp"), "weight": P("tp"), "bias": P("tp")}
PRE, BRANCH = ({"gate_position": one} for one in ("pre", "branch"))
# The function, its operands besides x, its options, and the shapes of operands that are not usual.
CASES = [
    ("rms_norm", ("weight", "bias", "gate"), {"weight_offset": 1.0}, {}),
    ("layer_norm", ("weight", "bias"), {}, {}),
    ("layer_norm", ("weight", "bias"), {}, {"weight": (2, 1, 16), "bias": (4, 16)}),
    ("l2_norm", (), {"eps": 0.5}, {}),
    ("normalize", ("weight", "gate"), {"c": 2.0, "center": True} | PRE, {}),
    ("add_rms_norm", ("residual", "weight"), {}, {}),
    ("add_rms_norm", ("gate",), BRANCH, {"gate": (2, 4, 1)}),
    ("add_layer_norm", ("residual", "weight", "gate"), BRANCH, {"gate": (2, 1, 1)}),
    ("add_layer_norm", (), {"axis": -2}, {}),
    ("add_normalize", ("residual", "bias", "gate"), BRANCH, {"gate": (16,)}),
    ("add_normalize", ("residual", "weight", "gate"), {"c": 3.0, "axis": 2}, {}),
]
MESHES = {"2": (1, 2), "4": (1, 4), "2x2": (2, 2)}


def mesh_of(name, kind=jax.sharding.AxisType.Auto):
    rows, columns = MESHES[name]
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    return jax.sharding.Mesh(devices, ("dp", "tp"), axis_types=(kind,) * 2)


def assert_close(found, right):
    for number, pair in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)):
        with at(f"result {number}"):
            # The bounds allow some roundings of float64 in sums of a few dozen terms.
            np.testing.assert_allclose(*pair, rtol=1e-10, atol=1e-10)


def drawn(*given, **shapes):
    shapes = SHAPES | shapes
    return {name: jnp.asarray(draw(name, shapes[name], "float64")) for name in ("x", *given)}


def spec_of(array):
    """Return how an operand lies: samples are split over dp, columns over tp."""
    samples, _, columns = (1, 1, 1, *array.shape)[-3:]
    spec = ("dp" if samples > 1 else None, None, "tp" if columns > 1 else None)
    return P(*spec[-array.ndim :])


# --- all functions --------------------------------------------------------------------------------


def norms_of(case, mesh, check_vma):
    """Return a norm of split rows and the norm of whole rows, as functions of named operands."""
    function, given, options, shapes = case
    own, is_added = drawn(*given, **shapes), function.startswith("add_")
    specs = {name: spec_of(one) for name, one in own.items()}
    norm = partial(call, getattr(cunorm.jax, function), is_added, **options)
    out = (SPECS["x"],) * 2 if is_added else SPECS["x"]
    mapped = {"mesh": mesh, "in_specs": (specs,), "out_specs": out, "check_vma": check_vma}
    return jax.shard_map(partial(norm, axis_name="tp"), **mapped), norm, own


def check_functions(cases, mesh, *, check_vma):
    """Check values and all gradients, with grad outside of shard_map, in one compiled function."""
    splits, wholes, arrays = zip(*(norms_of(one, mesh, check_vma) for one in cases), strict=True)

    @partial(jax.jit, static_argnums=0)
    def run(norms, arrays):
        found = []
        for norm, own in zip(norms, arrays, strict=True):
            values, pull = jax.vjp(norm, own)
            dys = [jnp.asarray(draw(name, SHAPE, "float64")) for name in ("dy", "d_residual")]
            found.append((values, pull(tuple(dys) if type(values) is tuple else dys[0])))
        return found

    for case, found, right in zip(cases, run(splits, arrays), run(wholes, arrays), strict=True):
        with at(f"{case}"):
            assert_close(found, right)


def call(norm, is_added, arrays, **options):
    if is_added:
        return tuple(norm(**{"residual": None} | arrays, **options))
    return norm(**arrays, **options)


def check_derivatives(cases, mesh, *, check_vma, of=("jvp", "jvp of grad", "grad of jvp of grad")):
    """Check derivatives in forward mode and of higher orders."""
    for case in cases:
        split, whole, own = norms_of(case, mesh, check_vma)
        for how in of:
            found, right = (
                jax.jit(DERIVATIVES[how](partial(summed, norm, tuple(own))))(*own.values())
                for norm in (split, whole)
            )
            with at(f"{how} of {case}"):
                assert_close(found, right)


def summed(norm, names, *arrays):
    """Return the sum of y and, if there is one, twice the new stream."""
    results = norm(dict(zip(names, arrays, strict=True)))
    return results[0] + 2 * results[1] if type(results) is tuple else results


# --- transformations ------------------------------------------------------------------------------


def check_transformations(mesh):
    """Check vmap, scan and remat, and grad inside of shard_map; weights are split with x."""
    a = drawn("weight", "bias")
    weights = jnp.stack([a["weight"], a["weight"] * 2, a["bias"]])

    def examples(norm, x, weight, bias, weights):
        return jax.vmap(norm, (None, 0, None))(x, weights, bias).sum(0)

    def samples(norm, x, weight, bias, weights):
        return jax.vmap(norm, (0, None, None), 1)(x, weight, bias).swapaxes(0, 1)

    def layers(norm, x, weight, bias, weights):
        step = jax.checkpoint(lambda x, weight: (x + jnp.tanh(norm(x, weight, bias)), None))
        return jax.lax.scan(step, x, weights)[0]

    specs = (SPECS["x"], P("tp"), P("tp"), P(None, "tp"))
    arrays = (a["x"], a["weight"], a["bias"], weights)
    programs = (examples, samples, layers)
    split = partial(layer_norm, axis_name="tp")

    def loss(program, norm, *arrays):
        return (program(norm, *arrays) ** 3).sum()

    def total(program, *arrays):
        return jax.lax.psum(loss(program, split, *arrays), ("dp", "tp"))

    def by_hand(program, *arrays):
        dx, *others = jax.grad(partial(loss, program, split), (0, 1, 2, 3))(*arrays)
        return (dx, *(jax.lax.psum(one, "dp") for one in others))

    @jax.jit
    def derived(*arrays):
        found = []
        for program in programs:
            mapped = partial(jax.shard_map, mesh=mesh, in_specs=specs)
            outside = jax.grad(mapped(partial(total, program), out_specs=P()), (0, 1, 2, 3))
            own = jax.grad(partial(loss, program, split), (0, 1, 2, 3))
            inside = mapped(own, out_specs=specs)  # check_vma adds the parts of dweight
            unchecked = mapped(partial(by_hand, program), out_specs=specs, check_vma=False)
            found.append([one(*arrays) for one in (outside, inside, unchecked)])
        return found

    @jax.jit
    def exact(*arrays):
        whole = [jax.grad(partial(loss, one, layer_norm), (0, 1, 2, 3)) for one in programs]
        return [[one(*arrays)] * 3 for one in whole]

    assert_close(derived(*arrays), exact(*arrays))


def check_numerical_gradients(mesh):
    a = drawn("weight", "bias")
    specs = [SPECS[name] for name in a]
    split = partial(layer_norm, axis_name="tp")
    mapped = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=(*specs,), out_specs=SPECS["x"]))
    check_grads(mapped, tuple(a.values()), order=1, modes=["rev"])


def check_gradients_of_some_operands(mesh):
    """Check gradients without that of x, for which devices exchange nothing."""
    a = drawn("weight", "bias", "gate")
    specs = {name: spec_of(one) for name, one in a.items()}
    split = partial(call, layer_norm, False, axis_name="tp")
    mapped = jax.shard_map(split, mesh=mesh, in_specs=(specs,), out_specs=SPECS["x"])

    def gradients(norm, arrays):
        def derived(wanted):
            others = {name: one for name, one in arrays.items() if name not in wanted}
            own = {name: arrays[name] for name in wanted}
            return jax.grad(lambda own: (norm(own | others) ** 3).sum())(own)

        return [derived(wanted) for wanted in (("weight",), ("bias", "weight"), ("gate",))]

    right = jax.jit(partial(gradients, partial(call, layer_norm, False)))(a)
    assert_close(jax.jit(partial(gradients, mapped))(a), right)


def check_a_stream_alone(mesh):
    """Check gradients of the stream, which ignore infinite numbers of the norm."""
    a = drawn("residual", "weight", "gate")
    a["residual"] = a["residual"].at[0, 0, 0].set(jnp.inf)
    specs = {name: spec_of(one) for name, one in a.items()}

    def stream(arrays):
        return add_layer_norm(**arrays, **BRANCH, axis_name="tp").residual

    def formula(arrays):
        return arrays["residual"] + arrays["x"] * jax.nn.silu(arrays["gate"])

    mapped = jax.shard_map(stream, mesh=mesh, in_specs=(specs,), out_specs=SPECS["x"])
    found, right = (
        jax.jit(jax.grad(lambda a, norm=norm: jnp.vdot(norm(a), drawn()["x"])))(a)
        for norm in (mapped, formula)
    )
    assert_close(found, right)


def check_a_norm_over_two_axes(mesh):
    """Check rows that are split over all devices, without jit."""
    x, spec = draw("x", (3, 16), "float64"), P(None, ("dp", "tp"))
    split = partial(layer_norm, axis_name=("dp", "tp"))
    mapped = jax.shard_map(split, mesh=mesh, in_specs=spec, out_specs=spec)
    assert_close(mapped(x), layer_norm(x))

    def loss(norm, x):
        return (norm(x) ** 3).sum()

    assert_close(jax.grad(partial(loss, mapped))(x), jax.grad(partial(loss, layer_norm))(x))


# --- a model --------------------------------------------------------------------------------------


def check_query_and_key_norms(mesh):
    """Check attention as in OLMo 2, whose norms of queries and keys go over all heads."""
    width, heads = 16, 4
    shapes = {"x": (2, 5, width), "query": (width, width), "key": (width, width)}
    shapes |= {"value": (width, width), "out": (width, width), "of_query": (width,)}
    shapes |= {"of_key": (width,)}
    columns, a = P(None, "tp"), {n: draw(n, shape, "float64") for n, shape in shapes.items()}
    specs = {"x": P("dp"), "query": columns, "key": columns, "value": columns, "out": P("tp")}
    specs |= {"of_query": P("tp"), "of_key": P("tp")}

    def attention(norm, add, own):
        a = SimpleNamespace(**own)
        q, k, v = norm(a.x @ a.query, a.of_query), norm(a.x @ a.key, a.of_key), a.x @ a.value
        q, k, v = (one.reshape(*one.shape[:2], -1, width // heads) for one in (q, k, v))
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
        return add(mixed.reshape(*mixed.shape[:2], -1) @ a.out)

    split = partial(attention, partial(rms_norm, axis_name="tp"), lambda y: jax.lax.psum(y, "tp"))
    mapped = jax.shard_map(split, mesh=mesh, in_specs=(specs,), out_specs=P("dp"))

    def run(model, own):
        y, pull = jax.vjp(model, own)
        return y, pull(y**2)

    right = jax.jit(partial(run, partial(attention, rms_norm, lambda y: y)))(a)
    assert_close(jax.jit(partial(run, mapped))(a), right)


# --- all checks -----------------------------------------------------------------------------------


def check_some():
    """Check the kernels on large means and, to compile no others, all else without a compiler."""
    check_large_means(mesh_of("2x2"), check_vma=True)
    explicit = mesh_of("4", jax.sharding.AxisType.Explicit)
    check_large_means(explicit, check_vma=False)
    with without_compiler():
        check_wide("2x2")
        with jax.enable_x64(True):
            check_functions(CASES[::4], mesh_of("2"), check_vma=False)
            check_derivatives(CASES[::8], mesh_of("2x2"), check_vma=True)
            check_derivatives(CASES[6:7], mesh_of("2"), check_vma=True, of=["jvp of grad"])


def check_all(name):
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        for check_vma in (True, False):
            check_large_means(mesh_of(name, kind), check_vma=check_vma)
    check_wide(name)
    with jax.enable_x64(True):
        check_functions(CASES, mesh_of(name), check_vma=False)
        check_derivatives(CASES, mesh_of(name), check_vma=True)
        check_derivatives(CASES[2:9:3], mesh_of(name), check_vma=False)


def check_wide(name):
    mesh = mesh_of(name)
    check_a_float32_stream_of_bfloat16(mesh)
    with jax.enable_x64(True):
        check_functions(CASES, mesh, check_vma=True)
        check_transformations(mesh)
        check_gradients_of_some_operands(mesh)
        check_a_stream_alone(mesh)
        check_numerical_gradients(mesh)
        check_a_norm_over_two_axes(mesh)
        check_query_and_key_norms(mesh)


if __name__ == "__main__":
    check_all(sys.argv[1])
    print("checked")
