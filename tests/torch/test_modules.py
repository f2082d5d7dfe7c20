# SPDX-License-Identifier: MIT
"""The modules of cunorm.torch are those of torch.nn in all but the forward."""

from __future__ import annotations

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.nn.utils import parametrize  # noqa: E402

from cunorm.torch import AddRMSNorm, GatedRMSNorm, GroupNorm, LayerNorm, RMSNorm  # noqa: E402
from tests.support.torch_modules import (  # noqa: E402
    BF16,
    F16,
    F32,
    F64,
    assert_near,
    drawn,
    with_random_parameters,
)

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
    assert len(found) == len(exact)
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
def test_parameters_and_state_are_those_of_torchs_module(name):
    ours, theirs, _ = pair(name)
    assert isinstance(ours, type(theirs))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    shapes = [(key, p.shape, p.dtype) for key, p in theirs.named_parameters()]
    assert [(key, p.shape, p.dtype) for key, p in ours.named_parameters()] == shapes
    assert repr(ours) == repr(theirs)
    assert vars(ours).keys() - vars(theirs).keys() <= {
        "activation",
        "round_before_weight",
        "weight_offset",
    }


def test_new_parameters_are_those_of_torchs_module():
    for kind, args, options, _ in MODULES.values():
        new = zip(
            kind(*args, **options).parameters(),
            getattr(torch.nn, kind.__name__)(*args, **options).parameters(),
            strict=True,
        )
        assert all(torch.equal(ours, theirs) for ours, theirs in new)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_gives_the_same(name, copied):
    ours, _, x = pair(name)
    if copied == "torch.save":
        torch.save(ours, file := io.BytesIO())
        file.seek(0)
        again = torch.load(file, weights_only=False)
    else:
        again = copy.deepcopy(ours) if copied == "deepcopy" else pickle.loads(pickle.dumps(ours))
    assert torch.equal(again(x), ours(x))


@pytest.mark.parametrize("name", MODULES)
def test_one_built_on_meta_and_filled_gives_the_same(name):
    kind, args, options, _ = MODULES[name]
    ours, _, x = pair(name)
    empty = kind(*args, **options, device="meta", dtype=F32)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu").load_state_dict(ours.state_dict())
    assert torch.equal(empty(x), ours(x))


def test_parameters_may_be_of_another_dtype_than_x():
    ours, theirs, x = pair("LayerNorm")
    y = ours(x.to(BF16))
    assert y.dtype == BF16
    assert_near(y.detach(), theirs.double()(x.to(BF16).double()).detach())
    assert torch.equal(ours.half()(x.to(BF16)), LayerNorm.forward(ours, x.to(BF16)))
    assert ours.weight.dtype == F16


def test_a_parametrized_weight_is_read_anew():
    class Doubled(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    ours, theirs, x = pair("RMSNorm")
    for module in (ours, theirs):
        parametrize.register_parametrization(module, "weight", Doubled())
    expected = theirs.double()(x.double()).detach()
    assert_near(ours(x).detach(), expected)
    parametrize.remove_parametrizations(ours, "weight")
    assert type(ours) is RMSNorm
    assert_near(ours(x).detach(), expected)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm of two axes", "GroupNorm"])
def test_torch_compile_takes_a_module_whole(name):
    ours, _, x = pair(name)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(results(compiled, x), results(ours, x), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "made, x, message",
    [
        (RMSNorm((3, 8)), (6, 8), r"RMSNorm: x has shape \(6, 8\), .* normalized_shape, \(3, 8\)"),
        (LayerNorm(8), (8, 6), r"LayerNorm: x has shape \(8, 6\), .* normalized_shape, \(8,\)"),
        (RMSNorm(8, elementwise_affine=False), (8, 1), r"normalized_shape, \(8,\)"),
        (AddRMSNorm(8), (8, 6), r"AddRMSNorm: x has shape"),
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
