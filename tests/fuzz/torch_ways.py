# SPDX-License-Identifier: MIT
"""Ways to run a network in PyTorch: each returns results and gradients by name.

A way is a function of a `Run`, which is by cunorm or by formulas. In a run by formulas, a way skips
steps that test only cunorm, such as tracing.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.func import grad, jacrev, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import cunorm.torch as ct
from tests.fuzz.torch_programs import leaf
from tests.fuzz.torch_runs import Results, Run, named, results
from tests.fuzz.torch_wraps import plain


def backward(run: Run) -> Results:
    outputs = run.outputs()
    run.backward(outputs)
    return results(outputs) | _grads(run)


def _grads(run: Run) -> Results:
    return named("d ", run.leaves(), [plain(one.grad) for one in run.leaves().values()])


def autograd_grad(run: Run) -> Results:
    outputs = run.outputs()
    return results(outputs) | run.gradients(outputs)


def parts(run: Run) -> Results:
    """Take the gradients of each output by each leaf, one at a time, from one graph."""
    outputs, found = run.outputs(), {}
    for number, (one, dy) in enumerate(zip(*run.recorded(outputs), strict=True)):
        for name, sources in run.wanted().items():
            (its,) = torch.autograd.grad(one, sources, dy, retain_graph=True, allow_unused=True)
            found |= named(f"y{number} d ", [name], [plain(its)])
    return results(outputs) | found


def repeated(run: Run) -> Results:
    """Go backward twice through a graph; gradients add up."""
    outputs = run.outputs()
    for retain_graph in (True, False):
        run.backward(outputs, retain_graph=retain_graph)
    return results(outputs) | _grads(run)


def toggled(run: Run) -> Results:
    """Call again and again, with other numbers, and other leaves that require gradients."""
    names, found = run.program.wanted(), {}
    for turn, some in enumerate([names, names[:1], names[-1:], names[::2], [], names]):
        run.require(some)
        with torch.no_grad():
            for name, one in run.leaves().items():
                one.copy_(leaf(run.program, name, turn))
        its = autograd_grad(run) if some else results(run.outputs())
        found |= {f"{turn}: {name}": one for name, one in its.items()}
    return found


def hooked(run: Run) -> Results:
    """Change gradients and results by hooks of modules and of tensors."""
    for norm in run.net.norms:
        norm.register_forward_hook(lambda module, given, found: (found[0] * 1.5, found[1]))
        if norm.module is not None:
            norm.module.register_full_backward_hook(lambda module, dx, dy: None)
    outputs = run.outputs()
    for one in (*outputs[:1], *run.wanted().values()):
        if one.requires_grad:
            one.register_hook(lambda gradient: gradient * -2)
    run.backward(outputs)
    return results(outputs) | _grads(run)


def changed(run: Run) -> Results:
    """Change a leaf or result in place after the forward: this fails, or changes no gradient."""
    outputs = run.outputs()
    before = results([one.clone() for one in outputs])
    if run.by == "cunorm":
        sources = [*run.leaves().values(), *outputs]
        with torch.no_grad():
            sources[run.program.seed % len(sources)].mul_(3.0)
    return before | run.gradients(outputs)


def second(run: Run) -> Results:
    """Take second derivatives, by the leaves and by dy."""
    outputs, wanted = run.outputs(), run.wanted()
    recorded, dys = run.recorded(outputs)
    dys = [dy.detach().requires_grad_() for dy in dys]
    sources = [*wanted.values()]
    first = torch.autograd.grad(recorded, sources, dys, create_graph=True, allow_unused=True)
    used = [one for one in first if one is not None]
    total = sum((one * run.number(one, f"2 {i}")).sum() for i, one in enumerate(used))
    both = torch.autograd.grad(total, [*sources, *dys], materialize_grads=True)
    names = [*wanted, *(f"dy{i}" for i in range(len(dys)))]
    firsts = named("d ", wanted, map(plain, first))
    return results(outputs) | firsts | named("d d ", names, map(plain, both))


def is_grads_batched(run: Run) -> Results:
    outputs, wanted = run.outputs(), run.wanted()
    recorded, _ = run.recorded(outputs)
    pairs = [[run.number(one, f"{i} {k}") for k in range(2)] for i, one in enumerate(recorded)]
    options = {"is_grads_batched": True, "allow_unused": True}
    sources, dys = [*wanted.values()], [*map(torch.stack, pairs)]
    found = torch.autograd.grad(recorded, sources, dys, **options)
    return results(outputs) | named("d ", wanted, map(plain, found))


def func_grad(run: Run) -> Results:
    wanted = _detached(run.wanted())
    return named("d ", wanted, grad(run.loss)(wanted).values())


def func_vjp(run: Run) -> Results:
    wanted = _detached(run.wanted())
    outputs, pull = vjp(run.call, wanted)
    (found,) = pull(tuple(run.dys(outputs)))
    return results(outputs) | named("d ", found, found.values())


def func_jacrev(run: Run) -> Results:
    wanted = _detached(run.wanted())
    found = jacrev(lambda leaves: run.call(leaves)[0][0, 0, :3])(wanted)
    return named("d ", found, found.values())


def _detached(leaves: dict[str, Any]) -> dict[str, Any]:
    return {name: one.detach() for name, one in leaves.items()}


def _batch(run: Run, count: int = 2) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Draw a batch of some leaves, along various axes; all examples share the other leaves."""
    leaves, dims = {}, {}
    for index, name in enumerate(run.wanted()):
        one = leaf(run.program, name, 7, (count,))
        dims[name] = dim = (
            None if (run.program.seed + index) % 3 == 2 and index else index % one.dim()
        )
        own = run.leaves()[name].detach()
        leaves[name] = own if dim is None else run.cast(one).movedim(0, dim).contiguous()
    return leaves, dims


def batched(run: Run) -> Results:
    leaves, dims = _batch(run)
    return results(vmap(run.call, (dims,))(leaves))


def batched_grad(run: Run) -> Results:
    leaves, dims = _batch(run)
    found = vmap(grad(run.loss), (dims,))(leaves)
    return named("d ", found, found.values())


def empty_batch(run: Run) -> Results:
    leaves, dims = _batch(run, 0)
    outputs = vmap(run.call, (dims,))(leaves)
    found = vmap(grad(run.loss), (dims,))(leaves)
    shapes = {**results(outputs), **named("d ", found, found.values())}
    return shapes | {"y": run.call(_detached(run.wanted()))[0]}


def functional(run: Run) -> Results:
    """Call with leaves other than the module's own."""
    other = Run(run.program, run.by, salt=5)
    leaves = {name: one.detach().requires_grad_() for name, one in other.wanted().items()}
    outputs = run.call(leaves)
    recorded, dys = run.recorded(outputs)
    found = torch.autograd.grad(recorded, [*leaves.values()], dys, allow_unused=True)
    return results(outputs) | named("d ", leaves, map(plain, found))


def traced(run: Run) -> Results:
    """Trace on some inputs, and run on others."""
    if run.by == "cunorm":
        others = [one.detach() * -0.5 + 0.1 for one in run.inputs]
        with torch.no_grad() if run.program.seed % 2 else torch.enable_grad():
            run.forward = torch.jit.trace(run.net, tuple(others), check_trace=False)
    return autograd_grad(run)


def compiled(run: Run) -> Results:
    if run.by == "cunorm":
        torch._dynamo.reset()
        backend = ("eager", "aot_eager")[run.program.seed % 2]
        run.forward = torch.compile(run.net, fullgraph=True, backend=backend)
    return autograd_grad(run)


def through_fx(run: Run) -> Results:
    """Trace the gradient of the loss with make_fx, or functionalize it."""
    wanted, derived = _detached(run.wanted()), grad(run.loss)
    if run.by == "cunorm" and run.program.seed % 2:
        derived = torch.func.functionalize(derived)
    elif run.by == "cunorm":
        others = {name: one * -0.5 for name, one in wanted.items()}
        derived = make_fx(lambda leaves: grad(run.loss)(leaves))(others)
    return named("d ", wanted, derived(wanted).values())


def subclassed(run: Run) -> Results:
    """Run with inputs, parameters or both in a subclass with plain memory."""
    if run.by == "cunorm":
        turn = run.program.seed % 3
        run.subclass(inputs=turn != 1, parameters=turn != 0)
    return autograd_grad(run)


def copied(run: Run) -> Results:
    """Copy and pickle the module; restore replaced norms, and replace them again."""
    net = copy.deepcopy(run.net)
    run.net = run.forward = pickle.loads(pickle.dumps(net))
    found = autograd_grad(run)
    if run.by == "cunorm":
        ct.restore_norms(run.net)
    between = results(run.outputs())
    if run.by == "cunorm":
        ct.replace_norms(run.net)
    after = backward(run)
    return found | {f"{n} between": one for n, one in between.items()} | after


def threads(run: Run) -> Results:
    """Run in several threads at once, each with leaves of its own."""
    runs = [Run(run.program, run.by, salt) for salt in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(autograd_grad, runs)
    return {f"{i}: {name}": one for i, its in enumerate(found) for name, one in its.items()}


def _along(run: Run, found: dict[str, Any]) -> Any:
    """Return the sum of gradients along drawn directions."""
    return sum((one * run.number(one, name)).sum() for name, one in found.items())


def _tangents(run: Run, wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: run.number(one, name) for name, one in wanted.items()}


def second_func(run: Run) -> Results:
    """Take the gradient of gradients."""
    wanted, first = _detached(run.wanted()), grad(run.loss)
    return named("d d ", wanted, grad(lambda leaves: _along(run, first(leaves)))(wanted).values())


def forward_mode(run: Run) -> Results:
    wanted = _detached(run.wanted())
    outputs, found = torch.func.jvp(run.call, (wanted,), (_tangents(run, wanted),))
    return results(outputs) | named("t ", range(len(found)), found)


def forward_over_reverse(run: Run) -> Results:
    """Take the tangents of gradients, which is a product with the Hessian."""
    wanted = _detached(run.wanted())
    firsts, found = torch.func.jvp(grad(run.loss), (wanted,), (_tangents(run, wanted),))
    return named("d ", wanted, firsts.values()) | named("t d ", wanted, found.values())


def reverse_over_forward(run: Run) -> Results:
    wanted = _detached(run.wanted())

    def tangent(leaves: Any) -> Any:
        return torch.func.jvp(run.loss, (leaves,), (_tangents(run, wanted),))[1]

    return named("d t ", wanted, grad(tangent)(wanted).values())


def forward_twice(run: Run) -> Results:
    wanted = _detached(run.wanted())

    def tangents(leaves: Any) -> Any:
        return torch.func.jvp(run.call, (leaves,), (_tangents(run, wanted),))[1]

    _, found = torch.func.jvp(tangents, (wanted,), (_tangents(run, wanted),))
    return named("t t ", range(len(found)), found)


def batched_hessian(run: Run) -> Results:
    """Take tangents of the gradients of each item of a batch."""
    leaves, dims = _batch(run)

    def product(leaves: Any) -> Any:
        return torch.func.jvp(grad(run.loss), (leaves,), (_tangents(run, leaves),))[1]

    found = vmap(product, (dims,))(leaves)
    return named("t d ", found, found.values())


def duals(run: Run) -> Results:
    """Take tangents of a recorded call, and gradients of the tangents."""
    wanted = run.wanted()
    with forward_ad.dual_level():
        pairs = zip(wanted.values(), _tangents(run, _detached(wanted)).values(), strict=True)
        moved = dict(zip(wanted, (forward_ad.make_dual(*pair) for pair in pairs), strict=True))
        outputs = [forward_ad.unpack_dual(one) for one in run.call(moved)]
        tangents = [  # without a tangent, it is 0
            torch.zeros_like(one.primal) if one.tangent is None else one.tangent for one in outputs
        ]
        total = sum((one * run.number(one, i)).sum() for i, one in enumerate(tangents))
        both = torch.autograd.grad(total, [*wanted.values()], materialize_grads=True)
    found = named("t ", range(len(tangents)), map(plain, tangents))
    return found | named("d t ", wanted, map(plain, both))


_OF_AUTOGRAD = (backward, autograd_grad, parts, repeated, toggled, hooked, changed, second)
_OF_FUNC = (is_grads_batched, func_grad, func_vjp, func_jacrev, batched, batched_grad, empty_batch)
_OF_MODULES = (functional, traced, compiled, through_fx, subclassed, copied, threads)
_DERIVATIVES = (second_func, forward_mode, forward_over_reverse, reverse_over_forward)
_DERIVATIVES += (forward_twice, batched_hessian, duals)
WAYS: dict[str, Callable[[Run], Results]] = {
    way.__name__: way for way in (*_OF_AUTOGRAD, *_OF_FUNC, *_OF_MODULES, *_DERIVATIVES)
}
