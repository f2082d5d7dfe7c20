# SPDX-License-Identifier: MIT
"""cunorm.torch's norms with quantised results, in all modes of torch."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest

import cunorm

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.library import opcheck  # noqa: E402

import cunorm.torch as ct  # noqa: E402
from tests.support.torch_cases import Watch, assert_same  # noqa: E402
from tests.support.torch_norms import BF16, F32, drawn  # noqa: E402

# PyTorch warns when it traces
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

WIDTH, GROUPS, BLOCK = 96, 2, 32  # the last block of a group is shorter
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {INT8: 127.0, E4M3: 448.0, E5M2: 57344.0}
LEAST = {INT8: 2.0**-23, E4M3: 1 / (448 * 512), E5M2: 1 / (448 * 512)}
E8M0 = getattr(torch, "float8_e8m0fnu", None)  # from PyTorch 2.7
CASES = {  # the function, its operands besides x, and its options
    "e4m3": ("rms_norm_quantized", "weight", {}),
    "e5m2": (
        "rms_norm_quantized",
        "weight",
        {"axis": 1, "residual_dtype": F32, "dtype": "float8_e5m2"},
    ),
    "int8": (
        "normalize_quantized",
        "weight",
        {"c": WIDTH**0.5, "dtype": INT8, "return_y": True},  # this c makes it an RMS norm
    ),
    "a given scale": ("rms_norm_quantized", "weight scale", {"dtype": E4M3}),
}
if E8M0 is not None:
    options = {"groups": GROUPS, "block": BLOCK, "scale_dtype": E8M0, "return_y": True}
    CASES["MXFP8"] = ("layer_norm_quantized", "residual weight", options)
each_case = pytest.mark.parametrize("name", CASES)


def case(name, module=ct, rows=3):
    """Return a function of tensors that returns the tensors of a result, and its arguments."""
    function, operands, options = CASES[name]
    x = drawn(rows, 4, WIDTH)
    x[0] = 0.0
    weight = drawn(*x.shape[options.get("axis", -1) :], seed=1)
    given = {"x": x, "weight": weight, "scale": drawn(rows, 4, 1, seed=2).abs() / 100}
    if name == "MXFP8":
        given |= {"x": x.to(BF16), "residual": x + x}
    names = ["x", *operands.split()]

    def call(*tensors):
        found = getattr(module, function)(**dict(zip(names, tensors, strict=True)), **options)
        return tuple(one for one in found if one is not None)

    return call, [given[name] for name in names]


# --- the numbers ----------------------------------------------------------------------------------


def parts_of(y, options):
    """Return the columns that share a scale."""
    if options.get("axis", -1) != -1:
        return [y.flatten(options["axis"])]
    groups = y.chunk(options.get("groups", 1), -1)
    return [part for one in groups for part in one.split(options.get("block", WIDTH), -1)]


def found_scale(part, dtype, options):
    a = part.abs().amax(-1, keepdim=True)
    if "block" not in options:
        return (a / LARGEST[dtype]).clamp(min=LEAST[dtype])
    fraction, exponent = torch.frexp(a)
    of_largest = torch.frexp(torch.tensor(LARGEST[dtype]))
    power = exponent - of_largest.exponent + (fraction > of_largest.mantissa)
    return torch.exp2(torch.where(a > 0, power, -127).double()).float()


def quantized(y, scale, dtype):
    if dtype is INT8:
        return (y * (1 / scale)).round().clamp(-127, 127).to(dtype)
    return (y / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


@each_case
def test_q_and_scale_are_those_of_torchs_own_operations_on_the_norm(name):
    (call, (x, *rest)), (_, operands, options) = case(name), CASES[name]
    given = dict(zip(operands.split(), rest, strict=True))
    scale = given.pop("scale", None)
    if name == "MXFP8":
        y = ct.add_layer_norm(x, **given, groups=GROUPS).y
    else:
        y = ct.rms_norm(x, **given, axis=options.get("axis", -1))
    dtype = getattr(torch, str(options.get("dtype", E4M3)).removeprefix("torch."))
    parts = parts_of(y.float(), options)
    scales = [found_scale(one, dtype, options) if scale is None else scale for one in parts]
    codes = [quantized(one, own, dtype) for one, own in zip(parts, scales, strict=True)]
    q, found, *others = call(x, *rest)
    assert_same([q], [torch.cat(codes, -1).reshape(x.shape)])
    own = torch.cat(scales, -1)
    own = own[..., None] if name == "e5m2" else own
    assert_same([found], [own if found.dtype is F32 else own.to(E8M0)])
    if options.get("return_y"):
        assert_same(others[:1], [y])


@pytest.mark.parametrize("scale", [0.02, torch.tensor(0.02), torch.full((3, 4, 1), 0.02)])
def test_a_given_scale_is_returned_and_may_be_one_number(scale):
    _, (x, weight) = case("e4m3")
    found = ct.rms_norm_quantized(x, weight, scale=scale)
    assert found.scale is scale and found.y is None and found.residual is None
    number = torch.tensor(0.02).expand(3, 4, 1)
    assert_same([found.q], [ct.rms_norm_quantized(x, weight, scale=number).q])
    with Watch():
        assert ct.rms_norm_quantized(x, weight, scale=scale).scale is scale


# --- modes ----------------------------------------------------------------------------------------


def within(mode, call, tensors):
    with mode:
        return call(*(one.requires_grad_() for one in tensors))


def watched(call, tensors):
    with Watch() as watch:
        found = call(*tensors)
    assert [operator.name() for operator, _ in watch.seen] == ["cunorm::row_quantized"]
    return found


class Trivial(torch.Tensor):
    """A tensor class that adds nothing."""


def of_a_class(call, tensors):
    found = call(*(one.as_subclass(Trivial) for one in tensors))
    assert {type(one) for one in found} == {Trivial}
    return [one.as_subclass(torch.Tensor) for one in found]


def traced(trace, call, tensors):
    """Trace a call with other numbers."""
    return trace(call, *(one / 2 for one in tensors))(*tensors)


def exported(call, tensors):
    """Export a call of another number of rows."""

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return call(*tensors)

    rows = torch.export.Dim("rows", min=2)
    larger = [torch.cat([one, one]) if one.shape[0] == 3 else one for one in tensors]
    dynamic = tuple({0: rows} if one.shape[0] == 6 else {} for one in larger)
    program = torch.export.export(Module(), tuple(larger), dynamic_shapes=(dynamic,))
    assert "cunorm.row_quantized" in str(program.graph)
    return program.module()(*tensors)


def jit(call, *tensors):
    return torch.jit.trace(call, tensors)


MODES = {
    "no_grad": partial(within, torch.no_grad()),
    "inference mode": partial(within, torch.inference_mode()),
    "an operator": watched,
    "a tensor class": of_a_class,
    "torch.jit.trace": partial(traced, jit),
    "make_fx": partial(traced, lambda call, *tensors: make_fx(call)(*tensors)),
    "export": exported,
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_bits_of_a_plain_call(mode):
    for name in CASES:
        call, tensors = case(name)
        expected, (plain, _) = call(*tensors), case(name, cunorm)
        assert_same(plain(*tensors), expected)
        assert_same(MODES[mode](call, tensors), expected)


@pytest.mark.parametrize("mode", [nullcontext, Watch, FakeTensorMode])
def test_x_is_the_new_stream_where_nothing_is_added(mode):
    with mode():
        x = torch.ones(3, 8)
        options = {"residual_dtype": F32, "dtype": INT8, "return_y": True}
        found = ct.rms_norm_quantized(x, torch.ones(8), **options)
        assert found.residual is x


@each_case
def test_the_operator_keeps_its_promises(name):
    call, (x, *rest) = case(name)
    with Watch() as watch:
        call(x.transpose(0, 1).contiguous().transpose(0, 1), *rest)
    ((operator, arguments),) = watch.seen
    opcheck(operator, arguments)


@pytest.mark.parametrize("mode", ["fake", "meta"])
def test_results_without_memory_have_the_dtypes_and_strides_of_results(mode):
    for name in CASES:
        call, tensors = case(name)
        with FakeTensorMode() if mode == "fake" else nullcontext() as fakes:
            given = [fakes.from_tensor(t) if fakes else t.to("meta") for t in tensors]
            found = call(*given)
        for one, real in zip(found, call(*tensors), strict=True):
            assert (one.shape, one.dtype, one.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.filterwarnings("ignore:Skipping serialization")  # of early versions of PyTorch
def test_calls_compiled_into_one_graph_have_the_bits_of_eager_calls(inductor):
    calls = [case(name)[0] for name in CASES]

    def every_case(given):
        (x, *rest), *others = given
        given = (x + x, *rest), *others  # inductor computes the first x
        return [call(*tensors) for call, tensors in zip(calls, given, strict=True)]

    def given(rows):
        return [case(name, rows=rows)[1] for name in CASES]

    compiled = torch.compile(every_case, fullgraph=True, dynamic=True)
    found = {3: compiled(given(3))}
    with torch.compiler.set_stance("fail_on_recompile"):
        found[10] = compiled(given(10))
    for rows, results in found.items():
        for mine, its in zip(results, every_case(given(rows)), strict=True):
            assert_same(mine, its)


def test_the_number_of_a_compiled_call_may_change():
    def call(x, weight, scale):
        return ct.rms_norm_quantized(x, weight, scale=scale, groups=x.shape[-1] // WIDTH)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for scale, rows in ((0.01, 3), (0.02, 3), (3, 5), (0.5, 5)):
        given = drawn(rows, WIDTH), drawn(WIDTH, seed=1), scale
        q, found, *_ = compiled(*given)
        assert found == scale
        assert_same([q], call(*given)[:1])


def symbolic(call, *tensors):
    return make_fx(call, tracing_mode="symbolic")(*tensors)


@pytest.mark.parametrize("trace", [jit, symbolic])
def test_numbers_may_follow_from_a_traced_shape_and_a_scale_may_be_a_traced_number(trace):
    def of_sizes(x, weight):
        c, scale = x.shape[-1] / 4, x.shape[0] / 100
        return ct.normalize_quantized(x, weight, c=c, scale=scale, groups=x.shape[-1] // WIDTH).q

    def of_tensor(x, weight, scale):
        return ct.rms_norm_quantized(x, weight, scale=scale).q

    x, weight = case("e4m3")[1]
    for call, tensors in (of_sizes, (x, weight)), (of_tensor, (x, weight, torch.tensor(0.1))):
        assert_same([traced(trace, call, tensors)], [call(*tensors)])


# --- errors ---------------------------------------------------------------------------------------


def test_a_wrong_scale_is_an_error_in_every_mode():
    x = torch.ones(3, 8)
    wrong = (
        (x.numpy(), "is of type ndarray, expected a torch.Tensor: pass torch.as_tensor"),
        (-1, "is -1, expected a positive normal number of"),
    )
    for mode in (nullcontext, Watch, FakeTensorMode):
        for scale, text in wrong:
            with mode(), pytest.raises((TypeError, ValueError), match=f"zed: scale {text}"):
                ct.rms_norm_quantized(x, scale=scale)
    for device, verb in ("cpu", "has dtype"), ("meta", "is"):
        on_device = x.to(device)
        with pytest.raises(ValueError, match=r"^rms_norm_quantized: scale has layout .* a dense"):
            ct.rms_norm_quantized(on_device, scale=x.to_sparse())
        with pytest.raises(TypeError, match=f"^rms_norm_quantized: scale {verb} int32, expected"):
            ct.rms_norm_quantized(on_device, scale=on_device.int())
    with FakeTensorMode(), pytest.raises(ValueError, match=r"x has shape \(\), expected at least"):
        ct.rms_norm_quantized(torch.ones(()))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_dtype_that_this_torch_lacks_is_an_error(device, monkeypatch):
    monkeypatch.setattr("cunorm._arrays.torch.RESULT_DTYPES", {})
    x, weight = torch.ones(5, WIDTH, device=device), torch.ones(WIDTH, device=device)
    with pytest.raises(TypeError, match=r"torch .* has no such dtype, expected 2\.7 or later$"):
        ct.rms_norm_quantized(x, weight)
