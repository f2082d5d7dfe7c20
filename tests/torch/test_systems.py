# SPDX-License-Identifier: MIT
"""cunorm.torch in PyTorch's systems: checkpoints, autocast, export, compile."""

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cunorm  # noqa: E402
import cunorm.torch as ct  # noqa: E402
from cunorm.torch._derivatives import forward_text  # noqa: E402
from tests.support.processes import in_process  # noqa: E402
from tests.support.torch_norms import (  # noqa: E402
    BF16,
    CUSTOM_NORMS,
    WIDTH,
    LlamaNorm,
    Mixer,
    drawn,
    results,
    x_of,
)

# PyTorch warns when it traces
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")


@pytest.mark.parametrize("change", [("4", "3"), ('"version": 4, ', "")])
def test_an_operator_refuses_a_text_that_another_version_of_cunorm_compiled(change):
    text = forward_text("group_norm", "group_norm", 2, None, 1, 1e-5, None, False)
    run, x = torch.ops.cunorm.group_norm_forward, torch.ones(2, 4)
    assert text.startswith('{"version": 4, ')
    run(x, None, None, text)
    with pytest.raises(ValueError, match=r"of text version (3|None), expected 4: compile it again"):
        run(x, None, None, text.replace(*change, 1))


@pytest.mark.parametrize("mode", ["reentrant", "not reentrant", "selective"])
def test_checkpointed_norms_give_the_same_gradients_and_run_once_if_their_results_are_kept(mode):
    model, x, seen = Mixer(), drawn(6, WIDTH), []

    def policy(context, operator, *given, **more):
        if not context.is_recompute:  # PyTorch 2.11 asks again in a recompute
            seen.append(operator)
        is_kept = operator is torch.ops.cunorm.row_norm_forward.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    options = {"use_reentrant": mode == "reentrant"}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    expected = results(model, x)
    checkpoint(model, x.requires_grad_(), **options).backward(drawn(6, WIDTH, seed=5))
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(map(torch.equal, found, expected[1:]))
    ours = [str(operator) for operator in seen if "cunorm" in str(operator)]
    families = ["row", "row", "group", "row", "row"] if mode == "selective" else []
    assert ours == [f"cunorm.{family}_norm_forward.default" for family in families]


def test_under_autocast_norms_keep_xs_dtype_and_gradients_keep_their_operands_dtypes():
    model, dtypes = Mixer(), {}

    def see(module, given, result):
        results = result if isinstance(result, tuple) else (result,)
        dtypes[module] = [str(one.dtype)[6:] for one in (*given, *results)]

    for module in model.modules():
        module.register_forward_hook(see)
    with torch.autocast("cpu", BF16):
        found = results(model, drawn(6, WIDTH))
    assert dtypes[model.before] == ["float32"] * 2  # x is float32
    assert dtypes[model.first] == ["float32", "bfloat16"]  # autocast runs it in bfloat16
    assert dtypes[model.added] == ["bfloat16", "float32"] * 2  # branch, stream, y, stream
    assert dtypes[model.groups] == ["bfloat16"] * 2
    assert {one.dtype for one in found} == {torch.float32}  # y is the norm of a float32 sum


def test_where_results_are_fake_plain_functions_are_refused_and_backwards_are_fake():
    x, leaf = torch.ones(3, 8), torch.ones(3, 8, requires_grad=True)
    for _ in range(2):  # so that the calls are cached
        y = ct.rms_norm(leaf)
        cunorm.rms_norm(x)
        torch.autograd.grad(y, leaf, x, retain_graph=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(TypeError, match=r"^rms_norm: x is used where torch .*\(FakeTensorMode"):
            cunorm.rms_norm(x)
        (found,) = torch.autograd.grad(y, leaf, x)
    assert isinstance(found, FakeTensor) and found.shape == (3, 8)


def test_an_exported_model_gives_the_same_for_any_number_of_rows():
    model = Mixer()
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(model, (drawn(6, WIDTH),), dynamic_shapes=({0: rows},))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum("cunorm.row_norm_forward" in target for target in targets) == 4
    assert sum("cunorm.group_norm_forward" in target for target in targets) == 1
    for given in (drawn(6, WIDTH), drawn(11, WIDTH)):
        assert torch.equal(exported.module()(given), model(given))


@pytest.mark.parametrize("options", [{"gate_activation": "gelu"}, {"gate_position": "pre"}])
def test_an_option_without_its_operand_is_refused_before_a_call_runs(options):
    class Wrong(torch.nn.Module):
        def forward(self, x):
            return ct.rms_norm(x, **options)

    def refused():
        return pytest.raises(ValueError, match=r"^rms_norm: \w+ is .*, expected ")

    with refused(), FakeTensorMode():
        Wrong()(torch.ones(3, 8))
    with refused():
        make_fx(Wrong(), tracing_mode="fake")(torch.ones(3, 8))
    with refused():
        torch.export.export(Wrong(), (torch.ones(3, 8),))


def test_the_import_of_cunorm_torch_leaves_torchs_compiler_alone():
    program = "import sys, cunorm.torch\nprint(*sys.modules)"
    assert "torch._dynamo" not in in_process(program, setup="").split()


# --- torch.compile --------------------------------------------------------------------------------


def every_norm(x, residual, weight, bias, scale, images):
    """Run norms; inductor computes the first group norm's x, and chooses the layout of this x."""
    y, stream = ct.add_rms_norm(x, residual)
    first = ct.group_norm(images + images, 4, scale, channel_axis=1)
    second = ct.group_norm(first, 4, activation="silu", channel_axis=1)
    return y, ct.layer_norm(stream, weight, bias), second


def run(function, rows):
    """Return results and gradients; images are not square, and all sizes differ."""
    leaves = drawn(rows, 5, 96, dtype=BF16), drawn(rows, 5, 96), drawn(96), drawn(96), drawn(12)
    leaves = [one.requires_grad_() for one in leaves]
    images = drawn(rows, 12, 7, 11).to(memory_format=torch.channels_last)
    results = function(*leaves, images)
    douts = [drawn(*one.shape, seed=9, dtype=one.dtype) for one in results]
    return [*results, *torch.autograd.grad(results, leaves, douts)]


@pytest.mark.filterwarnings("ignore:Skipping serialization")  # of early versions of PyTorch
def test_norms_compiled_into_one_graph_have_the_bits_of_eager_calls(inductor):
    function = torch.compile(every_norm, fullgraph=True, dynamic=True)
    compiled = {3: run(function, 3)}
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled[10] = run(function, 10)
    for rows, found in compiled.items():
        for actual, expected in zip(found, run(every_norm, rows), strict=True):
            assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
            assert torch.equal(actual, expected)
        assert found[2].is_contiguous(memory_format=torch.channels_last)


def test_scalars_of_a_compiled_norm_may_change():
    """A changed scalar becomes a symbol in torch.compile, and must be a number for the operator."""

    def norms(x, eps, c, groups, axis):
        y = ct.rms_norm(x, eps=eps, groups=x.shape[-1] // 8)
        z = ct.normalize(y, c=c, weight_offset=0, axis=axis)
        return ct.group_norm(z, groups, eps=eps, channel_axis=-1), ct.instance_norm(z)

    compiled = torch.compile(norms, backend="aot_eager", fullgraph=True)
    for scalars in ((1e-5, 1.0, 2, -1), (1e-3, 2.0, 4, 1), (0.5, -0.0, 8, 2)):
        for width in (16, 24):
            x = drawn(3, 5, width)
            assert all(map(torch.equal, compiled(x, *scalars), norms(x, *scalars)))


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch warns when it traces
def test_compiled_autograd_gives_the_gradients_of_eager_calls():
    """Compiled autograd traces the backward of an eager call, down to the operator."""
    from torch._dynamo import compiled_autograd

    leaves = [drawn(3, 8), drawn(3, 8), drawn(8)]
    leaves = [one.requires_grad_() for one in leaves]

    def gradients():
        y, stream = ct.add_rms_norm(*leaves, gate=leaves[0], eps=1e-3)
        z = ct.group_norm(y[..., None], 2, activation="silu", channel_axis=1)
        for one in leaves:
            one.grad = None
        (z.sum() + (stream * stream).sum() + y.square().sum()).backward()
        return [one.grad.clone() for one in leaves]

    expected = gradients()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        found = gradients()
    assert all(map(torch.equal, found, expected))


def test_the_text_of_a_call_is_marked_constant_as_torch_marks_functions():
    marked = vars(torch.compiler.assume_constant_result(lambda: None))
    assert marked and marked == vars(forward_text)


def test_torch_compile_puts_modules_into_one_graph():
    others = torch.nn.Sequential(
        *(CUSTOM_NORMS[name][0]() for name in ("Llama's", "Mamba-2's", "T5's"))
    )
    ct.replace_norms(others)
    module, x = torch.nn.Sequential(Mixer(), others), drawn(6, WIDTH)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, results(compiled, x), results(module, x)))


def test_a_compiled_model_runs_the_replaced_norms():
    module, x, graphs = LlamaNorm(), x_of(), []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for change in (ct.replace_norms, ct.restore_norms, id):
        compiled(x)
        change(module)
    assert ["cunorm" in graph for graph in graphs[:2]] == [False, True]
