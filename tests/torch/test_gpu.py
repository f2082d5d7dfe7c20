# SPDX-License-Identifier: MIT
"""cunorm.torch on a GPU: within the same bounds, in CUDA graphs, and compiled."""

from __future__ import annotations

import pytest

from cunorm import GroupNormForward, GroupNormGrads, NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import OnTorch
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.operands import draw

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
ct = pytest.importorskip("cunorm.torch")

pytestmark = [
    pytest.mark.gpu,
    # torch's own, when inductor is imported
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]

SHAPE, IMAGES, GROUPS = (64, 1024), (3, 64, 12, 10), 8
IMAGE = {"activation": "silu", "channel_axis": 1}


class Row:
    """A norm of a bfloat16 branch and a float32 stream, and its gradients."""

    def __init__(self, gpu):
        self.gpu, self.function = gpu, ct.add_rms_norm
        dtypes = {"x": "bfloat16", "residual": "float32", "weight": "float32"}
        dtypes |= {"dy": "bfloat16", "d_residual": "float32"}
        self.arrays = {
            name: draw(name, SHAPE[1:] if name == "weight" else SHAPE, dtype)
            for name, dtype in dtypes.items()
        }
        tensors = {name: gpu.put(array) for name, array in self.arrays.items()}
        self.leaves = [tensors[name].requires_grad_() for name in ("x", "residual", "weight")]
        self.arriving = [tensors[name] for name in ("dy", "d_residual")]

    def step(self):
        """Return y, the new stream, and the gradients of x, residual and weight."""
        results = self.function(*self.leaves)
        gradients = torch.autograd.grad(results, self.leaves, self.arriving)
        return [*(one.detach() for one in results), *gradients]

    def others(self):
        """Draw other numbers for x, which `check` then expects."""
        self.arrays["x"] = draw("other x", SHAPE, "bfloat16")
        return self.gpu.put(self.arrays["x"])

    def check(self, found):
        y, stream, dx, dresidual, dweight = map(self.gpu.get, found)
        a = self.arrays
        check_forward(NormForward(y, stream), a["x"], a["weight"], None, a["residual"], eps=1e-6)
        grads = NormGrads(dx, dweight, dresidual=dresidual)
        told = {"x_dtype": a["x"].dtype, "eps": 1e-6}
        check_backward(grads, a["dy"], stream, a["weight"], None, a["d_residual"], **told)


class Image:
    """A group norm with an activation in channels_last, and its gradients."""

    def __init__(self, gpu):
        self.gpu, self.function = gpu, ct.group_norm
        shapes = {"x": IMAGES, "weight": IMAGES[1], "bias": IMAGES[1], "dy": IMAGES}
        self.arrays = {name: draw(name, shape, "float32") for name, shape in shapes.items()}
        *leaves, self.dy = (self._put(array) for array in self.arrays.values())
        self.leaves = [one.requires_grad_() for one in leaves]

    def _put(self, array):
        tensor = self.gpu.put(array)
        return tensor.to(memory_format=torch.channels_last) if array.ndim == 4 else tensor

    def step(self):
        """Return y, and the gradients of x, weight and bias."""
        x, *parameters = self.leaves
        y = self.function(x, GROUPS, *parameters, **IMAGE)
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)]

    def others(self):
        """Draw other numbers for x, which `check` then expects."""
        self.arrays["x"] = draw("other x", IMAGES, "float32")
        return self._put(self.arrays["x"])

    def check(self, found):
        channels_last = torch.channels_last
        assert all(one.is_contiguous(memory_format=channels_last) for one in found[:2])
        y, dx, dweight, dbias = (self.gpu.get(one.contiguous()) for one in found)
        *operands, dy = self.arrays.values()
        x, *parameters = operands
        told = {**IMAGE, "eps": 1e-5}
        check_group_forward(GroupNormForward(y), x, GROUPS, *parameters, **told)
        grads = GroupNormGrads(dx, dweight, dbias)
        check_group_backward(grads, dy, x, GROUPS, *parameters, **told)


@pytest.fixture(params=[Row, Image], ids=["add_rms_norm", "group_norm"])
def norm(request):
    return request.param(OnTorch())


def test_results_and_gradients_are_within_their_bounds(norm):
    norm.check(norm.step())


def test_forward_and_backward_are_captured_in_a_cuda_graph_after_one_warm_call(norm):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as PyTorch asks for where a backward is captured
        norm.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = norm.step()
    norm.leaves[0].detach().copy_(norm.others())
    graph.replay()
    torch.cuda.synchronize()
    norm.check(found)


def test_a_compiled_norm_is_that_of_an_eager_call_to_the_bit(norm):
    pytest.importorskip("triton", reason="torch.compile on a GPU needs Triton")
    expected = norm.step()
    function = norm.function
    norm.function = torch.compile(function, fullgraph=True)
    for one, right in zip(norm.step(), expected, strict=True):
        assert torch.equal(one, right)
    torch.compiler.reset()


def test_a_backward_runs_on_the_stream_of_its_forward(norm):
    norm.step()
    others, side = norm.others(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        norm.leaves[0].detach().copy_(others)  # on another stream it would be read before
        found = norm.step()
    side.synchronize()
    norm.check(found)
