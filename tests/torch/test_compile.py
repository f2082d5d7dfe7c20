# SPDX-License-Identifier: MIT
"""The norms of cunorm.torch inside torch.compile: one graph, the numbers of eager calls."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cunorm.torch as ct  # noqa: E402
from tests.support import torch_norms  # noqa: E402
from tests.support.torch_norms import BF16, EVERY, F32, LlamaNorm, arguments, drawn, x_of  # noqa: E402

# torch's own, when inductor is imported
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def nothing_compiled(tmp_path_factory):
    """Keep away what was compiled before: its key does not tell how an operator is made."""
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    torch.compiler.reset()


def every_norm(x, residual, weight, rows, scale, bias, images, channel_weight):
    """Run norms, some on inputs that inductor makes, in its own layout."""
    y, stream = ct.add_rms_norm(x, residual, weight)
    z = ct.layer_norm(rows + rows, scale, bias)
    image = ct.group_norm(images + images, 4, channel_weight, activation="silu", channel_axis=1)
    return y, stream, z, image


def operands(rows):
    """Draw what `every_norm` takes; images are not square, nor as many as channels."""
    channels_last = drawn(rows, 12, 7, 11, seed=4).to(memory_format=torch.channels_last)
    wide = (drawn(rows, 5, 96, seed=seed, dtype=BF16 if seed == 0 else F32) for seed in range(3))
    x, residual, others = wide
    weights = [drawn(96, seed=seed) for seed in (5, 6, 7)]
    every = (x, residual, weights[0], others, *weights[1:], channels_last, drawn(12, seed=8))
    return [one.requires_grad_() for one in every]


def results(function, rows):
    """Return results and gradients."""
    given = operands(rows)
    made = function(*given)
    douts = [drawn(*one.shape, seed=9, dtype=one.dtype) for one in made]
    return [*made, *torch.autograd.grad(made, given, douts)]


def test_norms_compiled_into_one_graph_are_eager_calls_to_the_bit():
    """In one test, as the graph takes long to compile, for batches of two sizes."""
    function = torch.compile(every_norm, fullgraph=True, dynamic=True)
    compiled = {3: results(function, 3)}
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled[10] = results(function, 10)
    for rows, found in compiled.items():
        for actual, expected in zip(found, results(every_norm, rows), strict=True):
            assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
            assert torch.equal(actual, expected)
        assert found[3].is_contiguous(memory_format=torch.channels_last)


OURS = {
    "RMSNorm": lambda: ct.RMSNorm(torch_norms.WIDTH),
    "LayerNorm": lambda: ct.LayerNorm((8, torch_norms.WIDTH)),
    "GroupNorm": lambda: ct.GroupNorm(4, 8),
}


@pytest.mark.parametrize("name", [*OURS, "Llama's", "Mamba-2's", "T5's", "LayerNorm of torch's"])
def test_torch_compile_takes_a_module_whole(name):
    module = OURS[name]() if name in OURS else EVERY[name.removesuffix(" of torch's")][0]()
    ct.replace_norms(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    given = arguments(name)
    for actual, expected in zip(
        torch_norms.results(compiled, *given), torch_norms.results(module, *given), strict=True
    ):
        assert torch.equal(actual, expected)


def test_a_compiled_model_runs_what_replaced_its_norms():
    module, x, graphs = LlamaNorm(), x_of(), []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for change in (ct.replace_norms, ct.restore_norms, id):
        compiled(x)
        change(module)
    assert ["cunorm" in graph for graph in graphs[:2]] == [False, True]
