# SPDX-License-Identifier: MIT
"""cunorm.torch under what PyTorch wraps around a model: checkpointing, autocast, export, fakes."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cunorm  # noqa: E402
import cunorm.torch as ct  # noqa: E402

# torch's own, when it exports or first makes a fake tensor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

WIDTH = 32


class Mixer(torch.nn.Module):
    """Norms of four kinds between linear layers; a stream goes past the first of these."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.before, self.after = ct.RMSNorm(WIDTH, eps=1e-6), ct.LayerNorm(WIDTH)
        self.groups = ct.GroupNorm(4, WIDTH)
        self.added = ct.AddRMSNorm(WIDTH, eps=1e-6)

    def forward(self, x):
        branch = self.first(self.before(x))
        y, stream = self.added(branch, x)
        return self.after(self.second(self.groups(y)) + stream)


def batch(rows=6):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def gradients(model, out):
    """Return the gradients of all parameters, in their order."""
    weights = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
    model.zero_grad()
    (out.float() * weights).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "selective"])
def test_checkpointed_norms_give_the_same_gradients(how):
    model, x, seen = Mixer(), batch().requires_grad_(), []

    def policy(context, operator, *given, **more):
        seen.append(operator)
        is_kept = operator is torch.ops.cunorm.row_norm_forward.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    told = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        told["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    expected = gradients(model, model(x))
    out = checkpoint(model, x, **told)
    ours = [str(operator) for operator in seen if "cunorm" in str(operator)]
    once = ["row", "row", "group", "row"] if how == "selective" else []
    assert ours == [f"cunorm.{family}_norm_forward.default" for family in once]
    assert all(map(torch.equal, gradients(model, out), expected))


def test_autocast_leaves_norms_the_dtype_of_x_and_gradients_that_of_their_operands():
    model, dtypes = Mixer(), {}

    def see(module, given, result):
        results = result if isinstance(result, tuple) else (result,)
        dtypes[module] = [str(one.dtype)[6:] for one in (*given, *results)]

    for module in model.modules():
        module.register_forward_hook(see)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch())
    assert dtypes[model.before] == ["float32"] * 2  # x is float32
    assert dtypes[model.first] == ["float32", "bfloat16"]  # what autocast is for
    assert dtypes[model.added] == ["bfloat16", "float32"] * 2  # branch, stream, y, stream
    assert dtypes[model.groups] == ["bfloat16"] * 2
    assert out.dtype == torch.float32  # of the sum with the stream
    assert {one.dtype for one in gradients(model, out)} == {torch.float32}


def test_plain_functions_and_recorded_backwards_are_refused_where_results_would_be_fake():
    x, leaf = torch.ones(3, 8), torch.ones(3, 8, requires_grad=True)
    for _ in range(2):  # so that both are remembered
        y = ct.rms_norm(leaf)
        cunorm.rms_norm(x)
        torch.autograd.grad(y, leaf, x, retain_graph=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(TypeError, match=r"^rms_norm: x is used where torch .*\(FakeTensorMode"):
            cunorm.rms_norm(x)
        with pytest.raises(TypeError, match=r"^rms_norm: dy is used where torch makes tensors wit"):
            torch.autograd.grad(y, leaf, x)


def test_an_exported_model_gives_the_same_for_any_number_of_rows():
    model = Mixer()
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(model, (batch(),), dynamic_shapes=({0: rows},))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum("cunorm.row_norm_forward" in target for target in targets) == 3
    assert sum("cunorm.group_norm_forward" in target for target in targets) == 1
    for given in (batch(), batch(11)):
        assert torch.equal(exported.module()(given), model(given))
