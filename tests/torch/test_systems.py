# SPDX-License-Identifier: MIT
"""cunorm.torch under what PyTorch wraps around a model: checkpointing, autocast, export, fakes."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.processes import in_process

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cunorm  # noqa: E402
import cunorm.torch as ct  # noqa: E402
from cunorm.torch import (  # noqa: E402
    _group_norm_function,
    _row_norm,
    _row_norm_operator,
)

# torch's own, when it exports or first makes a fake tensor
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]

WIDTH = 32


class Mixer(torch.nn.Module):
    """Norms of four kinds between linear layers; a stream goes past the first of these."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.before, self.after = ct.RMSNorm(WIDTH, eps=1e-6), ct.LayerNorm(WIDTH)
        self.groups = ct.GroupNorm(4, WIDTH)
        self.added = ct.AddRMSNorm(WIDTH, eps=1e-6)

    def forward(self, x):
        branch = self.first(self.before(x))
        y, stream = self.added(branch, x)
        return self.after(self.second(self.groups(y)) + stream)


def mixer():
    torch.manual_seed(0)
    return Mixer()


def batch(rows=6):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def gradients(model, out):
    """Return the gradients of all parameters, in their order."""
    weights = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
    return torch.autograd.grad((out.float() * weights).sum(), list(model.parameters()))


# --- activation checkpointing ---------------------------------------------------------------------


@pytest.fixture
def forwards(monkeypatch):
    """Collect the names of the functions whose forwards run."""
    seen = []
    for module in (_row_norm, _group_norm_function):

        def counted(asked, *rest, forward=module.forward):
            seen.append(asked.function)
            return forward(asked, *rest)

        monkeypatch.setattr(module, "forward", counted)
    return seen


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_norms_run_twice_and_give_the_same_gradients(use_reentrant, forwards):
    model, x = mixer(), batch().requires_grad_()
    expected = gradients(model, model(x))
    once = sorted(forwards)
    assert once == ["add_rms_norm", "group_norm", "layer_norm", "rms_norm"]
    forwards.clear()
    out = checkpoint(model, x, use_reentrant=use_reentrant)
    assert sorted(forwards) == once
    out.backward(torch.linspace(-1, 2, out.numel()).reshape(out.shape))
    assert sorted(forwards) == sorted(2 * once)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("kept", [True, False])
def test_selective_checkpointing_can_keep_what_the_operators_return(kept, monkeypatch):
    model, x, ran = mixer(), batch().requires_grad_(), []
    expected = gradients(model, model(x))
    forward = _row_norm_operator.forward

    def counted(norm, *rest):
        ran.append(norm.function)
        return forward(norm, *rest)

    monkeypatch.setattr(_row_norm_operator, "forward", counted)
    operators = [torch.ops.cunorm.row_norm_forward.default] if kept else []
    contexts = partial(create_selective_checkpoint_contexts, operators)
    out = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
    once = ["rms_norm", "add_rms_norm", "layer_norm"]
    assert ran == once
    assert all(map(torch.equal, gradients(model, out), expected))
    assert ran == once * (1 if kept else 2)


# --- autocast -------------------------------------------------------------------------------------


def test_autocast_leaves_norms_the_dtype_of_x_and_gradients_that_of_their_operands():
    model, seen = mixer(), {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda module, given, result, name=name: seen.update({name: (given, result)})
        )
    x = batch()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    bfloat16, float32 = torch.bfloat16, torch.float32
    dtypes = {
        name: [one.dtype for part in both for one in (part if isinstance(part, tuple) else [part])]
        for name, both in seen.items()
    }
    assert dtypes["before"] == [float32, float32]  # x is float32
    assert dtypes["first"] == [float32, bfloat16]  # what autocast is for
    assert dtypes["added"] == [bfloat16, float32, bfloat16, float32]  # branch, stream, y, stream
    assert dtypes["groups"] == [bfloat16, bfloat16]
    assert out.dtype == float32  # of the sum with the stream
    assert {one.dtype for one in gradients(model, out)} == {float32}


def test_autocast_differs_from_float32_by_its_roundings_alone():
    model, x = mixer(), batch(50)
    exact = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert not torch.equal(out, exact)
    narrow, wide = ((result.detach(), *gradients(model, result)) for result in (out, exact))
    for one, right in zip(narrow, wide, strict=True):
        # Each way, both linear layers round x, weight and result to bfloat16, and the norms that
        # they feed round y: 16 times by at most 2**-9, independently, so that squares add up.
        assert (one - right).norm() <= 4 * 2.0**-9 * right.norm()


# --- fake tensors and export ----------------------------------------------------------------------

ROWS, IMAGES = (3, 5, WIDTH), (3, WIDTH, 4, 2)
CALLS = {
    "rms_norm": lambda x, w: ct.rms_norm(x, w, round_before_weight=True),
    "layer_norm": lambda x, w: ct.layer_norm(x, w, w, gate=x),
    "l2_norm": lambda x, w: ct.l2_norm(x, groups=2),
    "add_rms_norm": lambda x, w: ct.add_rms_norm(x, x.float(), w),
    "add_normalize": lambda x, w: ct.add_normalize(x, None, w, residual_dtype=torch.float64),
    "group_norm": lambda x, w: ct.group_norm(x.mT, 4, w, w, activation="relu", channel_axis=1),
}


@pytest.mark.parametrize("times", [1, 2])
def test_plain_functions_and_recorded_backwards_are_refused_where_results_would_be_fake(times):
    x, leaf = torch.ones(3, 8), torch.ones(3, 8, requires_grad=True)
    for _ in range(times):  # so that both are remembered, or not
        y = ct.rms_norm(leaf)
        cunorm.rms_norm(x)
        torch.autograd.grad(y, leaf, x, retain_graph=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(TypeError, match=r"^rms_norm: x is used where torch .*\(FakeTensorMode"):
            cunorm.rms_norm(x)
        with pytest.raises(TypeError, match=r"^rms_norm: dy is used where torch makes tensors wit"):
            torch.autograd.grad(y, leaf, x)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("fake", [True, False])
def test_fake_tensors_give_fake_results_of_the_same_form(name, fake):
    """Also of plain tensors, where the mode allows them."""
    x, weight = torch.randn(ROWS).to(torch.bfloat16).requires_grad_(), torch.ones(WIDTH)
    real = CALLS[name](x, weight)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if fake:
        x, weight = mode.from_tensor(x), mode.from_tensor(weight)
    with mode:
        made = CALLS[name](x, weight)
        results = made if isinstance(made, tuple) else (made,)
        (dx,) = torch.autograd.grad(results, (x,), [torch.ones_like(one) for one in results])
    reals = real if isinstance(real, tuple) else (real,)
    for one, expected in zip((*results, dx), (*reals, x), strict=True):
        assert isinstance(one, FakeTensor)
        assert (one.shape, one.dtype) == (expected.shape, expected.dtype)
        assert one.stride() == expected.stride()


def test_an_exported_model_gives_the_same_for_any_number_of_rows():
    model = mixer()
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(model, (batch(),), dynamic_shapes=({0: rows},))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum("cunorm.row_norm_forward" in target for target in targets) == 3
    assert sum("cunorm.group_norm_forward" in target for target in targets) == 1
    for given in (batch(), batch(11)):
        assert torch.equal(exported.module()(given), model(given))


# --- nothing that the caller has not --------------------------------------------------------------


def test_importing_cunorm_torch_imports_no_other_framework():
    others = "jax", "jaxlib", "cupy", "triton"
    printed = in_process(
        "import sys, torch\n"
        f"before = {{name for name in {others} if name in sys.modules}}\n"
        "import cunorm.torch\n"
        f"print([name for name in {others} if name in sys.modules and name not in before])",
        setup="",
    )
    assert printed.strip() == "[]"
