# SPDX-License-Identifier: MIT
"""Where there is no C++ compiler, the reference answers, after one warning."""

import os

import pytest

from tests.support.processes import in_process

WITHOUT_COMPILER = {"CXX": "", "PATH": os.devnull}
SETUP = """
import sys, warnings
from itertools import combinations, product
sys.path.insert(0, ".")
import numpy as np
import cunorm
from tests.support.bounds import check_backward, check_forward
from cunorm import AddNorm, NormForward, NormGrads
from tests.support.operands import DTYPES, NORMS, draw, parameters, saved, weight_and_bias

assert cunorm._cpu.compiler() is None
"""


def test_there_is_one_warning_and_it_points_to_the_caller():
    in_process(
        """
x = np.ones((3, 8), np.float32)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    rstd = cunorm.rms_norm_forward(x).rstd
    cunorm.rms_norm_backward(x, x, rstd=rstd)
    cunorm.layer_norm(x)
(warning,) = seen
assert warning.category is RuntimeWarning
text = str(warning.message)
assert "no C++ compiler" in text and "install g++ or clang++" in text and "CXX" in text, text
assert warning.filename == "<string>", warning.filename
""",
        setup=SETUP,
        **WITHOUT_COMPILER,
    )


@pytest.mark.parametrize("first", ["rms_norm_backward", "add_rms_norm", "l2_norm"])
def test_the_warning_points_to_the_caller_of_any_function(first):
    in_process(
        f"""
x = np.ones((3, 8), np.float32)
arguments = {{"rms_norm_backward": (x, x), "add_rms_norm": (x, x), "l2_norm": (x,)}}[{first!r}]
more = {{"rstd": np.ones(3, np.float32)}} if {first!r} == "rms_norm_backward" else {{}}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    getattr(cunorm, {first!r})(*arguments, **more)
assert [warning.filename for warning in seen] == ["<string>"], seen[0].filename
""",
        setup=SETUP,
        **WITHOUT_COMPILER,
    )


def test_every_operator_is_within_its_bounds():
    in_process(
        """
warnings.simplefilter("ignore")
for name, norm in NORMS.items():
    for dtype in DTYPES:
        for width in (1, 33, 1000):
            x, residual, dy, d_residual = (
                draw(o, (7, width), dtype) for o in ("x", "residual", "dy", "d_residual")
            )
            given = parameters(norm, width, dtype)
            pair, meaning = weight_and_bias(given), norm.meaning(width)
            y = getattr(cunorm, name)(x, **given, **norm.asked())
            check_forward(NormForward(y), x, *pair, **meaning)
            forward = getattr(cunorm, f"{name}_forward")(x, **given, **norm.asked())
            check_forward(forward, x, *pair, **meaning)
            assert forward.rstd.dtype == (np.float64 if dtype == "float64" else np.float32)
            more = {}
            if norm.has_residual:
                added = getattr(cunorm, f"add_{name}")(x, residual, **given, **norm.asked())
                check_forward(NormForward(*added), x, *pair, residual, **meaning)
                more["d_residual"] = d_residual
            told = norm.asked()
            backward = getattr(cunorm, f"{name}_backward")
            grads = backward(dy, x, **given, **told, **saved(norm, forward), **more)
            check_backward(grads, dy, x, *pair, *more.values(), **meaning)
""",
        setup=SETUP,
        **WITHOUT_COMPILER,
    )


def test_gates_groups_offsets_and_roundings_are_those_of_the_kernels():
    in_process(
        """
warnings.simplefilter("ignore")
ALL = ("x", "weight", "bias", "gate")
for position, dtype, groups, rounds in product(
    (None, "pre", "post"), ("bfloat16", "float32"), (1, 3), (False, True)
):
    operands = {o: draw(o, (7, 33), dtype) for o in ("x", "dy", "gate")}
    weight, bias = (draw(o, 33, "float16") for o in ("weight", "bias"))
    streams = [draw(o, (7, 33), "float32") for o in ("residual", "d_residual")]
    norm = {"groups": groups, "weight_offset": 1.0, "round_before_weight": rounds, "center": True}
    if position:
        gate = operands["gate"]
        norm |= {"gate": gate, "gate_activation": "gelu", "gate_position": position}
    x, dy = operands["x"], operands["dy"]
    given = (x, weight, bias, streams[0])
    f = cunorm.normalize_forward(*given[:3], residual=streams[0], c=3.0, **norm)
    check_forward(f, *given, eps=1e-6, c=3.0, **norm)
    assert f.rstd.shape == ((7,) if groups == 1 else (7, groups))
    given = (dy, f.residual, weight, bias)
    saved = {"rstd": f.rstd, "mean": f.mean, "d_residual": streams[1], "x_dtype": x.dtype}
    whole = cunorm.normalize_backward(*given, **saved, c=3.0, **norm)
    assert whole.dx.dtype == x.dtype and whole.dresidual.dtype == np.float32
    told = {"eps": 1e-6, "c": 3.0, "x_dtype": x.dtype, **norm}
    check_backward(whole, *given, streams[1], **told)
    assert (whole.dgate is None) == (position is None)
    assert position is None or whole.dgate.dtype == gate.dtype

    for size in range(1, 5):
        for needs in combinations(ALL, size):
            part = cunorm.normalize_backward(*given, **saved, c=3.0, needs=needs, **norm)
            for field, gradient in whole._asdict().items():
                wanted = {"dresidual": "x"}.get(field, field[1:]) in needs
                np.testing.assert_array_equal(
                    getattr(part, field), gradient if wanted else None, f"{field} of {needs}"
                )

    before = {f"d{o}": draw(o, 33, "float32") for o in ("weight", "bias")}
    out = NormGrads(**{o: array.copy() for o, array in before.items()})
    cunorm.normalize_backward(*given, **saved, c=3.0, out=out, accumulate=True, **norm)
    exact = NormGrads(dweight=np.empty(33), dbias=np.empty(33))
    cunorm.normalize_backward(*given, **saved, c=3.0, out=exact, **norm)
    for o, array in before.items():
        added = (array.astype(np.float64) + getattr(exact, o)).astype(np.float32)
        np.testing.assert_array_equal(getattr(out, o), added)
""",
        setup=SETUP,
        **WITHOUT_COMPILER,
    )


def test_dtypes_streams_places_and_zero_rows_are_those_of_the_kernels():
    in_process(
        """
warnings.simplefilter("ignore")
x, stream = draw("x", (6, 40), "bfloat16"), draw("residual", (6, 40), "float32")
weight = draw("weight", 40, "float16")
forward = cunorm.rms_norm_forward(x, weight, residual=stream, dtype="float16")
check_forward(forward, x, weight, None, stream, eps=1e-6)
assert forward.y.dtype == np.float16 and forward.residual.dtype == np.float32
grads = cunorm.rms_norm_backward(
    x, forward.residual, weight, rstd=forward.rstd, x_dtype="bfloat16"
)
check_backward(grads, x, forward.residual, weight, None, eps=1e-6)
assert grads.dx.dtype == x.dtype and grads.dresidual.dtype == np.float32
assert grads.dweight.dtype == np.float16

cast = cunorm.layer_norm_forward(x, residual_dtype="float32")
check_forward(cast, x, None, None, residual_dtype=np.float32, center=True, eps=1e-5)

place = stream.copy()
assert cunorm.rms_norm(place, out=place) is place
np.testing.assert_array_equal(place, cunorm.rms_norm(stream))
strided = np.zeros((6, 80), np.float32)
np.testing.assert_array_equal(cunorm.rms_norm(stream[::-1], out=strided[:, 5:45]), place[::-1])
assert not strided[:, 45:].any()

none = cunorm.layer_norm_backward(
    x[:0], x[:0], weight, weight, rstd=forward.rstd[:0], mean=forward.rstd[:0]
)
assert none.dx.shape == (0, 40) and not none.dweight.any() and not none.dbias.any()
""",
        setup=SETUP,
        **WITHOUT_COMPILER,
    )


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_of_other_frameworks_are_served_too(framework):
    pytest.importorskip(framework)
    make = {"torch": "torch.asarray(x)", "jax": "jax.numpy.asarray(x)"}[framework]
    bfloat16 = {"torch": "torch.bfloat16", "jax": "jax.numpy.bfloat16"}[framework]
    in_process(
        f"""
import {framework}
warnings.simplefilter("ignore")
x = draw("x", (6, 40), "float32")
given = {make}
y = cunorm.rms_norm(given)
assert type(y) is type(given)
check_forward(NormForward(np.asarray(y)), x, None, None, eps=1e-6)
narrow = cunorm.rms_norm(given, dtype={bfloat16})
assert narrow.dtype == {bfloat16}
""",
        setup=SETUP,
        **WITHOUT_COMPILER,
    )
