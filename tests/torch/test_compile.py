# SPDX-License-Identifier: MIT
"""The norms of cunorm.torch inside torch.compile: one graph, the numbers of eager calls."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.bounds import check_backward, check_forward
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.operands import at, draw

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cunorm.torch  # noqa: E402
from cunorm import GroupNormForward, GroupNormGrads, NormForward, NormGrads  # noqa: E402
from cunorm._arrays import describe, numpy_view  # noqa: E402

# torch's own, when inductor is imported
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]

WIDTH, GROUPS = 96, 4
IMAGE = {"num_groups": GROUPS, "activation": "silu", "channel_axis": 1}


def images(x, weight, bias):
    """Return a group norm of doubled x, so that inductor makes its input, in its own layout."""
    return cunorm.torch.group_norm(x + x, weight=weight, bias=bias, **IMAGE)


NORMS = {
    "rms_norm": cunorm.torch.rms_norm,
    "add_rms_norm": cunorm.torch.add_rms_norm,
    "gated": cunorm.torch.rms_norm,
    "layer_norm": cunorm.torch.layer_norm,
    "channels_first": images,
    "channels_last": images,
}


def operands(name, batch):
    """Draw what a norm takes, as NumPy arrays; images are not square, nor as many as channels."""
    if name.startswith("channels"):
        shapes = {"x": (batch, 12, 7, 11), "weight": 12, "bias": 12}
    else:
        shapes = {"x": (batch, 5, WIDTH), "weight": WIDTH}
        more = {"add_rms_norm": "residual", "gated": "gate", "layer_norm": "bias"}
        if name in more:
            shapes[more[name]] = WIDTH if name == "layer_norm" else shapes["x"]
    narrow = "bfloat16" if name == "add_rms_norm" else "float32"
    return {
        operand: draw(f"{name} {operand}", shape, narrow if operand == "x" else "float32")
        for operand, shape in shapes.items()
    }


def leaf(name, array):
    """Return a tensor of those numbers that requires a gradient."""
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).clone()
    else:
        tensor = torch.from_numpy(array.copy())
    if name == "channels_last" and array.ndim == 4:
        tensor = tensor.to(memory_format=torch.channels_last)
    return tensor.requires_grad_()


def numbers(tensor):
    tensor = tensor.detach()
    return numpy_view(describe("test", "result", tensor))


def every_norm(given):
    """Run each norm on tensors of its own."""
    return {name: NORMS[name](**tensors) for name, tensors in given.items()}


class Ran:
    """Outputs and gradients of `every_norm`, or of what is compiled of it."""

    def __init__(self, function, batch):
        self.arrays = {name: operands(name, batch) for name in NORMS}
        given = {
            name: {operand: leaf(name, array) for operand, array in arrays.items()}
            for name, arrays in self.arrays.items()
        }
        results = function(given)
        self.outputs = {
            name: result if isinstance(result, tuple) else (result,)
            for name, result in results.items()
        }
        self.douts = {
            name: tuple(
                leaf(name, draw(f"{name} dout {place}", tuple(one.shape), str(one.dtype)[6:]))
                for place, one in enumerate(outputs)
            )
            for name, outputs in self.outputs.items()
        }
        torch.autograd.backward(
            [one for name in NORMS for one in self.outputs[name]],
            [one.detach() for name in NORMS for one in self.douts[name]],
        )
        self.gradients = {
            name: {operand: tensor.grad for operand, tensor in tensors.items()}
            for name, tensors in given.items()
        }


@pytest.fixture(scope="module", autouse=True)
def nothing_compiled(tmp_path_factory):
    """Keep away what was compiled before: its key does not tell how an operator is made."""
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    torch.compiler.reset()


def compiled_for_two_batches():
    """Compile all norms into one graph and run it forward and backward, for two batch sizes."""
    function = torch.compile(every_norm, fullgraph=True, dynamic=True)
    ran = {3: Ran(function, 3)}
    with torch.compiler.set_stance("fail_on_recompile"):
        ran[10] = Ran(function, 10)
    return ran


def check_same(there, here, name):
    """Compare results and gradients, and how they lie in memory."""
    pairs = [*zip(there.outputs[name], here.outputs[name], strict=True)]
    pairs += [(there.gradients[name][key], here.gradients[name][key]) for key in there.arrays[name]]
    for actual, expected in pairs:
        assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
        assert torch.equal(actual, expected)


def check_row_norm(ran, name):
    """Hold a row norm to the formula."""
    arrays = ran.arrays[name]
    x, weight, bias = arrays["x"], arrays["weight"], arrays.get("bias")
    residual, gate = arrays.get("residual"), arrays.get("gate")
    centred = name == "layer_norm"
    told = {"eps": 1e-5 if centred else 1e-6, "center": centred, "gate": gate}
    y, *stream = map(numbers, ran.outputs[name])
    check_forward(NormForward(y, *stream), x, weight, bias, residual, **told)
    g = {key: numbers(gradient) for key, gradient in ran.gradients[name].items()}
    grads = NormGrads(g["x"], g["weight"], g.get("bias"), g.get("gate"), g.get("residual"))
    dy, *d_stream = map(numbers, ran.douts[name])
    normalised = stream[0] if stream else x
    operands = (normalised, weight, bias, *d_stream)
    check_backward(grads, dy, *operands, x_dtype=x.dtype, **told)


def check_group_norm(ran, name):
    """Hold a group norm to the formula."""
    x, weight, bias = ran.arrays[name].values()
    given, told = (2 * x, GROUPS, weight, bias), {**IMAGE, "eps": 1e-5}
    del told["num_groups"]
    (y,), (dy,) = ran.outputs[name], ran.douts[name]
    format = torch.channels_last if name == "channels_last" else torch.contiguous_format
    assert y.is_contiguous(memory_format=format)
    check_group_forward(GroupNormForward(numbers(y)), *given, **told)
    dx, dweight, dbias = map(numbers, ran.gradients[name].values())
    check_group_backward(GroupNormGrads(dx / 2, dweight, dbias), numbers(dy), *given, **told)


def test_norms_compiled_into_one_graph_are_right_and_eager_calls_to_the_bit():
    """In one test, as the graph takes long to compile, for batches of two sizes."""
    for batch, ran in compiled_for_two_batches().items():
        eager = Ran(every_norm, batch)
        for name in NORMS:
            with at(name, batch):
                check_same(ran, eager, name)
                check = check_group_norm if name.startswith("channels") else check_row_norm
                check(ran, name)


# --- a module -------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """Two norms between linear layers, and a stream past them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.first = cunorm.torch.RMSNorm(WIDTH)
        self.second = cunorm.torch.AddRMSNorm(WIDTH)

    def forward(self, x):
        y, stream = self.second(self.up(self.first(x)), x)
        return self.down(y) + stream


def test_a_compiled_module_trains_as_it_does_uncompiled():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(7, WIDTH)
    runs = []
    for forward in (block, torch.compile(block, fullgraph=True)):
        block.zero_grad()
        out = forward(x)
        out.square().mean().backward()
        runs.append([out.detach(), *(p.grad.clone() for p in block.parameters())])
    for actual, expected in zip(*runs, strict=True):
        # Products and sums of another order: some 100 float32 terms of each, three deep.
        torch.testing.assert_close(actual, expected, rtol=0, atol=4e-5 * expected.abs().max())
