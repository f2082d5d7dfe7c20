# SPDX-License-Identifier: MIT
"""cunorm.torch on a GPU: within the same bounds, in CUDA graphs, and compiled."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
functional = torch.nn.functional

import cunorm.torch as ct  # noqa: E402
from tests.support.torch_cases import tensor  # noqa: E402
from tests.support.torch_norms import assert_near  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch has no CUDA"),
    # torch's own, when inductor is imported
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]


def add_rms_norm(x, residual, weight):
    stream = x + residual
    return functional.rms_norm(stream, (1024,), weight, 1e-6), stream


def group_norm(x, weight, bias):
    return (functional.silu(functional.group_norm(x, 8, weight, bias)),)


def on_gpu(name, *shape, dtype="float32"):
    made = tensor(name, *shape, dtype=dtype, grad=False).to("cuda")
    return made.to(memory_format=torch.channels_last) if len(shape) == 4 else made


def results(function, leaves, arriving):
    """Return the results of a function, and the gradients of its operands."""
    made = function(*leaves)
    return [*(one.detach() for one in made), *torch.autograd.grad(made, leaves, arriving)]


class Row:
    """A norm of a bfloat16 branch and a float32 stream."""

    function, formula = staticmethod(ct.add_rms_norm), staticmethod(add_rms_norm)

    def __init__(self):
        x, dy = (on_gpu(name, 64, 1024, dtype="bfloat16") for name in ("x", "dy"))
        residual, d_residual = (on_gpu(name, 64, 1024) for name in ("residual", "d_residual"))
        given = x, residual, on_gpu("weight", 1024)
        self.leaves, self.arriving = [one.requires_grad_() for one in given], [dy, d_residual]

    def step(self):
        return results(self.function, self.leaves, self.arriving)

    def change(self, others):
        """Put other numbers into x."""
        self.leaves[0].detach().copy_(others)

    def check(self, found):
        wide = [one.detach().cpu().double() for one in (*self.leaves, *self.arriving)]
        leaves = [one.requires_grad_() for one in wide[: len(self.leaves)]]
        exact = results(self.formula, leaves, wide[len(leaves) :])
        for one, right in zip(found, exact, strict=True):
            assert_near(one.cpu(), right)
            assert one.stride() == right.stride()


class Image(Row):
    """A group norm with an activation in channels_last."""

    formula = staticmethod(group_norm)

    def __init__(self):
        x, dy = (on_gpu(name, 3, 64, 12, 10) for name in ("x", "dy"))
        given = x, on_gpu("weight", 64), on_gpu("bias", 64)
        self.leaves, self.arriving = [one.requires_grad_() for one in given], [dy]

    @staticmethod
    def function(*operands):
        x, *parameters = operands
        return (ct.group_norm(x, 8, *parameters, activation="silu", channel_axis=1),)


@pytest.fixture(params=[Row, Image], ids=["add_rms_norm", "group_norm"])
def norm(request):
    return request.param()


def test_forward_and_backward_are_captured_in_a_cuda_graph_after_one_warm_call(norm):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as PyTorch asks for where a backward is captured
        norm.check(norm.step())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = norm.step()
    norm.change(norm.leaves[0].flip(0))
    graph.replay()
    torch.cuda.synchronize()
    norm.check(found)


def test_a_compiled_norm_is_that_of_an_eager_call_to_the_bit(norm):
    pytest.importorskip("triton", reason="torch.compile on a GPU needs Triton")
    expected = norm.step()
    norm.function = torch.compile(norm.function, fullgraph=True)
    for one, right in zip(norm.step(), expected, strict=True):
        assert torch.equal(one, right)
    torch.compiler.reset()


def test_a_backward_runs_on_the_stream_of_its_forward(norm):
    norm.check(norm.step())
    others, side = norm.leaves[0].detach().flip(0), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        norm.change(others)  # on another stream it would be read before
        found = norm.step()
    side.synchronize()
    norm.check(found)
