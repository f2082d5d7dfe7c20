# SPDX-License-Identifier: MIT
"""The norms of cunorm.torch inside torch.compile: one graph, the numbers of eager calls."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cunorm.torch as ct  # noqa: E402
from tests.support.torch_norms import (  # noqa: E402
    BF16,
    EVERY,
    WIDTH,
    LlamaNorm,
    arguments,
    drawn,
    results,
    x_of,
)

# torch's own, when inductor is imported
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def nothing_compiled(tmp_path_factory):
    """Keep away what was compiled before: its key does not tell how an operator is made.

    Nor does inductor try out instruction sets and compile a header first, which takes long.
    """
    torch.compiler.reset()
    quick = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(quick):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    torch.compiler.reset()


def every_norm(x, residual, weight, bias, scale, images):
    """Run norms, one of them on what inductor makes, in its own layout."""
    y, stream = ct.add_rms_norm(x, residual)
    first = ct.group_norm(images + images, 4, scale, channel_axis=1)
    second = ct.group_norm(first, 4, activation="silu", channel_axis=1)
    return y, ct.layer_norm(stream, weight, bias), second


def run(function, rows):
    """Return results and gradients; images are not square, nor as many as channels."""
    leaves = drawn(rows, 5, 96, dtype=BF16), drawn(rows, 5, 96), drawn(96), drawn(96), drawn(12)
    leaves = [one.requires_grad_() for one in leaves]
    images = drawn(rows, 12, 7, 11).to(memory_format=torch.channels_last)
    made = function(*leaves, images)
    douts = [drawn(*one.shape, seed=9, dtype=one.dtype) for one in made]
    return [*made, *torch.autograd.grad(made, leaves, douts)]


def test_norms_compiled_into_one_graph_are_eager_calls_to_the_bit():
    """In one test, as the graph takes long to compile, for batches of two sizes."""
    function = torch.compile(every_norm, fullgraph=True, dynamic=True)
    compiled = {3: run(function, 3)}
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled[10] = run(function, 10)
    for rows, found in compiled.items():
        for actual, expected in zip(found, run(every_norm, rows), strict=True):
            assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
            assert torch.equal(actual, expected)
        assert found[2].is_contiguous(memory_format=torch.channels_last)


class Modules(torch.nn.ModuleDict):
    """Modules of ours and those that replace others', on x and, some, on a gate."""

    def __init__(self):
        super().__init__({name: EVERY[name][0]() for name in ("Llama's", "Mamba-2's", "T5's")})
        ct.replace_norms(self)
        self["RMSNorm"], self["LayerNorm"] = ct.RMSNorm(WIDTH), ct.LayerNorm((8, WIDTH))
        self["GroupNorm"] = ct.GroupNorm(4, 8)

    def forward(self, x, gate):
        every = self.items()
        return torch.stack([m(x, gate) if name == "Mamba-2's" else m(x) for name, m in every])


def test_torch_compile_takes_modules_whole():
    module, given = Modules(), arguments("Mamba-2's")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for found, expected in zip(results(compiled, *given), results(module, *given), strict=True):
        assert torch.equal(found, expected)


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
