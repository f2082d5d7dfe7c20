# SPDX-License-Identifier: MIT
"""The modules of cunorm.torch: those of torch.nn in all but the forward, and what they add."""

from __future__ import annotations

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cunorm.torch import AddRMSNorm, GatedRMSNorm, GroupNorm, LayerNorm, RMSNorm  # noqa: E402
from tests.support.torch_norms import BF16, F16, F32, F64, assert_near, drawn  # noqa: E402

ROWS, IMAGES = (6, 5, 3, 8), (3, 12, 4, 5)

# name: the module's class, its arguments and x's shape
MODULES = {
    "RMSNorm": (RMSNorm, (8,), {"eps": 1e-4}, ROWS),
    "RMSNorm of two axes": (RMSNorm, ((3, 8),), {}, ROWS),
    "RMSNorm without weight": (RMSNorm, ([8],), {"elementwise_affine": False}, ROWS),
    "LayerNorm": (LayerNorm, (8,), {"eps": 1e-4}, ROWS),
    "LayerNorm of two axes": (LayerNorm, ((3, 8),), {}, ROWS),
    "LayerNorm without bias": (LayerNorm, (8,), {"bias": False}, ROWS),
    "LayerNorm without parameters": (LayerNorm, (8,), {"elementwise_affine": False}, ROWS),
    "GroupNorm": (GroupNorm, (4, 12), {"eps": 1e-4}, IMAGES),
    "GroupNorm of vectors": (GroupNorm, (2, 12), {}, IMAGES[:2]),
    "GroupNorm without parameters": (GroupNorm, (3, 12), {"affine": False}, IMAGES),
}


def with_random_parameters(module):
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=2 + number, dtype=F64))
    return module


def pair(name, dtype=F32):
    """Return a module, that of torch.nn with the same random parameters, and x."""
    kind, args, options, shape = MODULES[name]
    ours = with_random_parameters(kind(*args, **options, dtype=dtype))
    theirs = getattr(torch.nn, kind.__name__)(*args, **options, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, drawn(*shape, seed=1, dtype=dtype)


def results(module, x):
    """Return y and the gradients of x and of the parameters, for a dy that is always the same."""
    module, x = copy.deepcopy(module), x.clone().requires_grad_()
    y = module(x)
    # Drawn in half precision, so that it is the same in every dtype.
    y.backward(drawn(*y.shape, seed=9).to(BF16).to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize(
    "name, dtype",
    [(name, F64) for name in MODULES]
    + [(name, dtype) for name in ("RMSNorm", "LayerNorm", "GroupNorm") for dtype in (F32, BF16)],
)
def test_results_and_gradients_are_those_of_torchs_module(name, dtype):
    ours, theirs, x = pair(name, dtype)
    if isinstance(ours, RMSNorm) and ours.eps is None:  # that of the dtype, which is float64 below
        theirs.eps = torch.finfo(torch.promote_types(dtype, F32)).eps
    found, exact = results(ours, x), results(theirs.double(), x.double())
    for actual, expected in zip(found, exact, strict=True):
        assert actual.dtype == dtype
        assert_near(actual, expected)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
def test_without_eps_it_is_what_the_installed_torch_takes(dtype):
    x = torch.full((1, 4), 2.0**-12, dtype=dtype)  # of squares below float32's epsilon
    ours, theirs = RMSNorm(4, dtype=dtype)(x), torch.nn.RMSNorm(4, dtype=dtype)(x)
    assert_near(ours.detach(), theirs.detach().double())
    other = torch.nn.RMSNorm(4, eps=1e-6, dtype=dtype)(x)
    assert (ours - other).abs().max() > 0.1 * ours.abs().max()  # so there is an eps to get right


@pytest.mark.parametrize("name", MODULES)
def test_parameters_state_and_copies_are_those_of_torchs_module(name):
    ours, theirs, x = pair(name)
    assert isinstance(ours, type(theirs))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    shapes = [(key, p.shape, p.dtype) for key, p in theirs.named_parameters()]
    assert [(key, p.shape, p.dtype) for key, p in ours.named_parameters()] == shapes
    assert repr(ours) == repr(theirs)
    own = {"activation", "round_before_weight", "weight_offset"}
    assert vars(ours).keys() - vars(theirs).keys() <= own

    kind, args, options, _ = MODULES[name]
    fresh = getattr(torch.nn, kind.__name__)(*args, **options).parameters()
    assert all(map(torch.equal, kind(*args, **options).parameters(), fresh))
    empty = kind(*args, **options, device="meta", dtype=F32)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu").load_state_dict(ours.state_dict())
    torch.save(ours, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    pickled = pickle.loads(pickle.dumps(ours))
    for again in (empty, loaded, pickled, copy.deepcopy(ours)):
        assert torch.equal(again(x), ours(x))


@pytest.mark.parametrize(
    "made, x, message",
    [
        (RMSNorm((3, 8)), (6, 8), r"RMSNorm: x has shape \(6, 8\), .* normalized_shape, \(3, 8\)"),
        (LayerNorm(8), (8, 6), r"LayerNorm: x has shape \(8, 6\), .* normalized_shape, \(8,\)"),
        (AddRMSNorm(8, elementwise_affine=False), (8, 1), r"AddRMSNorm: x has shape"),
        (GatedRMSNorm(8), (8, 6), r"GatedRMSNorm: x has shape"),
        (GroupNorm(2, 8, affine=False), (3, 6, 8), r"GroupNorm: x .* num_channels is 8"),
        (GroupNorm(2, 8), (8,), r"GroupNorm: x has shape \(8,\), expected \(N, 8, ...\)"),
    ],
)
def test_an_x_that_does_not_fit_is_an_error_that_names_the_modules_argument(made, x, message):
    with pytest.raises(ValueError, match=message):
        made(torch.ones(x))


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm, AddRMSNorm, GatedRMSNorm])
def test_a_row_of_no_axes_is_an_error_that_names_the_modules_argument(kind):
    with pytest.raises(ValueError, match=rf"{kind.__name__}: normalized_shape is \(\)"):
        kind(())


# --- what those of torch.nn have not --------------------------------------------------------------


def test_weight_offset_is_gemmas_and_a_new_weight_counts_as_one():
    x = drawn(6, 32, dtype=F64)
    new = RMSNorm(32, eps=1e-6, dtype=F64, weight_offset=1.0)
    assert (new.weight == 0).all()
    plain = torch.nn.RMSNorm(32, eps=1e-6, dtype=F64)
    assert_near(new(x).detach(), plain(x).detach())
    with torch.no_grad():
        new.weight.copy_(drawn(32, seed=2))
        plain.weight.copy_(1 + new.weight)
    assert_near(new(x).detach(), plain(x).detach())
    with pytest.raises(ValueError, match=r"weight_offset is 1\.0, expected 0\.0"):
        RMSNorm(32, elementwise_affine=False, weight_offset=1.0)


@pytest.mark.parametrize("weight_dtype", [BF16, F32])
def test_round_before_weight_is_llamas_order_to_the_bit(weight_dtype):
    """But where what is rounded is so near a tie that float32 does not decide: here, nowhere."""
    x = drawn(16, 32, dtype=BF16)
    options = {"eps": 1e-6, "dtype": weight_dtype, "round_before_weight": True}
    norm = with_random_parameters(RMSNorm(32, **options))
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    expected = norm.weight * wide.to(x.dtype)
    assert norm(x).dtype == expected.dtype
    # A tie is within 2**-20 of a number of bfloat16 as often as 2**-11.
    assert (norm(x) != expected).sum() <= 2
    norm.round_before_weight = False
    assert (norm(x) != expected).sum() > 50


@pytest.mark.parametrize(
    "activation, layout",
    [(None, "contiguous_format"), ("silu", "channels_last"), ("gelu", "contiguous_format")],
)
def test_group_norm_with_an_activation_keeps_the_memory_format(activation, layout):
    norm = with_random_parameters(GroupNorm(4, 12, activation=activation, dtype=F32))
    layout = getattr(torch, layout)
    x = drawn(*IMAGES, dtype=F32).to(memory_format=layout)
    theirs = torch.nn.GroupNorm(4, 12, dtype=F64)
    theirs.load_state_dict(norm.state_dict())
    g = getattr(torch.nn.functional, activation) if activation else lambda n: n
    y = norm(x)
    assert y.is_contiguous(memory_format=layout)
    assert_near(y.detach(), g(theirs(x.double())).detach())


@pytest.mark.parametrize("residual_dtype", [F32, BF16])
def test_add_rms_norm_is_the_addition_and_then_the_norm(residual_dtype):
    norm = with_random_parameters(AddRMSNorm(32, eps=1e-6, dtype=BF16, weight_offset=1.0))
    plain = RMSNorm(32, eps=1e-6, weight_offset=1.0)
    plain.load_state_dict(norm.state_dict())
    x, residual = drawn(6, 32, dtype=BF16), drawn(6, 32, seed=3, dtype=residual_dtype)
    y, stream = norm(x, residual)
    assert torch.equal(stream, (x.float() + residual.float()).to(residual_dtype))
    assert y.dtype == BF16
    # The norm reads the stream as it was rounded: so the same bits, in a type that holds them.
    assert torch.equal(y, plain(stream.float()).to(BF16))


def test_add_rms_norm_begins_a_stream():
    x = drawn(6, 32, dtype=BF16)
    y, stream = AddRMSNorm(32, dtype=BF16)(x)
    assert stream is x
    wide = AddRMSNorm(32, dtype=BF16, residual_dtype=F32)
    y_wide, stream = wide(x, None)
    assert stream.dtype == F32 and y_wide.dtype == BF16
    assert torch.equal(stream, x.float()) and torch.equal(y, y_wide)
    with pytest.raises(ValueError, match="residual_dtype"):
        wide(x, x)


@pytest.mark.parametrize("groups, position", [(1, "post"), (4, "pre"), (4, "post")])
def test_gated_rms_norm_is_mamba_2s(position, groups):
    options = {"groups": groups, "gate_position": position, "dtype": F64}
    norm = with_random_parameters(GatedRMSNorm(32, **options))
    x, gate = drawn(6, 5, 32, dtype=F64), drawn(6, 5, 32, seed=3, dtype=F64)

    def of_groups(x):
        rows = x.unflatten(-1, (groups, -1))
        return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2)

    g = torch.nn.functional.silu(gate)
    normalised = of_groups(x * g) if position == "pre" else of_groups(x) * g
    assert_near(norm(x, gate).detach(), (normalised * norm.weight).detach())
    assert_near(norm(x).detach(), (of_groups(x) * norm.weight).detach())


@pytest.mark.parametrize(
    "made, said",
    [
        (RMSNorm(8, weight_offset=1.0, round_before_weight=True), "weight_offset=1.0, round_"),
        (GroupNorm(2, 8, activation="relu"), "activation='relu'"),
        (AddRMSNorm(8, residual_dtype=F32), "residual_dtype=torch.float32"),
        (GatedRMSNorm(8, groups=2, gate_activation="sigmoid", gate_position="pre"), "groups=2, "),
    ],
)
def test_what_changes_a_module_is_in_its_copy_and_is_said(made, said):
    """As defaults are the class's, a state without them is that of a module of torch.nn."""
    assert said in repr(made)
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert repr(again) == repr(made)
