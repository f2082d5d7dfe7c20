# SPDX-License-Identifier: MIT
"""Calls raise the messages of docs/errors.md."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cunorm
from tests.arguments import wrong_input, wrong_memory, wrong_modulation, wrong_split
from tests.support.caches import compiles, fresh_process
from tests.support.kinds import Foreign, ForeignBefore1

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n)*)", re.M)
ROW = re.compile(r"^\| (?!message|---)(.+?) \| ", re.M)
KIND = re.compile(r" \([^()]*(Error|Warning)[^()]*\)$")  # after a message
X, RSTD = np.ones((2, 8), np.float32), np.ones(2, np.float32)
IMAGES = np.ones((2, 3, 4), np.float32)
rms, rms_backward = cunorm.rms_norm, cunorm.rms_norm_backward
Calls = list[Callable[[], Any]]
PLAIN: Calls = [  # tests/arguments has the other wrong calls of plain functions
    lambda: rms(X.astype(np.int64)),
    lambda: rms(X.astype(">f4")),
    lambda: rms(np.ma.masked_array(X, X > 0)),
    lambda: rms(Foreign(np.frombuffer(bytearray(9), "f4", offset=1))),
    lambda: rms(ForeignBefore1(np.broadcast_to(X, X.shape))),
    lambda: rms(X, out=X[::-1]),
    lambda: cunorm.set_num_threads(0),
    lambda: cunorm.layer_norm(X, (8,), X[0], X[0]),
    lambda: cunorm.layer_norm(X, normalized_shape=(8,)),
    lambda: cunorm.add_rms_norm(X),
    lambda: rms(X, residual=X),
    lambda: cunorm.l2_norm(X, dim=-1),
    lambda: cunorm.l2_norm(X, gate=X),
    lambda: cunorm.group_norm(X, 2, weight_offset=1.0),
    lambda: rms(X, X[0], 1e-5),
    lambda: rms_backward(X, X, rstd=RSTD, eps=1e-5),
    lambda: rms_backward(X, X, rstd=RSTD, residual=X),
    lambda: cunorm.layer_norm_backward(X, X, rstd=RSTD),
    lambda: rms(IMAGES, np.ones(3, "f4"), axis=1),
    lambda: rms(IMAGES.reshape(2, 3, 2, 2), np.ones((2, 3), "f4"), axis=(1,)),
    lambda: rms(IMAGES.reshape(2, 3, 2, 2), axis=(1, 3)),
    lambda: rms(np.ones((1, 16385, 2), "f4"), axis=(1,)),
    lambda: rms(IMAGES, axis=(1,), out=IMAGES.swapaxes(1, 2).copy().swapaxes(1, 2)),
    lambda: cunorm.rms_norm_quantized(IMAGES, axis=(1,)),
]
quantized = cunorm.rms_norm_quantized
BLOCKS = {"block": 32}
QUANTIZED: Calls = [
    lambda: quantized(X, dtype="float16"),
    lambda: quantized(X, scale_dtype="bfloat16"),
    lambda: quantized(X, scale=-1.0),
    lambda: quantized(X, absmax_bound=0),
    lambda: quantized(X, scale=np.ones(1)),
    lambda: quantized(np.ones((5, 8), np.float32), scale=np.ones(5, np.float32)),
    lambda: quantized(X, scale=1.0, scale_dtype="float8_e8m0fnu"),
    lambda: quantized(X, scale=1.0, **BLOCKS),
    lambda: quantized(X, scale=1.0, absmax_bound=3.0),
    lambda: quantized(X, dtype="int8", scale_dtype="float8_e8m0fnu"),
    lambda: quantized(X, dtype="int8", scale=1e38),
    lambda: quantized(X, block=16),
    lambda: quantized(X, groups=4, **BLOCKS),
    lambda: quantized(X, axis=0, **BLOCKS),
    lambda: quantized(X.astype(np.float64), **BLOCKS),
    lambda: quantized(X, out=cunorm.QuantizedNorm(q=np.empty((2, 8), np.int8))),
    lambda: quantized(X, scale=1.0, out=cunorm.QuantizedNorm(scale=np.ones((2, 1), np.float32))),
    lambda: rms(X.astype(ml_dtypes.float8_e4m3fn)),
]
SPLIT: Calls = [
    partial(getattr(cunorm, name), **(options | given))
    for name, options, errors in wrong_split.ERRORS
    for given, *_ in errors
]
FOR_COMPILERS = {  # $CXX, and the start of the message
    "": "cunorm found no C++ compiler",
    "/nowhere/g++": "CXX=",
    "'g++": "CXX is",
}
ELSEWHERE = (  # other tests raise these messages, which need more than a plain call
    "weight is on cpu",
    "a bfloat16 NumPy array needs",
    "a result of dtype float8_e4m3fn: a float8_e4m3fn NumPy array needs",
    "InternalTorchDynamoError",
    "process_group ",
    "x has 8 rows, and 7 on rank 1",
    "groups is 2, expected 1 with process_group",
    "a second derivative is asked for, or: derivatives are batched",
    "weight is of type Tensor, expected a DTensor",
    "x has placements",
    "groups is 2 and x has placements",
    "x has shape … and placements",
    "a module with process_group",
    "axis_name is 'tp', but x",
    "x is spread over 4 devices",
    "this JAX's foreign function interface",
    "a compiled call of text version",
)


def torch_calls() -> Calls:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch._subclasses.fake_tensor import FakeTensorMode

    import cunorm.torch

    x = torch.ones(2, 8)

    def with_tangent() -> None:
        with torch.autograd.forward_ad.dual_level():
            rms(torch.autograd.forward_ad.make_dual(x, x))

    def fake() -> None:
        with FakeTensorMode():
            rms(x)

    def changed() -> None:
        norm = torch.nn.LayerNorm(4)
        cunorm.torch.replace_norms(norm)
        torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Identity())
        cunorm.torch.restore_norms(norm)

    return [
        lambda: rms(torch.ones(2, 8, requires_grad=True)),
        lambda: cunorm.torch.rms_norm_quantized(torch.ones(2, 8, requires_grad=True)),
        with_tangent,
        lambda: rms(x.as_subclass(type("Other", (torch.Tensor,), {}))),
        lambda: rms(x.to(torch.complex64).conj().imag),
        lambda: rms(x.to_sparse()),
        lambda: rms(x.to("meta")),
        lambda: torch.vmap(rms)(x),
        fake,
        lambda: cunorm.torch.rms_norm([1.0]),
        lambda: cunorm.torch.RMSNorm(4)(x),
        lambda: cunorm.torch.GroupNorm(2, 8, "silu"),
        changed,
    ]


def jax_calls() -> Calls:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cunorm.jax

    def deleted() -> Any:
        array = jax.numpy.ones(8)
        array.delete()
        return array

    def exported() -> None:
        (size,) = jax.export.symbolic_shape("b")
        jax.export.export(jax.jit(cunorm.jax.rms_norm))(jax.ShapeDtypeStruct((size, 4), "float32"))

    x = jax.numpy.ones(8)
    return [
        lambda: jax.jit(rms)(x),
        lambda: jax.jit(cunorm.jax.rms_norm)(x, eps=1e-5),
        lambda: rms(x, dtype="float64"),
        lambda: jax.grad(lambda x: cunorm.jax.rms_norm_quantized(x, scale=x[0]).y.sum())(x),
        lambda: rms(deleted()),
        lambda: cunorm.jax.rms_norm(x, axis_name="tp"),
        lambda: cunorm.jax.rms_norm(x, groups=2, axis_name="tp"),
        lambda: cunorm.jax.rms_norm(x, where=np.ones(7, bool)),
        lambda: cunorm.jax.rms_norm(x, where=np.ones(8, np.float32)),
        lambda: cunorm.jax.rms_norm(x, groups=2, where=True),
        exported,
    ]


def messages_of(calls: Calls) -> list[str]:
    found = []
    for call in calls:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            call()
        found.append(str(caught.value).replace("\n", " "))
    return found


def plain_messages() -> list[str]:
    tables = wrong_input.TABLE | wrong_memory.TABLE
    tables |= wrong_modulation.TABLE | wrong_modulation.BACKWARD
    return messages_of(PLAIN) + [case.text for cases in tables.values() for case in cases]


PLAIN_SECTIONS = ("Arrays", "Scalars", "The backward", "out and workspace")
SECTIONS = dict.fromkeys(PLAIN_SECTIONS, plain_messages) | {
    "Quantised results": lambda: messages_of(QUANTIZED),
    "Split rows": lambda: messages_of(SPLIT),
    "PyTorch": lambda: messages_of(torch_calls()),
    "JAX": lambda: messages_of(jax_calls()),
}


def rows(title: str) -> list[str]:
    """Return the messages in a section's table; a cell may have several, between semicolons."""
    (text,) = (text for other, text in SECTION.findall(PAGE) if other == title)
    cells = (KIND.sub("", cell.replace("`", "")) for cell in ROW.findall(text))
    return [message for cell in cells for message in cell.split("; ")]


def is_in(row: str, messages: list[str]) -> bool:
    """Return whether a message begins with what a row of the page has; … is any text."""
    pattern = re.compile(r"([\w.]+: )?" + ".*".join(map(re.escape, row.split("…"))))
    return any(map(pattern.match, messages))


# PyTorch warns about its prototypes, and about its own imports for jvp.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.torch.jit.script")
@pytest.mark.parametrize("title", SECTIONS)
def test_messages_of_the_page_are_raised_here_or_elsewhere(title):
    found, raised = rows(title), SECTIONS[title]()
    assert len(found) >= 8
    for row in found:
        assert is_in(row, raised) or row.startswith(ELSEWHERE), row


@compiles
@pytest.mark.parametrize("cxx", FOR_COMPILERS)
def test_messages_about_the_choice_of_a_compiler_are_those_of_the_page(cxx):
    path = os.environ["PATH"] if cxx else os.devnull
    raises = pytest.raises((RuntimeWarning, ValueError))
    with fresh_process(CXX=cxx, PATH=path), raises as caught:
        rms(X)
    listed = [row for row in rows("Compilers and caches") if row.startswith(FOR_COMPILERS[cxx])]
    assert any(is_in(row, [str(caught.value)]) for row in listed)
