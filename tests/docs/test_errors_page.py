# SPDX-License-Identifier: MIT
"""Calls raise the messages of docs/errors.md."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import NormGrads
from tests.support.caches import compiles, fresh_process
from tests.support.kinds import Foreign

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
ROW = re.compile(r"^\| (?!message|---)(.+?) \| ", re.M)
KIND = re.compile(r" \([^()]*(Error|Warning)[^()]*\)$")  # after a message

X, Y, IMAGES = (np.ones(shape, np.float32) for shape in ((2, 8), (3, 8), (2, 8, 64)))
BYTES = np.zeros(4096, np.uint8)
ALIGNED = BYTES[-BYTES.ctypes.data % 16 :]
RSTD = np.ones(2, np.float32)

Calls = dict[str, Callable[[], Any]]  # each key is the start of the call's message on the page


def rms(x: Any = X, *arrays: Any, **options: Any) -> Any:
    return cunorm.rms_norm(x, *arrays, **options)


def group(x: Any = X, groups: int = 2, *arrays: Any, **options: Any) -> Any:
    return cunorm.group_norm(x, groups, *arrays, **options)


def backward(*, rstd: Any = RSTD, **options: Any) -> Any:
    return cunorm.rms_norm_backward(X, X, X[0], rstd=rstd, **options)


class Lost(Foreign):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("it is lost")


PLAIN: Calls = {  # arrays, scalars, arguments, backwards and memory
    "x is of type list": lambda: rms([1.0]),
    "weight is of type tuple": lambda: cunorm.layer_norm(X, (8,)),
    "x has dtype int64": lambda: rms(X.astype(np.int64)),
    "x has dtype >f4": lambda: rms(X.astype(">f4")),
    "dtype is 'fp8'": lambda: rms(dtype="fp8"),
    "dtype is <class 'float'>": lambda: rms(dtype=float),
    "weight has shape (7,)": lambda: rms(X, X[0, :7]),
    "weight has shape (64,)": lambda: group(IMAGES.swapaxes(1, 2), 2, IMAGES[0, 0]),
    "gate has shape (1, 8)": lambda: rms(gate=X[:1]),
    "residual has shape (8,)": lambda: cunorm.add_rms_norm(X, X[0]),
    "x has shape (), ": lambda: rms(np.ones((), np.float32)),
    "x of shape (2, 0)": lambda: rms(X[:, :0]),
    "residual has dtype": lambda: cunorm.add_rms_norm(X, X, residual_dtype="bfloat16"),
    "x is a masked array": lambda: rms(np.ma.masked_array(X, X > 0)),
    "x does not give its memory": lambda: rms(Lost(X)),
    "axis is 2": lambda: rms(axis=2),
    "groups is 3": lambda: rms(groups=3),
    "groups is 2 and axis is 0": lambda: rms(groups=2, axis=0),
    "eps is -1": lambda: rms(eps=-1),
    "weight_offset is 1.0": lambda: rms(weight_offset=1.0),
    "gate_activation is": lambda: rms(gate=X, gate_activation="swiglu"),
    "gate_position is": lambda: rms(gate_position="pre"),
    "gate_activation is 'relu'": lambda: rms(gate_activation="relu"),
    "round_before_weight is 1": lambda: rms(round_before_weight=1),
    "num_groups is 3": lambda: group(IMAGES.swapaxes(1, 2), 3),
    "channel_axis is 0": lambda: group(channel_axis=0),
    "n is 0": lambda: cunorm.set_num_threads(0),
    "layer_norm() takes": lambda: cunorm.layer_norm(X, (8,), X[0], X[0]),
    "layer_norm() got": lambda: cunorm.layer_norm(X, normalized_shape=(8,)),
    "add_rms_norm() missing": lambda: cunorm.add_rms_norm(X),
    "rms_norm() got an unexpected keyword argument 'residual'": lambda: rms(residual=X),
    "rms_norm() got an unexpected keyword argument 'bias'": lambda: rms(bias=X[0]),
    "l2_norm() got an unexpected keyword argument 'dim'": lambda: cunorm.l2_norm(X, dim=-1),
    "l2_norm() got an unexpected keyword argument 'gate'": lambda: cunorm.l2_norm(X, gate=X),
    "rms_norm() takes": lambda: cunorm.rms_norm(X, X[0], 1e-5),
    "rms_norm_backward() got an unexpected keyword argument 'eps'": lambda: backward(eps=1e-5),
    "rms_norm_backward() got an unexpected keyword argument 'residual'": lambda: backward(
        residual=X
    ),
    "layer_norm_backward() missing": lambda: cunorm.layer_norm_backward(X, X, rstd=RSTD),
    "rstd is None": lambda: backward(rstd=None),
    "mean is None": lambda: cunorm.normalize_backward(X, X, X[0], rstd=RSTD, center=True),
    "mean is given": lambda: cunorm.normalize_backward(X, X, X[0], rstd=RSTD, mean=RSTD),
    "rstd has dtype float16": lambda: backward(rstd=RSTD.astype(np.float16)),
    "rstd has shape (1,)": lambda: backward(rstd=RSTD[:1]),
    "needs is ('z',)": lambda: backward(needs=("z",)),
    "out.dweight is given": lambda: backward(
        needs=("x",), out=NormGrads(None, X[0].copy(), None, None, None)
    ),
    "out.dweight is None": lambda: backward(accumulate=True),
    "out has shape (3, 8)": lambda: rms(out=Y),
    "out has dtype float16": lambda: rms(dtype="float32", out=X.astype(np.float16)),
    "out is of type ndarray": lambda: cunorm.rms_norm_forward(X, out=X),
    "out overlaps x": lambda: rms(Y[:2], out=Y[1:]),
    "out has strides (0, 1)": lambda: rms(out=np.broadcast_to(X[0], (2, 8)), dtype="float32"),
    "out has strides (1, 2)": lambda: rms(out=np.ones((8, 2), np.float32).T),
    "out has strides …": lambda: group(IMAGES, out=np.ones((2, 64, 8), "f4").swapaxes(1, 2)),
    "out cannot be written": lambda: rms(out=np.frombuffer(X.tobytes(), "f4").reshape(2, 8)),
    "workspace has 8 bytes": lambda: backward(workspace=ALIGNED[:8]),
    "workspace cannot be used": lambda: backward(workspace=ALIGNED[1:]),
}


FOR_COMPILERS = {  # $CXX, and the start of the message
    "": "cunorm found no C++ compiler",
    "/nowhere/g++": "CXX=",
    "'g++": "CXX is",
}
ELSEWHERE = (  # other tests raise these messages, which need more than a plain call
    "weight is on cpu",
    "a bfloat16 NumPy array needs",
    "InternalTorchDynamoError",
    "x is spread over 4 devices",
    "this JAX's foreign function interface",
    "a compiled call of text version",
)


def torch_calls() -> Calls:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch._subclasses.fake_tensor import FakeTensorMode

    import cunorm.torch

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

    def derived(x: Any) -> Any:
        return cunorm.torch.rms_norm(x).square().sum()

    x, grad = torch.ones(2, 8), torch.func.grad
    return {
        "x requires grad": lambda: rms(torch.ones(2, 8, requires_grad=True)),
        "x has a forward-mode tangent": with_tangent,
        "x is of type …": lambda: rms(x.as_subclass(type("Other", (torch.Tensor,), {}))),
        "x has its negative bit": lambda: rms(x.to(torch.complex64).conj().imag),
        "x has layout": lambda: rms(x.to_sparse()),
        "x is on device meta": lambda: rms(x.to("meta")),
        "x has elements at": lambda: rms(torch.frombuffer(bytearray(9), dtype=x.dtype, offset=1)),
        "x is a tensor inside": lambda: torch.vmap(rms)(x),
        "x is used where torch": fake,
        "x is of type list, expected a torch": lambda: cunorm.torch.rms_norm([1.0]),
        "RMSNorm: x has shape": lambda: cunorm.torch.RMSNorm(4)(x),
        "GroupNorm: eps is 'silu'": lambda: cunorm.torch.GroupNorm(2, 8, "silu"),
        "cunorm.torch has no second": lambda: grad(lambda x: grad(derived)(x).sum())(x),
        "restore_norms: ": changed,
    }


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
    return {
        "x is a JAX tracer": lambda: jax.jit(rms)(x),
        "eps is traced by JAX": lambda: jax.jit(cunorm.jax.rms_norm)(x, eps=1e-5),
        "a result of dtype float64": lambda: rms(x, dtype="float64"),
        "a second or a forward-mode": lambda: jax.hessian(lambda x: cunorm.jax.rms_norm(x)[0])(x),
        "x is a deleted": lambda: rms(deleted()),
        "x has shape (b, 4)": exported,
    }


LIBRARIES = {"NumPy": lambda: PLAIN, "PyTorch": torch_calls, "JAX": jax_calls}


def rows(page: str) -> list[str]:
    """Return the messages in the page's tables, without their explanations."""
    return [KIND.sub("", cell.replace("`", "")) for cell in ROW.findall(page)]


def check(start: str, raised: str) -> None:
    """Compare `raised` with the page's messages that begin with `start`; … is any text."""
    whole = rows(PAGE.read_text(encoding="utf-8"))
    messages = [part for row in whole for part in (row, *row.split("; ")) if part.startswith(start)]
    assert messages, f"docs/errors.md has no {start!r}; a call raised {raised!r}"
    patterns = (".*".join(map(re.escape, message.split("…"))) for message in messages)
    line = raised.replace("\n", " ")
    assert any(re.match(rf"([\w.]+: )?{pattern}", line) for pattern in patterns), raised


# PyTorch warns about its prototypes, and about its own imports for jvp.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.torch.jit.script")
@pytest.mark.parametrize("library", LIBRARIES)
def test_messages_are_those_of_the_page(library):
    for start, call in LIBRARIES[library]().items():
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            call()
        check(start, str(caught.value))


@compiles
@pytest.mark.parametrize("cxx", FOR_COMPILERS)
def test_messages_about_the_choice_of_a_compiler_are_those_of_the_page(cxx):
    path = os.environ["PATH"] if cxx else os.devnull
    raises = pytest.raises((RuntimeWarning, ValueError))
    with fresh_process(CXX=cxx, PATH=path), raises as caught:
        rms()
    check(FOR_COMPILERS[cxx], str(caught.value))


def test_every_message_of_arrays_and_front_ends_is_raised_here_or_elsewhere():
    page, _, _ = PAGE.read_text(encoding="utf-8").partition("## Compilers")
    starts = (*(start for calls in LIBRARIES.values() for start in calls()), *ELSEWHERE)
    found = rows(page)
    assert len(found) > 60
    assert [row for row in found if not row.startswith(starts)] == []
