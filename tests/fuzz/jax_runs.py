# SPDX-License-Identifier: MIT
"""Runs of drawn programs, and the same runs by formulas in float64, without transformations."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.jax_nets import Exact, Net, Ours, results
from tests.fuzz.jax_oracle import Oracle, Worlds
from tests.fuzz.jax_programs import SECOND, SHARDED, Run

_DEVICES = 4
_AXIS = "d"


def x64(net: Net) -> Any:
    return jax.enable_x64(True) if net.dtype == "float64" else nullcontext()


def worlds(net: Net, run: Run) -> list[Worlds[str]]:
    """Return which values the operands have in a run, or in each of its two examples."""
    first = frozenset(net.operands if run.world else ())
    return [first, first ^ frozenset(run.batched)] if run.batched else [first]


def in_threads(oracle: Oracle, run: Run) -> list[Any]:
    """Return the results of threads that run the same function, each with its own trace."""
    barrier, interval = threading.Barrier(run.threads), sys.getswitchinterval()

    def work(_: int) -> Any:
        with x64(oracle.net):
            barrier.wait()
            return once(oracle, run, {})

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(run.threads) as pool:
            return [*pool.map(work, range(run.threads))]
    finally:
        sys.setswitchinterval(interval)


def once(oracle: Oracle, run: Run, kept: dict[Any, Any], kind: Any = Ours) -> Any:
    """Return the results of a run; keep its functions for later runs, as a training loop does."""
    style = (run.loop, run.of_step, run.of_all)
    if style not in kept:
        kept[style] = _function(kind, oracle.net, *style)
    function, names = kept[style], [*oracle.net.operands]
    world = worlds(oracle.net, run)[0]
    values = [*oracle.values(world), *oracle.masks]
    for name, axis in run.batched.items():
        both = [oracle.value(name, (name in world) == is_first) for is_first in (True, False)]
        values[names.index(name)] = np.stack(both, axis)
    arrays = [jnp.asarray(one if kind is Ours else one.astype(float)) for one in values]
    argnums = tuple(names.index(name) for name in run.wanted)
    if run.bound:
        function, arrays = _bind(function, arrays, argnums)
        return _derivative(oracle, run, function, tuple(range(len(argnums))))(*arrays)
    key = run._replace(world=0, batched=tuple(run.batched.items()))
    if key not in kept:
        kept[key] = _derivative(oracle, run, function, argnums)
    return kept[key](*arrays)


# For some derivatives: another with the same results.
_ALIKE = {"vjp_late": "vjp", "grad_of_map": "grad_of_vmap", "grad_of_scan": "grad_of_vmap"}
_ALIKE |= dict.fromkeys(SHARDED, "grad")


def exact(oracle: Oracle, run: Run, **changes: Any) -> Any:
    """Return the right results of a run: by formulas, in one thread, without wraps and loops."""
    how = _ALIKE.get(run.derivative, run.derivative)
    with jax.enable_x64(True):
        plain = Run(how, run.wanted, run.batched, run.world)._replace(**changes)
        return once(oracle, plain, {}, Exact)


def compare(oracle: Oracle, run: Run, found: Any) -> int:
    """Compare the results of a run; return the number of derivatives that are not zero."""
    right, how = exact(oracle, run), run.derivative
    if how in ("jvp", "linearize"):
        terms = exact(oracle, run, derivative="grad")
        oracle.compare("the derivative", found, right, sum(abs(one).sum() for one in terms))
        return 1
    (values, found), (right_values, right) = _split(how, found), _split(how, right)
    size = 0.0
    if how == "value_and_grad":
        outs = exact(oracle, run, derivative="forward")
        size = sum(abs(out * mask).sum() for out, mask in zip(outs, oracle.masks, strict=True))
    for value, other in zip(values, right_values, strict=True):
        oracle.compare("a result", value, other, size)
    count = 0
    for sides in zip(found, right, strict=True):
        for name, *both in zip(run.wanted, *sides, strict=True):
            blocks, others = map(jax.tree.leaves, both)  # a Hessian has a row of blocks
            size = max(abs(other).max() for other in others)
            if not size and how in SECOND:  # first derivatives cancel in it
                size = max(abs(one).max() for one in exact(oracle, run, derivative="grad"))
            # The columns of jacfwd have the dtype of the loss.
            dtype = oracle.net.loss_dtype if how == "jacfwd" else oracle.net.operands[name].dtype
            for block, other in zip(blocks, others, strict=True):
                assert str(block.dtype) == dtype, f"d{name} is {block.dtype}, expected {dtype}"
                oracle.compare(f"d{name}", block, other, size)
                count += bool(other.any())
    return count


def _split(how: str, found: Any) -> tuple[Any, Any]:
    """Return the results or the loss that are among what a run returned, and all gradients."""
    if how == "forward":
        return found, ()
    if how in ("value_and_grad", "vjp", "vjp_late"):
        return jax.tree.leaves(found[0]), found[1:]
    return (), (found,)


def _bind(function: Any, arrays: Sequence[Any], argnums: Sequence[int]) -> tuple[Any, list[Any]]:
    """Make all arrays but those at `argnums` constant; return the new function and its arrays."""

    def bound(*own: Any) -> Any:
        given = dict(zip(argnums, own, strict=True))
        return function(*[given.get(argnum, one) for argnum, one in enumerate(arrays)])

    return bound, [arrays[argnum] for argnum in argnums]


# --- a network under transformations --------------------------------------------------------------


def _function(kind: Any, net: Net, loop: str, of_step: Sequence[str], of_all: Sequence[str]) -> Any:
    """Return a function of operands and masks, which returns the results and the loss."""
    count, loss_dtype = len(net.operands), net.loss_dtype if kind is Ours else "float64"

    def named(arrays: Any) -> dict[str, Any]:
        return dict(zip(net.operands, arrays, strict=True))

    def outs_of(*arrays: Any) -> Any:
        wrap = partial(_wrapped, of_step, lambda carry, _: carry, lambda carry, _: carry[0])
        return results(kind, net, named(arrays), loop, wrap)

    def inputs(*arrays: Any) -> Any:
        return tuple(named(arrays)[{"h": "x", "stream": "r"}[name]] for name in net.results)

    wrapped = _wrapped(of_all, inputs, lambda x, *_: x, outs_of)

    def function(*arrays: Any) -> Any:
        outs = wrapped(*arrays[:count])
        pairs = zip(outs, arrays[count:], strict=True)
        return outs, sum(
            (out.astype(loss_dtype) * mask.astype(loss_dtype)).sum() for out, mask in pairs
        )

    return function


def _wrapped(wraps: Sequence[str], other: Any, x_of: Any, function: Callable[..., Any]) -> Any:
    """Return a transformed function; `other` is the branch that a cond never takes."""
    for wrap in reversed(wraps):
        if wrap == "jit":
            function = jax.jit(function)
        elif wrap == "cond":
            function = partial(_cond, lambda *_: jnp.asarray(True), function, other)
        elif wrap == "select":
            function = partial(_cond, partial(_is_small, x_of), function, other)
        else:
            policy = getattr(jax.checkpoint_policies, wrap.removeprefix("checkpoint_"), None)
            function = jax.checkpoint(function, policy=policy)
    return function


def _cond(flag: Any, function: Any, other: Any, *given: Any) -> Any:
    return jax.lax.cond(flag(*given), function, other, *given)


def _is_small(x_of: Any, *given: Any) -> Any:
    return x_of(*given).reshape(-1)[0] < 1e3  # always true, but JAX does not know


# --- derivatives ----------------------------------------------------------------------------------


def _derivative(oracle: Oracle, run: Run, function: Any, argnums: Any) -> Any:
    """Return a function of operands and masks; if the run is bound, of only the wanted operands."""

    def loss(*arrays: Any) -> Any:
        return function(*arrays)[1]

    if run.derivative in SHARDED:
        return jax.jit(_sharded(oracle.net, run.derivative, loss, argnums))
    if run.derivative == "vjp_late":  # it returns a function, so it cannot be jitted
        return partial(_pulled, oracle, run.jitted, function, argnums)
    axes = [*map(run.batched.get, oracle.net.operands), *[None] * len(oracle.masks)]
    grad = jax.grad(loss, argnums)
    of_names: dict[str, Callable[..., Any]] = {
        "forward": lambda *arrays: function(*arrays)[0],
        "grad": grad,
        "value_and_grad": jax.value_and_grad(loss, argnums),
        "vjp": lambda *arrays: _pulled(oracle, False, function, argnums, *arrays)(),
        "jacrev": jax.jacrev(lambda *arrays: jnp.stack([1, -2]) * loss(*arrays), argnums),
        "vmap_of_grad": jax.vmap(grad, axes),
        "grad_of_vmap": jax.grad(lambda *arrays: jax.vmap(loss, axes)(*arrays).sum(), argnums),
        "grad_of_map": jax.grad(partial(_over_examples, False, loss, axes), argnums),
        "grad_of_scan": jax.grad(partial(_over_examples, True, loss, axes), argnums),
        "grad_of_grad": jax.grad(lambda *arrays: sum(one.sum() for one in grad(*arrays)), argnums),
        "grad_of_jvp": jax.grad(partial(_pushed, jax.jvp, loss, argnums), argnums),
        "hessian": jax.hessian(loss, argnums),
        "jvp": partial(_pushed, jax.jvp, loss, argnums),
        "jacfwd": jax.jacfwd(loss, argnums),
        "jvp_of_grad": partial(_pushed, jax.jvp, grad, argnums),
        "linearize": partial(_pushed, _linearized, loss, argnums),
    }
    derived = of_names[run.derivative]
    return jax.jit(derived) if run.jitted else derived


def _pulled(oracle: Oracle, jitted: bool, function: Any, argnums: Any, *arrays: Any) -> Any:
    """Return a function that returns the results, and the gradients for two cotangents."""
    outs_of, wanted = _bind(lambda *arrays: function(*arrays)[0], arrays, argnums)
    outs, pull = jax.vjp(jax.jit(outs_of) if jitted else outs_of, *wanted)
    pull = jax.jit(pull) if jitted else pull
    pairs = zip(oracle.masks, outs, strict=True)
    masks = tuple(jnp.asarray(mask).astype(out.dtype) for mask, out in pairs)
    return lambda: (outs, pull(masks), pull(tuple(-2 * mask for mask in masks)))


def _over_examples(by_scan: bool, loss: Any, axes: Any, *arrays: Any) -> Any:
    """Return the sum of the loss over examples, one after the other."""
    batched = {argnum: arrays[argnum] for argnum, axis in enumerate(axes) if axis is not None}

    def of_one(own: Any) -> Any:
        return loss(*[own.get(argnum, one) for argnum, one in enumerate(arrays)])

    if not by_scan:
        return jax.lax.map(of_one, batched).sum()
    zero = jnp.zeros((), "float64" if arrays[0].dtype == "float64" else "float32")
    return jax.lax.scan(lambda total, own: (total + of_one(own), None), zero, batched)[0]


def _pushed(push: Any, function: Any, argnums: Any, *arrays: Any) -> Any:
    of_wanted, wanted = _bind(function, arrays, argnums)
    return push(of_wanted, tuple(wanted), tuple(jnp.ones_like(one) for one in wanted))[1]


def _linearized(function: Any, arrays: Any, tangents: Any) -> Any:
    value, linear = jax.linearize(function, *arrays)
    return value, linear(*tangents)


def _sharded(net: Net, how: str, loss: Any, argnums: Any) -> Any:
    """Return the derivative with rows, or samples, spread over the devices."""
    mesh = jax.sharding.Mesh(jax.devices()[:_DEVICES], _AXIS)
    spec: list[Any] = []
    for name, one in net.operands.items():
        before = len(net.whole(name)) - len(one.shape)
        spec.append(jax.P(*[None] * before, _AXIS) if one.leading else jax.P())
    wanted = tuple(spec[argnum] for argnum in argnums)
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=(*spec, *[jax.P(_AXIS)] * len(net.results)))
    grad = jax.grad(loss, argnums)

    def total(*arrays: Any) -> Any:
        return jax.lax.psum(loss(*arrays), _AXIS)

    def summed(*arrays: Any) -> Any:
        pairs = zip(grad(*arrays), wanted, strict=True)
        return tuple(
            one if _AXIS in axes_of else jax.lax.psum(one, _AXIS) for one, axes_of in pairs
        )

    if how == "grad_of_shard_map":
        return jax.grad(mapped(total, out_specs=jax.P()), argnums)
    if how == "shard_map_of_grad":
        return mapped(grad, out_specs=wanted)
    return mapped(summed, out_specs=wanted, check_vma=False)
