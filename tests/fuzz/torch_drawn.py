# SPDX-License-Identifier: MIT
"""Draw programs of PyTorch: each way, wrap and kind of dy in turn, the rest at random."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz.torch_modules import FORMULA_OF
from tests.fuzz.torch_programs import FORMS, GATES, JOINS, MODULATED, Program, Step
from tests.fuzz.torch_ways import WAYS
from tests.fuzz.torch_wraps import DYS, SAVING, WRAPS, keeps_leaf_hooks

# The norms of the short test, for which few kernels are compiled.
FEW = ("rms_norm", "layer_norm", "add_rms_norm", "group_norm", "instance_norm", "l2_norm")
FEW += ("RMSNorm", "AddRMSNorm", "LayerNorm", "nn.LayerNorm", "nn.GroupNorm", "Llama")
_MORE = ("normalize", "add_layer_norm", "add_normalize", "GatedRMSNorm", "GroupNorm", "nn.RMSNorm")
_MORE += ("Gemma", "Biased", "Gated")
NORMS = FEW + _MORE
_VARIANTS = 3  # of each norm in float32; in other dtypes there is one
_BOTH = ("LayerNorm", "GroupNorm", "nn.LayerNorm", "nn.GroupNorm", "Biased")  # weight and bias
_HALF = ("float16", "bfloat16")
_WRAPPED = ("backward", "autograd_grad", "parts", "repeated", "toggled", "hooked", "changed")
_WRAPPED += ("second", "subclassed")
# In these ways PyTorch has no rule for negated views.
_BATCHED = (
    "is_grads_batched",
    "func_jacrev",
    "batched",
    "batched_grad",
    "empty_batch",
    "batched_hessian",
)


def draw(seed: int, *, few: bool, norm: str | None = None) -> Program:
    """Draw the program of a seed; the seed determines the way, `few` and `norm` limit the norms."""
    rng = Random(f"program {seed}")
    way, names, turn = [*WAYS][seed % len(WAYS)], FEW if few else NORMS, seed // len(WAYS)
    dtype = "float32"
    if not few:
        dtype = rng.choice(["float32"] * 14 + ["float64"] * 2 + ["bfloat16"] * 3 + ["float16"])
    steps: list[Step] = []
    count = rng.randint(1, 2 if dtype in _HALF else 3 if few else 4)
    for _ in range(1 if norm else count):
        has_stream = any(step.function.startswith("add_") for step in steps)
        steps.append(_step(rng, norm or rng.choice(names), dtype, few, has_stream))
    if rng.random() < 0.6:  # then the last norm gets the program's dy
        steps[-1] = steps[-1]._replace(join="none")
    for step in steps if way == "copied" else ():
        step.options.pop("dtype", None)  # restored norms of PyTorch need an x with weight's dtype
    program = Program(seed, tuple(steps), way, dtype=dtype)
    # Compiled backwards refuse subclasses that they were not traced with.
    dys = [one for one in DYS if way != "compiled" or one not in ("trivial", "wrapped", "async")]
    program = program._replace(
        wraps=_wraps(rng, way, turn, few),
        forms={} if norm else _forms(rng, program),
        dy=dys[(seed + turn) % len(dys)],
        uses_stream=rng.random() < 0.7,
        parameters=dtype if few else rng.choice([dtype, "float32"][: 1 + (dtype in _HALF)]),
    )
    return program._replace(frozen=_frozen(rng, program, few))


def _frozen(rng: Random, program: Program, few: bool) -> tuple[str, ...]:
    if "reentrant" in program.wraps:  # this wrap needs an input with gradients
        return ()
    if not few and rng.random() < 0.1:
        return tuple(name for name in program.leaves() if rng.random() < 0.4)
    given = rng.choice(["", "wctsmdnl", "xrg"])  # none, parameters, inputs
    return tuple(name for name in program.leaves() if name[0] in given)


def _wraps(rng: Random, way: str, turn: int, few: bool) -> tuple[str, ...]:
    """Return wraps for a way: none or one, by rotation, and perhaps a random second."""
    if way not in _WRAPPED:
        return ()
    without = ["reentrant"] * (way != "backward") + ["autocast"] * few
    if way == "changed":  # with these wraps PyTorch does not see that saved tensors change
        without += ["checkpoint", "reentrant", "subclass"]
    if way == "hooked" and not keeps_leaf_hooks():
        without += SAVING
    some = [one for one in WRAPS if one not in without]
    index = (turn + _WRAPPED.index(way)) % (len(some) + 1)
    if index == 0:
        return ()
    first, second = some[index - 1], rng.choice(some)
    return (first, second) if first != second and rng.random() < 0.4 else (first,)


def _forms(rng: Random, program: Program) -> dict[str, str]:
    of_modules = {n for s in program.steps if s.made != "function" for n in s.operands.values()}
    found = {}
    for name in program.leaves():
        if rng.random() < 0.5 or name == "l" or (name in of_modules and name not in "xrg"):
            continue
        some = FORMS[:5] + ("x",) * 2 * (name in "rg")
        if program.dtype not in _HALF and program.way not in _BATCHED:
            some += ("negated",)
        found[name] = rng.choice(some)
    return found


def _step(rng: Random, norm: str, dtype: str, few: bool, has_stream: bool) -> Step:
    """Draw a step: options that need another build have few variants, all else is random."""
    variant = 0 if few else rng.randrange(_VARIANTS if dtype == "float32" else 1) + 1
    fixed = Random(f"{norm} {variant}")
    function = FORMULA_OF.get(norm, norm)
    options: dict[str, Any] = {"eps": rng.choice([1e-5, 1e-3, 0.1])}
    operands: dict[str, str] = {}
    if function.startswith("add_"):
        residual = rng.choice(["stream", "stream", "r"] if has_stream else ["r", "r", None])
        operands |= {"residual": residual} if residual else {}
    is_group = function in ("group_norm", "instance_norm")
    made = norm if norm in FORMULA_OF else "function"
    of_kind = _of_function if made == "function" else _of_module
    of_kind = _of_group if is_group and made == "function" else of_kind
    of_kind(rng, fixed, norm, options, operands, few)
    if made == "function" and dtype in _HALF and options.get("activation") == "relu":
        options["activation"] = "tanh"  # a rounding may cross the corner of relu
    return Step(function, made, operands, options, rng.choice(JOINS))


def _kind(rng: Random, kinds: str) -> str:
    """Draw the kind of a parameter: half of the time, all rows share it."""
    return rng.choice([kinds[0], rng.choice(kinds)])


def _of_module(
    rng: Random, fixed: Random, norm: str, options: Any, operands: Any, few: Any
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


def _of_group(rng: Random, fixed: Random, norm: str, options: Any, operands: Any, few: Any) -> None:
    if (axis := rng.choice([None, None, 1, -1])) is not None:
        options["channel_axis"] = axis
    if norm == "group_norm":
        options["num_groups"] = rng.choice([1, 2, 4])
    for argument, number in (("weight", rng.choice("12")), ("bias", "3")):
        if few or fixed.random() < 0.6:
            operands[argument] = ("w" if axis == -1 else _kind(rng, MODULATED["c"])) + number
    if not few:
        options["activation"] = fixed.choice([None, *GATES])
        options |= {"dtype": "float64"} if fixed.random() < 0.2 else {}


def _of_function(
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
    kinds = MODULATED["t" if "axis" in options else "w"]
    if few or fixed.random() < 0.7:
        operands["weight"] = _kind(rng, kinds) + rng.choice("12")
        options["weight_offset"] = 0.0 if few else fixed.choice([0.0, 1.0, -0.25])
    if (few and "rms" not in norm) or fixed.random() < 0.6:
        operands["bias"] = _kind(rng, kinds) + rng.choice("133")
    if norm.startswith("add_") and (rng if few else fixed).random() < 0.5:
        operands["gate"] = rng.choice(["g", rng.choice(kinds) + "1", "d1"])
        options["gate_activation"] = fixed.choice([*GATES])
        options["gate_position"] = "branch"
    if few:
        return
    if "gate" not in operands and fixed.random() < 0.5:
        operands["gate"] = "g"
        options["gate_activation"] = fixed.choice([*GATES])
        options["gate_position"] = fixed.choice(["pre", "post"])
    options["round_before_weight"] = fixed.random() < 0.2
    if norm.endswith("normalize"):
        options["c"] = rng.choice([None, 1.0, 3.0])
        options["center"] = fixed.random() < 0.5
    if norm.startswith("add_") and "residual" not in operands and fixed.random() < 0.5:
        options["residual_dtype"] = fixed.choice(["float32", "float64"])
