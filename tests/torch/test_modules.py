# SPDX-License-Identifier: MIT
"""The modules of cunorm.torch: modules of torch.nn with another forward, and additions to them."""

import copy
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
functional = torch.nn.functional

from cunorm.torch import AddRMSNorm, GatedRMSNorm, GroupNorm, LayerNorm, RMSNorm  # noqa: E402
from tests.arguments.wrong_input import ACTIVATIONS, DTYPES  # noqa: E402
from tests.support.torch_norms import BF16, F16, F32, F64, assert_near, drawn, results  # noqa: E402

ROWS, IMAGES = (6, 5, 3, 8), (3, 12, 4, 5)

# By name: the module's class, its arguments, its options and x's shape.
MODULES = {
    "RMSNorm": (RMSNorm, (8,), {"eps": 1e-4, "dtype": F64}, ROWS),
    "RMSNorm of two axes": (RMSNorm, ((3, 8),), {"dtype": BF16}, ROWS),
    "RMSNorm without weight": (RMSNorm, ([8],), {"elementwise_affine": False}, ROWS),
    "LayerNorm": (LayerNorm, (8,), {"eps": 1e-4, "dtype": F64}, ROWS),
    "LayerNorm without bias": (LayerNorm, ((3, 8),), {"bias": False}, ROWS),
    "LayerNorm without parameters": (LayerNorm, (8,), {"elementwise_affine": False}, ROWS),
    "GroupNorm": (GroupNorm, (4, 12), {"eps": 1e-4}, IMAGES),
    "GroupNorm of vectors": (GroupNorm, (2, 12), {"dtype": F64}, IMAGES[:2]),
    "GroupNorm without parameters": (GroupNorm, (3, 12), {"affine": False}, IMAGES),
}


def with_random_parameters(module):
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=2 + number, dtype=F64))
    return module


def pair(name):
    """Return a module, torch.nn's module with the same random parameters, and x."""
    kind, args, options, shape = MODULES[name]
    ours = with_random_parameters(kind(*args, **options))
    theirs = getattr(torch.nn, kind.__name__)(*args, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, drawn(*shape, seed=1, dtype=options.get("dtype", F32))


@pytest.mark.parametrize("name", MODULES)
def test_results_and_gradients_are_those_of_torchs_module(name):
    ours, theirs, x = pair(name)
    if isinstance(ours, RMSNorm) and ours.eps is None:  # theirs.double() has another default
        ours.eps = theirs.eps = torch.finfo(F32).eps
    found, dy = results(ours, x), drawn(*x.shape, seed=5, dtype=x.dtype).double()
    for actual, expected in zip(found, results(theirs.double(), x.double(), dy=dy), strict=True):
        assert actual.dtype == x.dtype
        assert_near(actual, expected)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
def test_without_eps_a_norm_has_the_eps_of_the_installed_torch(dtype):
    x = torch.full((1, 4), 2.0**-12, dtype=dtype)  # its squares are below float32's epsilon
    y = RMSNorm(4, dtype=dtype)(x).detach()
    assert_near(y, torch.nn.RMSNorm(4, dtype=dtype)(x).detach().double())
    other = torch.nn.RMSNorm(4, eps=1e-6, dtype=dtype)(x)
    assert (y - other).abs().max() > 0.1 * y.abs().max()  # so the default eps matters


@pytest.mark.parametrize("name", MODULES)
def test_parameters_state_and_copies_are_those_of_torchs_module(name):
    ours, theirs, x = pair(name)
    assert isinstance(ours, type(theirs))
    ours.load_state_dict(theirs.state_dict())
    specs = [[(k, p.shape, p.dtype) for k, p in m.named_parameters()] for m in (ours, theirs)]
    assert specs[0] == specs[1]
    assert repr(ours) == repr(theirs)
    own = {"activation", "round_before_weight", "weight_offset"}
    assert vars(ours).keys() - vars(theirs).keys() <= own

    kind, args, options, _ = MODULES[name]
    fresh = getattr(torch.nn, kind.__name__)(*args, **options).parameters()
    assert all(map(torch.equal, kind(*args, **options).parameters(), fresh))
    empty = kind(*args, **options, device="meta")
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu").load_state_dict(ours.state_dict())
    for copied in (empty, pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert torch.equal(copied(x), ours(x))


@pytest.mark.parametrize(
    "make, x, message",
    [
        (lambda: RMSNorm((3, 8)), (6, 8), r"RMSNorm: x has shape \(6, 8\), .* \(3, 8\)"),
        (lambda: LayerNorm(8), (8, 6), r"LayerNorm: x has shape \(8, 6\), .* \(8,\)"),
        (lambda: AddRMSNorm(8), (8, 1), r"AddRMSNorm: x has shape"),
        (lambda: GatedRMSNorm(8), (8, 6), r"GatedRMSNorm: x has shape"),
        (lambda: GroupNorm(2, 8), (3, 6, 8), r"GroupNorm: x .* num_channels is 8"),
        (lambda: GroupNorm(2, 8), (8,), r"GroupNorm: x has shape \(8,\), expected \(N, 8, ...\)"),
    ],
)
def test_a_shape_that_does_not_fit_is_an_error_that_names_the_modules_argument(make, x, message):
    with pytest.raises(ValueError, match=message):
        make()(torch.ones(x))


NUMBER, AT_LEAST = "expected a number", "expected a finite number of at least 0"
SIZES = "expected one axis or more, of at least one element each"
ACTIVATION = f"expected {ACTIVATIONS}"
KEYWORD = "an activation is a keyword, activation='silu'"
WRONG = {  # by the message without the class: the class, its arguments and its options
    f"normalized_shape is (), {SIZES}": (RMSNorm, ((),), {}),
    f"normalized_shape is (3, 0), {SIZES}": (LayerNorm, ((3, 0),), {}),
    "normalized_shape is '8', expected an int": (LayerNorm, ("8",), {}),
    "normalized_shape is 8.0, expected an int": (RMSNorm, ((2, 8.0),), {}),
    "normalized_shape is True, expected an int": (AddRMSNorm, (True,), {}),
    "dtype is 'float32', expected a torch.dtype": (LayerNorm, (8,), {"dtype": "float32"}),
    f"eps is '1e-5', {NUMBER}": (RMSNorm, (8, "1e-5"), {}),
    f"eps is None, {NUMBER}": (LayerNorm, (8, None), {}),
    f"eps is True, {NUMBER}": (GroupNorm, (2, 8, True), {}),
    f"eps is -1.0, {AT_LEAST}": (GatedRMSNorm, (8, -1.0), {}),
    f"eps is 'silu', {NUMBER}: {KEYWORD}": (GroupNorm, (32, 64, "silu"), {}),
    f"affine is 'silu', expected True or False: {KEYWORD}": (GroupNorm, (32, 64, 1.0, "silu"), {}),
    "num_groups is 0, expected at least 1": (GroupNorm, (0, 8), {}),
    "num_groups is 3, expected a divisor of num_channels, 64": (GroupNorm, (3, 64), {}),
    "elementwise_affine is 'no', expected True or False": (LayerNorm, (8, 1.0, "no"), {}),
    "elementwise_affine is 'silu', expected True or False": (GatedRMSNorm, (8, 1.0, "silu"), {}),
    "bias is 'no', expected True or False": (LayerNorm, (8,), {"bias": "no"}),
    "bias is 1, expected True or False": (GroupNorm, (2, 8), {"bias": 1}),
    "bias is 0, expected True or False": (AddRMSNorm, (8,), {"bias": 0}),
    "elementwise_affine is 0.1, expected True or False": (RMSNorm, (8, 1e-6, 0.1), {}),
    f"dtype is int32, expected {DTYPES}": (AddRMSNorm, (8,), {"dtype": torch.int32}),
    "num_groups is 2.0, expected an int": (GroupNorm, (2.0, 8), {}),
    "num_channels is -8, expected at least 1": (GroupNorm, (2, -8), {}),
    f"activation is 'relu6', {ACTIVATION}": (GroupNorm, (2, 8), {"activation": "relu6"}),
    f"gate_activation is None, {ACTIVATION}": (GatedRMSNorm, (8,), {"gate_activation": None}),
    "gate_position is 'before', expected 'pre' or 'post'": (
        *(GatedRMSNorm, (8,), {"gate_position": "before"}),
    ),
    "groups is 3, expected a divisor of 8 as normalized_shape is (8,)": (
        *(GatedRMSNorm, (8,), {"groups": 3}),
    ),
    "groups is 2, expected 1 as normalized_shape is (2, 8)": (
        *(GatedRMSNorm, ((2, 8),), {"groups": 2}),
    ),
    f"weight_offset is '1', {NUMBER}": (RMSNorm, (8,), {"weight_offset": "1"}),
    "round_before_weight is 1, expected True or False": (
        *(RMSNorm, (8,), {"round_before_weight": 1}),
    ),
    f"residual_dtype is 'fp8', expected {DTYPES}": (AddRMSNorm, (8,), {"residual_dtype": "fp8"}),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_argument_is_an_error_when_the_module_is_made(text):
    kind, args, options = WRONG[text]
    with pytest.raises((TypeError, ValueError)) as caught:
        kind(*args, **options)
    assert str(caught.value) == f"{kind.__name__}: {text}"


def test_sizes_may_have_the_forms_that_torch_accepts():
    for shape in (8, np.int64(8), [8], torch.Size([8]), iter([8]), np.array([8])):
        assert LayerNorm(shape).normalized_shape == (8,)


# --- additions to torch.nn ------------------------------------------------------------------------


def test_weight_offset_is_gemmas_and_a_new_weight_counts_as_one():
    x = drawn(6, 32, dtype=F64)
    new = RMSNorm(32, eps=1e-6, dtype=F64, weight_offset=1.0)
    assert (new.weight == 0).all()
    assert_near(new(x).detach(), functional.rms_norm(x, (32,), eps=1e-6))
    with torch.no_grad():
        new.weight.copy_(drawn(32, seed=2))
    assert_near(new(x).detach(), functional.rms_norm(x, (32,), 1 + new.weight, 1e-6).detach())
    plain = RMSNorm(32, eps=1e-6, elementwise_affine=False, weight_offset=1.0)
    assert_near(plain(x), functional.rms_norm(x, (32,), eps=1e-6))


@pytest.mark.parametrize("kind", [RMSNorm, AddRMSNorm, GatedRMSNorm])
def test_a_bias_is_added_and_is_a_parameter_only_if_it_is_wanted(kind):
    options = {"eps": 1e-6, "dtype": F64}
    x, norm = drawn(6, 32, dtype=F64), kind(32, bias=True, **options)
    assert (norm.bias == 0).all() and "bias=True" in repr(norm)
    without = kind(32, **options)
    assert [*without.state_dict()] == ["weight"] and without.bias is None
    assert kind(32, elementwise_affine=False, bias=True).bias is None
    norm = with_random_parameters(norm)
    assert [*norm.state_dict()] == ["weight", "bias"]
    without.load_state_dict({"weight": norm.weight})
    y, plain = (one(x)[0] if kind is AddRMSNorm else one(x) for one in (norm, without))
    assert_near(y.detach(), (plain + norm.bias).detach())
    y.sum().backward()
    assert_near(norm.bias.grad, torch.full((32,), 6.0, dtype=F64))


@pytest.mark.parametrize("weight_dtype", [BF16, F32])
def test_round_before_weight_is_llamas_order_to_the_bit(weight_dtype):
    x = drawn(16, 32, dtype=BF16)
    options = {"eps": 1e-6, "dtype": weight_dtype, "round_before_weight": True}
    norm = with_random_parameters(RMSNorm(32, **options))
    expected = norm.weight * functional.rms_norm(x.float(), (32,), eps=1e-6).to(x.dtype)
    assert norm(x).dtype == expected.dtype
    # A number is within 2**-20 of a tie of bfloat16 with probability 2**-11.
    assert (norm(x) != expected).sum() <= 2
    norm.round_before_weight = False
    assert (norm(x) != expected).sum() > 50


def test_group_norm_with_an_activation_keeps_the_memory_format():
    norm = with_random_parameters(GroupNorm(4, 12, activation="silu"))
    x = drawn(*IMAGES).to(memory_format=torch.channels_last)
    y = norm(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    exact = functional.group_norm(x.double(), 4, norm.weight.double(), norm.bias.double())
    assert_near(y.detach(), functional.silu(exact).detach())


@pytest.mark.parametrize("residual_dtype", [F32, BF16])
def test_add_rms_norm_is_the_addition_and_then_the_norm(residual_dtype):
    norm = with_random_parameters(AddRMSNorm(32, eps=1e-6, dtype=BF16, weight_offset=1.0))
    plain = RMSNorm(32, eps=1e-6, weight_offset=1.0)
    plain.load_state_dict(norm.state_dict())
    x, residual = drawn(6, 32, dtype=BF16), drawn(6, 32, seed=3, dtype=residual_dtype)
    y, stream = norm(x, residual)
    assert torch.equal(stream, (x.float() + residual.float()).to(residual_dtype))
    assert y.dtype == BF16
    # The norm reads the rounded stream: the plain norm of that stream has the same bits.
    assert torch.equal(y, plain(stream.float()).to(BF16))


def test_add_rms_norm_begins_a_stream():
    x = drawn(6, 32, dtype=BF16)
    y, stream = AddRMSNorm(32, 1e-6, dtype=BF16)(x)
    assert stream is x
    wider = AddRMSNorm(32, 1e-6, dtype=BF16, residual_dtype=F32)
    y_wide, stream = wider(x, None)
    assert stream.dtype == F32 and y_wide.dtype == BF16
    assert torch.equal(stream, x.float()) and torch.equal(y, y_wide)
    assert torch.equal(wider(x, x).residual, 2 * x.float())


@pytest.mark.parametrize("residual_dtype", [F64, "float64"])
def test_without_eps_a_new_stream_has_the_eps_of_its_own_dtype(residual_dtype):
    x = torch.full((1, 8), 2.0**-12)  # its square is below float32's epsilon
    norm = AddRMSNorm(8, residual_dtype=residual_dtype)
    assert torch.equal(norm(x).y, norm(x, torch.zeros(1, 8, dtype=F64)).y)
    assert torch.equal(norm(x).y, norm(x, torch.zeros(1, 8)).y)


@pytest.mark.parametrize("residual", [np.zeros((1, 8), np.int64), [0.0]])
def test_without_eps_a_residual_that_is_no_tensor_is_named(residual):
    with pytest.raises(TypeError, match=r"^add_rms_norm: residual is of type \w+, expected"):
        AddRMSNorm(8)(torch.ones(1, 8), residual)


@pytest.mark.parametrize("groups, position", [(1, "post"), (4, "pre"), (4, "post")])
def test_gated_rms_norm_is_mamba_2s(position, groups):
    options = {"groups": groups, "gate_position": position, "dtype": F64}
    norm = with_random_parameters(GatedRMSNorm(32, **options))
    x, gate = drawn(6, 5, 32, dtype=F64), drawn(6, 5, 32, seed=3, dtype=F64)

    def group_rms_norm(x):
        rows = x.unflatten(-1, (groups, -1))
        return functional.rms_norm(rows, rows.shape[-1:], eps=1e-5).flatten(-2)

    g = functional.silu(gate)
    normalised = group_rms_norm(x * g) if position == "pre" else group_rms_norm(x) * g
    assert_near(norm(x, gate).detach(), (normalised * norm.weight).detach())
    assert_near(norm(x).detach(), (group_rms_norm(x) * norm.weight).detach())


@pytest.mark.parametrize(
    "module, text",
    [
        (RMSNorm(8, weight_offset=1.0, round_before_weight=True), "weight_offset=1.0, round_"),
        (GroupNorm(2, 8, activation="relu"), "activation='relu'"),
        (AddRMSNorm(8, residual_dtype=F32), "residual_dtype=torch.float32"),
        (GatedRMSNorm(8, groups=2, gate_activation="sigmoid", gate_position="pre"), "groups=2, "),
    ],
)
def test_options_of_a_module_are_in_its_copy_and_its_repr(module, text):
    assert text in repr(module)
    for copied in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert repr(copied) == repr(module)
