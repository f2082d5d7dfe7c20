# SPDX-License-Identifier: MIT
"""Random programs: a network of norms, and how it is transformed and differentiated.

`kinds` counts what is drawn; tests check that hardly anything is missing.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from tests.fuzz.jax_nets import HALVES, Net, Node, Operand, Use
from tests.support.jax_formulas import FORMULAS

OPS = ("rms_norm", "layer_norm", "l2_norm", "normalize", "add_rms_norm", "add_layer_norm")
OPS += ("add_normalize", "group_norm", "instance_norm")
LOOPS = ("python", "scan", "fori_loop")
# Transformations of a step of the network, or of the whole network. The condition of "select"
# depends on x: vmap makes a select of this cond.
_POLICIES = ("dots_saveable", "nothing_saveable", "everything_saveable")
WRAPS = ("jit", "cond", "select", "checkpoint", *(f"checkpoint_{name}" for name in _POLICIES))
BATCHED = ("vmap_of_grad", "grad_of_vmap", "grad_of_map", "grad_of_scan")  # these are over examples
# The gradients of "vjp_late" are computed after all other runs.
DERIVATIVES = ("forward", "grad", "value_and_grad", "vjp", "vjp_late", "jacrev", *BATCHED)
SHARDED = ("grad_of_shard_map", "shard_map_of_grad", "shard_map_unchecked")
FORWARD = ("jvp", "jacfwd", "linearize")
SECOND = ("grad_of_grad", "grad_of_jvp", "hessian", "jvp_of_grad")  # not in half precision


class Run(NamedTuple):
    """One use of a network."""

    derivative: str
    wanted: tuple[str, ...]  # the operands by which it is differentiated
    batched: dict[str, int]  # the axis of examples, for operands with such an axis
    world: int = 0  # which of two values all operands have
    loop: str = "python"
    of_step: tuple[str, ...] = ()  # transformations of a step
    of_all: tuple[str, ...] = ()  # transformations of the network
    jitted: bool = False  # whether the derivative is jitted
    bound: bool = False  # whether operands that are not wanted are constants, not arguments
    threads: int = 1  # how many threads make the same run at once


class Program(NamedTuple):
    net: Net
    runs: tuple[Run, ...]
    values: int  # the seed of values


def program(seed: int, number: int) -> Program:
    """Draw a program."""
    draw = random.Random(f"{seed} {number}")
    net = _net(draw)
    runs = _runs(draw, net)
    return Program(net, runs, draw.randrange(10**6))


def kinds(program: Program) -> Counter[str]:
    """Count the properties of a program."""
    net = program.net
    uses = [(name, use) for node in net.nodes for name, use in node.operands.items()]
    shared = Counter(use.name for _, use in uses if use.name != "h")
    found = Counter(
        {
            f"dtype {net.dtype}": 1,
            "shared operands": any(n > 1 for n in shared.values()),
            "stacked operands": any(one.stacked for one in net.operands.values()),
            "sliced operands": sum(use.part is not None for _, use in uses),
            "frozen operands": sum(use.frozen for _, use in uses),
            "x as gate": sum(use.name == "h" for _, use in uses),
            "gate of the branch": sum(
                node.options.get("gate_position") == "branch" for node in net.nodes
            ),
            "parameters of each row": sum(
                one.leading and name.startswith(("weight", "bias"))
                for name, one in net.operands.items()
            ),
            "streams that are results": net.uses_stream,
            "x of another dtype": sum(node.dtype != net.dtype for node in net.nodes),
        }
    )
    found.update(f"operand {name}" for name, _ in uses)
    for node in net.nodes:
        found.update([node.op, f"join {node.join}", *(f"option {name}" for name in node.options)])
        if node.residual:
            found.update([f"residual {node.residual}", f"results {node.keep}"])
            found["stream of another dtype"] += net.operands["r"].dtype != node.dtype
    for run in program.runs:
        found.update([run.derivative, f"loop {run.loop}"])
        found.update(f"{wrap} of a step" for wrap in run.of_step)
        found.update(f"{wrap} of all" for wrap in run.of_all)
        found["jit of the derivative"] += run.jitted
        found["constants"] += run.bound
        found["threads"] += run.threads > 1
    return +found


# --- networks -------------------------------------------------------------------------------------


def _net(draw: random.Random) -> Net:
    shape = draw.choice([(4, 8), (4, 8), (4, 4, 8)])
    dtype = draw.choices(["float32", *HALVES, "float64"], [70, 12, 8, 10])[0]
    steps = draw.choice([1, 1, 2])
    operands = {"x": Operand(shape, dtype, leading=True)}
    nodes: list[Node] = []
    for _ in range(draw.choices([1, 2, 3, 4], [3, 4, 2, 1])[0]):
        if nodes and draw.random() < 0.4:
            node = draw.choice(nodes)  # a norm again, with its operands or with others
            if draw.random() < 0.7:
                of_operand = partial(_operand, draw, operands, dtype=dtype, shared=0)
                repeat = {
                    name: use if use.name == "h" else of_operand(name, *_like(operands[use.name]))
                    for name, use in node.operands.items()
                }
                node = node._replace(operands=repeat)
            nodes.append(node._replace(join=_joined(draw)))
        else:
            nodes.append(_node(draw, shape, dtype, operands))
    if any(node.residual for node in nodes):
        usual = [dtype] if dtype == "float64" else [dtype, "float32"]
        operands["r"] = Operand(shape, draw.choice(usual), leading=True)
    if any(node.join == "matmul" for node in nodes):
        operands["m"] = Operand((8, 8), dtype, stacked=draw.random() < 0.5)
    is_unused = all(node.keep == "stream" for node in nodes if node.residual)
    uses_stream = (is_unused or draw.random() < 0.5) and "r" in operands
    dtypes = {dtype, *(one.dtype for one in operands.values()), *(node.dtype for node in nodes)}
    if dtypes & {*HALVES}:  # a rounding may cross the corner of relu
        for node in nodes:
            changed = {name: "gelu" for name, one in node.options.items() if one == "relu"}
            node.options.update(changed)
    return Net(shape, dtype, steps, tuple(nodes), operands, uses_stream)


def _joined(draw: random.Random) -> str:
    return draw.choice(["tanh", "tanh", "add", "matmul", "none"])


def _node(draw: random.Random, shape: tuple[int, ...], dtype: str, operands: Any) -> Node:
    ops = OPS if len(shape) == 3 else OPS[:-1]  # instance_norm needs positions
    op = draw.choice(ops)
    is_group = op in ("group_norm", "instance_norm")
    options, row = (_group_options if is_group else _row_options)(draw, op, shape)
    names = [] if op == "l2_norm" else ["weight", "bias"]
    given: dict[str, Use] = {}
    for name in names:
        if draw.random() < 0.75:
            own = _modulated(draw, shape, row, is_group)
            given[name] = _operand(draw, operands, name, *own, dtype)
    if op != "l2_norm" and not is_group and draw.random() < 0.35:
        is_x, is_branch = draw.random() < 0.25, op.startswith("add_") and draw.random() < 0.5
        own = (shape, True) if not is_branch else _of_branch(draw, shape, row)
        given["gate"] = Use("h") if is_x else _operand(draw, operands, "gate", *own, dtype)
        options["gate_activation"] = draw.choice([*FORMULAS.activations])
        options["gate_position"] = "branch" if is_branch else draw.choice(["pre", "post"])
    narrow = dtype == "float32" and draw.random() < 0.1
    x_dtype = draw.choice(HALVES) if narrow else dtype
    if x_dtype != "float32":
        options.pop("round_before_weight", None)
    residual = draw.choice(["stream", "stream", "h"]) if op.startswith("add_") else ""
    keep = draw.choices(["both", "y", "stream"], [6, 2, 1])[0]
    return Node(op, options, given, x_dtype, residual, keep if residual else "both", _joined(draw))


def _row_options(draw: random.Random, op: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    options: dict[str, Any] = {}
    axis, chance = -1, draw.random()
    if chance < 0.2:
        options["groups"] = 2
    elif chance < 0.5 and len(shape) == 3:
        axis = options["axis"] = -2
    if "normalize" in op:
        options |= {"c": draw.choice([None, 1.5]), "center": draw.random() < 0.5}
    if op != "l2_norm" and draw.random() < 0.25:
        options["weight_offset"] = 1.0
    if op != "l2_norm" and draw.random() < 0.1:
        options["round_before_weight"] = True
    if draw.random() < 0.2:
        options["eps"] = 1e-3
    return options, shape[axis:]


def _group_options(draw: random.Random, op: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    axis = draw.choice([-1, 1]) if len(shape) == 3 else -1
    options: dict[str, Any] = {"channel_axis": axis}
    if op == "group_norm":
        options["num_groups"] = draw.choice([1, 2])
    if draw.random() < 0.4:
        options["activation"] = draw.choice([*FORMULAS.activations][1:])
    return options, (shape[axis],)


_OfShape = tuple[tuple[int, ...], bool]  # a shape, and whether its first axis is x's first axis


def _modulated(draw: random.Random, shape: Any, row: Any, is_group: bool) -> _OfShape:
    """Draw the shape of a weight or bias: that of a row or, rarely, with some of x's other axes."""
    if draw.random() < 0.7:
        return row, False
    if is_group:
        is_leading = draw.random() < 0.7
        return (shape[0] if is_leading else 1, *row), is_leading
    leading = shape[: -len(row)]
    chosen = tuple(draw.choice([1, size]) for size in leading[draw.randrange(len(leading) + 1) :])
    return (*chosen, *row), len(chosen) == len(leading) and chosen[0] > 1


def _of_branch(draw: random.Random, shape: Any, row: Any) -> _OfShape:
    """Draw the shape of a gate of the branch: x's, a weight's, or with one number for each row."""
    if draw.random() < 0.3:
        return shape, True
    (*chosen,), is_leading = _modulated(draw, shape, row, is_group=False)
    if draw.random() < 0.4:
        chosen[-len(row) :] = [1] * len(row)
    return tuple(chosen), is_leading


def _like(one: Operand) -> _OfShape:
    return one.shape, one.leading


def _operand(
    draw: random.Random,
    operands: Any,
    name: str,
    shape: Any,
    leading: bool,
    dtype: str,
    shared: float = 0.35,
) -> Use:
    """Return an operand of another norm, or a new operand."""
    like = (shape, leading)
    alike = [key for key, one in operands.items() if key[:4] == name[:4] and _like(one) == like]
    if alike and draw.random() < shared:
        key = draw.choice(alike)
    else:
        key = f"{name}{len(operands)}"
        own = "float32" if dtype in HALVES and draw.random() < 0.4 else dtype
        parts = 2 if draw.random() < 0.2 else 0
        operands[key] = Operand(shape, own, draw.random() < 0.4, parts, leading)
    part = draw.randrange(2) if operands[key].parts else None
    return Use(key, part, frozen=draw.random() < 0.06)


# --- runs -----------------------------------------------------------------------------------------


def _runs(draw: random.Random, net: Net) -> tuple[Run, ...]:
    """Draw runs of a network: they may share transformations, and differ in operands."""
    styles = [_style(draw) for _ in range(draw.choice([1, 1, 2]))]
    hows = [draw.choice(["grad", "vjp"]), *(_how(draw, net) for _ in range(draw.choice([1, 2, 3])))]
    runs: list[Run] = []
    for how in hows:
        wanted = tuple(sorted(name for name in net.operands if draw.random() < 0.5))
        wanted = wanted or (draw.choice(sorted(net.operands)),)
        batched: dict[str, int] = {}
        if how in BATCHED:
            names = [name for name in net.operands if draw.random() < 0.5] or ["x"]
            is_front = how in ("grad_of_map", "grad_of_scan")
            axes = {name: len(net.whole(name)) + 1 for name in names}
            batched = {n: 0 if is_front else draw.randrange(count) for n, count in axes.items()}
        run = Run(
            how,
            wanted,
            batched,
            world=draw.randrange(2),
            jitted=draw.random() < 0.5,
            bound=not batched and how not in SHARDED and draw.random() < 0.25,
            threads=_threads(draw, net, how),
        )
        runs.append(run._replace(**draw.choice(styles)))
    repeat = draw.choice(runs)  # a run again, with other values
    return (*runs, repeat._replace(world=1 - repeat.world))


def _threads(draw: random.Random, net: Net, how: str) -> int:
    """Return a number of threads: 1 for large networks, because each thread compiles."""
    is_small = how in ("grad", "vjp", "value_and_grad") and len(net.nodes) < 3
    return 4 if is_small and draw.random() < 0.15 else 1


def _how(draw: random.Random, net: Net) -> str:
    dtypes = {net.dtype, *(one.dtype for one in net.operands.values())}
    dtypes |= {node.dtype for node in net.nodes}
    second = FORWARD if dtypes & {*HALVES} else SECOND
    return draw.choice(draw.choices([DERIVATIVES, SHARDED, FORWARD, second], [68, 12, 8, 12])[0])


def _style(draw: random.Random) -> dict[str, Any]:
    chances = [0, 0, 1, 1, 2]
    return {
        "loop": draw.choice(LOOPS),
        "of_step": tuple(draw.sample(WRAPS, draw.choice(chances))),
        "of_all": tuple(draw.sample(WRAPS, draw.choice(chances[:-1]))),
    }
