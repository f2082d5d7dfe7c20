# SPDX-License-Identifier: MIT
"""cunorm.torch on a GPU: within its bounds, in CUDA graphs, on streams and compiled."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cunorm.torch as ct  # noqa: E402
from cunorm import GroupNormForward, GroupNormGrads, NormForward, NormGrads  # noqa: E402
from tests.support.bounds import check_backward, check_forward  # noqa: E402
from tests.support.gpu_arrays import OnTorch  # noqa: E402
from tests.support.group_bounds import check_group_backward, check_group_forward  # noqa: E402
from tests.support.operands import draw  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    # PyTorch warns when inductor is imported
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
]

F32, BF16 = "float32", "bfloat16"
SHAPE, IMAGES, GROUPS = (64, 1024), (3, 64, 12, 10), 8
IMAGE = {"activation": "silu", "channel_axis": 1}
# Dtypes of the inputs with gradients, x first, then of the gradients of the results.
ROWS = {"x": BF16, "residual": F32, "weight": F32, "dy": BF16, "d_residual": F32}
OF_IMAGES = dict.fromkeys(("x", "weight", "bias", "dy"), F32)


def check_rows(found, x, residual, weight, dy, d_residual):
    y, stream, dx, dresidual, dweight = found
    check_forward(NormForward(y, stream), x, weight, None, residual, eps=1e-6)
    grads, options = NormGrads(dx, dweight, dresidual=dresidual), {"x_dtype": x.dtype, "eps": 1e-6}
    check_backward(grads, dy, stream, weight, None, d_residual, **options)


def check_images(found, x, weight, bias, dy):
    given, options = (x, GROUPS, weight, bias), {**IMAGE, "eps": 1e-5}
    check_group_forward(GroupNormForward(found[0]), *given, **options)
    check_group_backward(GroupNormGrads(*found[1:]), dy, *given, **options)


class Norm:
    """A norm of a bfloat16 branch and a float32 stream, or of images in channels_last."""

    def __init__(self, name):
        self.gpu, shape, dtypes = OnTorch(), SHAPE, ROWS
        self.call, self.check_results = ct.add_rms_norm, check_rows
        if name == "group_norm":
            self.call = lambda x, *parameters: (ct.group_norm(x, GROUPS, *parameters, **IMAGE),)
            self.check_results, shape, dtypes = check_images, IMAGES, OF_IMAGES
        shapes = dict.fromkeys(("weight", "bias"), shape[1])
        drawn = (self.gpu.put(draw(one, shapes.get(one, shape), dtypes[one])) for one in dtypes)
        last = {"memory_format": torch.channels_last}
        tensors = [one.to(**last) if one.ndim == 4 else one for one in drawn]
        self.leaves, self.arriving = [one.requires_grad_() for one in tensors[:3]], tensors[3:]
        self.x = tensors[0].detach()

    def step(self):
        """Return the results and gradients."""
        results = self.call(*self.leaves)
        gradients = torch.autograd.grad(results, self.leaves, self.arriving)
        return [*(one.detach() for one in results), *gradients]

    def check(self, found):
        assert all(one.stride() == self.x.stride() for one in found if one.ndim > 1)
        given = [*self.leaves, *self.arriving]
        results, operands = ([self.gpu.get(t.contiguous()) for t in ts] for ts in (found, given))
        self.check_results(results, *operands)


@pytest.fixture(params=["add_rms_norm", "group_norm"])
def norm(request):
    return Norm(request.param)


def test_forward_and_backward_are_captured_in_a_cuda_graph_after_one_warm_call(norm):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # PyTorch requires this before a captured backward
        norm.check(norm.step())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = norm.step()
    norm.x.copy_(norm.x.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    norm.check(found)


def test_a_compiled_norm_has_the_bits_of_an_eager_call(norm):
    pytest.importorskip("triton", reason="torch.compile on a GPU needs Triton")
    expected = norm.step()
    norm.call = torch.compile(norm.call, fullgraph=True)
    for one, right in zip(norm.step(), expected, strict=True):
        assert torch.equal(one, right)
    torch.compiler.reset()


def test_a_backward_runs_on_the_stream_of_its_forward(norm):
    norm.check(norm.step())
    others, side = norm.x.flip(0), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        norm.x.copy_(others)  # on another stream, the step would read the old x
        found = norm.step()
    side.synchronize()
    norm.check(found)
