# SPDX-License-Identifier: MIT
"""Draw programs of PyTorch: each way, wrap and kind of dy in turn, the rest at random."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from tests.fuzz.torch_programs import FORMS, GATES, JOINS, Program, Step
from tests.fuzz.torch_ways import WAYS
from tests.fuzz.torch_wraps import DYS, SAVING, WRAPS, keeps_leaf_hooks

# The norms of the short test, for which few kernels are compiled.
FEW = ("rms_norm", "layer_norm", "add_rms_norm", "group_norm", "instance_norm", "l2_norm")
FEW += ("RMSNorm", "AddRMSNorm", "LayerNorm", "nn.LayerNorm", "nn.GroupNorm", "Llama")
_MORE = ("normalize", "add_layer_norm", "add_normalize", "GatedRMSNorm", "GroupNorm", "nn.RMSNorm")
_MORE += ("Gemma", "Biased", "Gated")
NORMS = FEW + _MORE
_FUNCTIONS = {  # for each module: the function with its formula
    "RMSNorm": "rms_norm",
    "AddRMSNorm": "add_rms_norm",
    "GatedRMSNorm": "rms_norm",
    "LayerNorm": "layer_norm",
    "GroupNorm": "group_norm",
    "nn.RMSNorm": "rms_norm",
    "nn.LayerNorm": "layer_norm",
    "nn.GroupNorm": "group_norm",
    "Llama": "rms_norm",
    "Gemma": "rms_norm",
    "Biased": "normalize",
    "Gated": "rms_norm",
}
_VARIANTS = 3  # of each norm in float32; in other dtypes there is one
_BOTH = ("LayerNorm", "GroupNorm", "nn.LayerNorm", "nn.GroupNorm", "Biased")  # weight and bias
_HALF = ("float16", "bfloat16")
_WRAPPED = ("backward", "grad", "parts", "repeated", "toggled", "hooked", "changed", "second")
_WRAPPED += ("subclassed",)

# In these ways PyTorch has no rule for negated views.
_BATCHED = ("is_grads_batched", "func.jacrev", "vmap", "vmap of grad", "empty vmap")


def draw(seed: int, *, few: bool, norm: str | None = None) -> Program:
    """Draw the program of a seed; the seed determines the way, `few` and `norm` limit the norms."""
    rng = Random(f"program {seed}")
    way, names = [*WAYS][seed % len(WAYS)], FEW if few else NORMS
    dtype = "float32"
    if not few:
        dtype = rng.choice(["float32"] * 14 + ["float64"] * 2 + ["bfloat16"] * 3 + ["float16"])
    count = rng.randint(1, 2 if dtype in _HALF else 3 if few else 4)
    steps: list[Step] = []
    for _ in range(1 if norm else count):
        before = [step.function for step in steps]
        steps.append(_step(rng, norm or rng.choice(names), dtype, few, before))
    if rng.random() < 0.6:  # then the last norm gets the program's dy
        steps[-1] = Step(**{**vars(steps[-1]), "join": "none"})
    if way == "copied":  # restored norms of PyTorch need an x with weight's dtype
        options = [tuple(one for one in step.options if one[0] != "dtype") for step in steps]
        steps = [replace(step, options=one) for step, one in zip(steps, options, strict=True)]
    program = Program(seed, tuple(steps), way, dtype=dtype)
    # Compiled backwards refuse subclasses that they were not traced with.
    dys = [one for one in DYS if way != "compiled" or one not in ("trivial", "wrapped", "async")]
    more: dict[str, Any] = {
        "wraps": _wraps(rng, way, seed // len(WAYS), few),
        "forms": () if norm else _forms(rng, program),
        "dy": dys[(seed + seed // len(WAYS)) % len(dys)],
        "uses_stream": rng.random() < 0.7,
        "parameters": dtype
        if few
        else rng.choice([dtype, "float32"] if dtype in _HALF else [dtype]),
    }
    program = Program(**{**vars(program), **more})
    return Program(**{**vars(program), "frozen": _frozen(rng, program, few)})


def _frozen(rng: Random, program: Program, few: bool) -> tuple[str, ...]:
    leaves = program.leaves()
    if "reentrant" in program.wraps:  # this wrap needs an input with gradients
        return ()
    kinds = ["none", "parameters", "inputs"]
    kind = "some" if not few and rng.random() < 0.1 else rng.choice(kinds)
    if kind == "some":
        return tuple(name for name in leaves if rng.random() < 0.4)
    given = {"none": (), "inputs": "xrg", "parameters": "wctl"}[kind]
    return tuple(name for name in leaves if name[0] in given)


def _wraps(rng: Random, way: str, turn: int, few: bool) -> tuple[str, ...]:
    """Return wraps for a way: none or one, by rotation, and perhaps a random second."""
    if way not in _WRAPPED:
        return ()
    some = [one for one in WRAPS if one != "reentrant" or way == "backward"]
    some = [one for one in some if one != "autocast" or not few]
    if way == "changed":  # with these wraps PyTorch does not see that saved tensors change
        some = [one for one in some if one not in ("checkpoint", "reentrant", "subclass")]
    if way == "hooked" and not keeps_leaf_hooks():
        some = [one for one in some if one not in SAVING]
    index = (turn + _WRAPPED.index(way)) % (len(some) + 1)
    if index == 0:
        return ()
    first, second = some[index - 1], rng.choice(some)
    return (first, second) if first != second and rng.random() < 0.4 else (first,)


def _forms(rng: Random, program: Program) -> tuple[tuple[str, str], ...]:
    modules = {n for step in program.steps if step.made != "function" for _, n in step.operands}
    found = {}
    for name in program.leaves():
        is_input = name in "xrg"
        if rng.random() < 0.5 or name == "l" or (name in modules and not is_input):
            continue
        some = FORMS[:5] + (("x", "x") if name in "rg" else ())
        if program.dtype not in _HALF and program.way not in _BATCHED:
            some += ("negated",)
        found[name] = rng.choice(some)
    return tuple(found.items())


def _step(rng: Random, norm: str, dtype: str, few: bool, before: list[str]) -> Step:
    """Draw a step: options that need another build have few variants, all else is random."""
    variant = 0 if few else rng.randrange(_VARIANTS if dtype == "float32" else 1) + 1
    fixed = Random(f"{norm} {variant}")
    function = _FUNCTIONS.get(norm, norm)
    options: dict[str, Any] = {"eps": rng.choice([1e-5, 1e-3, 0.1])}
    operands: dict[str, str] = {}
    if function.startswith("add_"):
        has_stream = any(one.startswith("add_") for one in before)
        residual = rng.choice(["stream", "stream", "r"] if has_stream else ["r", "r", None])
        if residual:
            operands["residual"] = residual
    if norm in _FUNCTIONS:
        _module_options(rng, fixed, norm, options, operands, few)
    elif function in ("group_norm", "instance_norm"):
        _group_options(rng, fixed, norm, options, operands, few)
        if dtype in _HALF and options.get("activation") == "relu":
            options["activation"] = "tanh"  # a rounding may cross the corner of relu
    else:
        _row_options(rng, fixed, norm, options, operands, few)
    made = norm if norm in _FUNCTIONS else "function"
    return Step(function, made, (*operands.items(),), (*options.items(),), rng.choice(JOINS))


def _module_options(
    rng: Random, fixed: Random, norm: str, options: Any, operands: Any, few: bool
) -> None:
    plane = norm in ("RMSNorm", "LayerNorm") and rng.random() < 0.25
    kind = "c" if "GroupNorm" in norm else "t" if plane else "w"
    operands["weight"] = kind + rng.choice("12")
    if norm in _BOTH:
        operands["bias"] = kind + "3"
    if norm == "Gated" or (norm == "GatedRMSNorm" and rng.random() < 0.8):
        operands["gate"] = "g"
    if plane:
        options["axis"] = -2
    if kind == "c":
        options["num_groups"] = rng.choice([1, 2, 4])
    if norm == "GroupNorm":
        options["activation"] = fixed.choice([None, "silu", "gelu", "tanh"])
    if norm in ("Gemma", "Llama"):
        options |= {"weight_offset": 1.0} if norm == "Gemma" else {"round_before_weight": True}
    if norm in ("RMSNorm", "AddRMSNorm", "GatedRMSNorm") and not few:
        options["weight_offset"] = fixed.choice([0.0, 1.0])
        options["round_before_weight"] = fixed.random() < 0.3
    if norm == "GatedRMSNorm":
        options["groups"] = rng.choice([1, 2])
        options["gate_activation"] = fixed.choice(["silu", "sigmoid", "gelu", "identity"])
        options["gate_position"] = fixed.choice(["pre", "post"])


def _group_options(
    rng: Random, fixed: Random, norm: str, options: Any, operands: Any, few: bool
) -> None:
    if (axis := rng.choice([None, None, 1, -1])) is not None:
        options["channel_axis"] = axis
    if norm == "group_norm":
        options["num_groups"] = rng.choice([1, 2, 4])
    kind = "w" if axis == -1 else "c"
    for argument, number in (("weight", rng.choice("12")), ("bias", "3")):
        if few or fixed.random() < 0.6:
            operands[argument] = kind + number
    if not few:
        options["activation"] = fixed.choice([None, *GATES])
        if fixed.random() < 0.2:
            options["dtype"] = "float64"


def _row_options(
    rng: Random, fixed: Random, norm: str, options: Any, operands: Any, few: bool
) -> None:
    if rng.random() < 0.2:
        options["axis"] = -2
    elif rng.random() < 0.3:
        # A row of two numbers near each other is noise after centring.
        options["groups"] = 2 if "layer" in norm or "normalize" in norm else rng.choice([2, 4])
    if not few and fixed.random() < 0.15:
        options["dtype"] = fixed.choice(["float64", "float32"])
    if norm == "l2_norm":
        return
    kind = "t" if "axis" in options else "w"
    if few or fixed.random() < 0.7:
        operands["weight"] = kind + rng.choice("12")
        options["weight_offset"] = 0.0 if few else fixed.choice([0.0, 1.0, -0.25])
    if "rms" not in norm and (few or fixed.random() < 0.6):
        operands["bias"] = kind + rng.choice("133")
    if few:
        return
    if fixed.random() < 0.5:
        operands["gate"] = "g"
        options["gate_activation"] = fixed.choice([*GATES])
        options["gate_position"] = fixed.choice(["pre", "post"])
    options["round_before_weight"] = fixed.random() < 0.2
    if norm.endswith("normalize"):
        options["c"] = rng.choice([None, 1.0, 3.0])
        options["center"] = fixed.random() < 0.5
    if norm.startswith("add_") and "residual" not in operands and fixed.random() < 0.5:
        options["residual_dtype"] = fixed.choice(["float32", "float64"])
