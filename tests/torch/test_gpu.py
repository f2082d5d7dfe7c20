# SPDX-License-Identifier: MIT
"""cunorm.torch on a GPU: as in float64 on the CPU, in CUDA graphs, on streams and compiled."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.support.torch_cases import case, gradients  # noqa: E402
from tests.support.torch_norms import BF16, F32, assert_near  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch has no CUDA"),
    # torch's own, when inductor is imported
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]


class Norm:
    """A norm and what is given to it on the GPU: a bfloat16 branch of a float32 stream, images."""

    def __init__(self, name):
        self.call, tensors = case(name)
        dtypes = [BF16 if name == "add_rms_norm" else F32, *[F32] * len(tensors)]
        given = zip(tensors, dtypes, strict=False)
        self.leaves = [one.detach().to("cuda", dtype).requires_grad_() for one, dtype in given]

    def step(self, leaves=None):
        """Return results and gradients."""
        leaves = leaves or self.leaves
        return [*(one.detach() for one in self.call(*leaves)), *gradients(self.call, leaves)]

    def change(self, others):
        """Put other numbers into x."""
        self.leaves[0].detach().copy_(others)

    def check(self, found):
        exact = self.step([one.detach().cpu().double().requires_grad_() for one in self.leaves])
        for one, right in zip(found, exact, strict=True):
            assert_near(one.cpu(), right)
            assert one.stride() == right.stride()


@pytest.fixture(params=["add_rms_norm", "channels last"])
def norm(request):
    return Norm(request.param)


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
    norm.call = torch.compile(norm.call, fullgraph=True)
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
