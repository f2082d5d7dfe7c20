# SPDX-License-Identifier: MIT
"""replace_norms with fuse_activations, on blocks like those of diffusers."""

import copy
import functools
import pickle

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from cunorm.torch import replace_norms, restore_norms  # noqa: E402
from tests.support.torch_norms import BF16, F64, assert_near, drawn, results  # noqa: E402

CHANNELS = 8
IMAGE, STEP = (2, CHANNELS, 5, 7), (2, CHANNELS)


class Wrapped(torch.Tensor):
    """A tensor with operators of its own, whose results are plain tensors."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


def noted(forward):
    """Decorate a forward, as diffusers does."""

    @functools.wraps(forward)
    def wrapped(self, *given, **named):
        self.notes = [*getattr(self, "notes", []), len(given)]
        return forward(self, *given, **named)

    return wrapped


class Block(nn.Module):
    """A block whose activation also serves the time embedding, like diffusers' ResnetBlock2D."""

    def __init__(self, time_embedding_norm="default", act=None):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, CHANNELS), nn.GroupNorm(4, CHANNELS)
        self.conv1, self.conv2 = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        scale_shift = time_embedding_norm == "scale_shift"
        self.time_emb_proj = nn.Linear(CHANNELS, CHANNELS * (1 + scale_shift))
        self.nonlinearity, self.dropout = act or nn.SiLU(), nn.Dropout(0.0)
        self.time_embedding_norm = time_embedding_norm
        self.output_scale_factor = 1.5

    def forward(self, input_tensor: torch.Tensor, temb: torch.Tensor = None, *args, **kwargs):
        """Return the sum of x and the branch."""
        hidden_states = input_tensor

        hidden_states = self.norm1(hidden_states)
        hidden_states = self.nonlinearity(hidden_states)
        hidden_states = self.conv1(hidden_states)

        if temb is not None:
            temb = self.nonlinearity(temb)
            temb = self.time_emb_proj(temb)[:, :, None, None]

        if self.time_embedding_norm == "default":
            if temb is not None:
                hidden_states = hidden_states + temb
            hidden_states = self.norm2(hidden_states)
        elif self.time_embedding_norm == "scale_shift":
            time_scale, time_shift = torch.chunk(temb, 2, dim=1)
            hidden_states = self.norm2(hidden_states)
            hidden_states = hidden_states * (1 + time_scale) + time_shift
        else:
            hidden_states = self.norm2(hidden_states)

        hidden_states = self.nonlinearity(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.conv2(hidden_states)
        return (input_tensor + hidden_states) / self.output_scale_factor


class Decoder(nn.Module):
    """The end of diffusers' decoder; its norm may take two arguments."""

    def __init__(self):
        super().__init__()
        self.conv_norm_out, self.conv_act = nn.GroupNorm(2, CHANNELS), nn.SiLU()

    @noted
    def forward(self, sample, latent_embeds=None):
        if latent_embeds is None:
            sample = self.conv_norm_out(sample)
        else:
            sample = self.conv_norm_out(sample, latent_embeds)
        sample = self.conv_act(sample)
        return sample


def make(*options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        block = Block(*options)
        with torch.no_grad():
            for seed, norm in enumerate((block.norm1, block.norm2)):
                norm.weight.copy_(drawn(CHANNELS, seed=10 + seed))
                norm.bias.copy_(drawn(CHANNELS, seed=20 + seed))
    return block


def given(dtype=torch.float32):
    return drawn(*IMAGE, dtype=dtype), drawn(*STEP, seed=1, dtype=dtype)


def fused(model, **options):
    """Fuse, and return by the names of norms what the report says was fused with them."""
    done = replace_norms(model, fuse_activations=True, **options)
    parts = {one.name: one.runs.partition("; fused with ")[2] for one in done.replaced}
    return {name: text for name, text in parts.items() if text}


def counted(patch):
    """Return a list to which each call of a SiLU module adds the number of axes of its x."""
    calls, silu = [], nn.SiLU.forward
    patch.setattr(nn.SiLU, "forward", lambda m, x: calls.append(x.dim()) or silu(m, x))
    return calls


SILU = "nonlinearity as activation=silu"


@pytest.mark.parametrize("kind", ["default", "scale_shift"])
def test_a_block_with_fused_activations_has_the_same_results_and_gradients(kind, monkeypatch):
    block = make(kind)
    exact = results(copy.deepcopy(block).to(F64), *given(F64))
    assert fused(block) == {"norm1": SILU, "norm2": SILU}
    calls = counted(monkeypatch)
    for one, right in zip(results(block, *given()), exact, strict=True):
        assert_near(one, right)
    # Of the activation's three calls, that of the time embedding remains; with a scale and a shift,
    # also that after them.
    assert calls == ([2, 4] if kind == "scale_shift" else [2])


def test_a_decorated_forward_with_branches_is_fused_and_stays_decorated():
    model, x = Decoder(), drawn(*IMAGE)
    expected = model(x)
    assert fused(model) == {"conv_norm_out": "conv_act as activation=silu"}
    torch.testing.assert_close(model(x), expected)
    assert model.notes == [1, 1]
    with pytest.raises(TypeError):  # from the norm, which takes one argument
        model(x, x)


DECORATED = []


def listed(forward):
    """Decorate a forward with itself, and note its name."""
    DECORATED.append(forward.__name__)
    return forward


class Listed(Decoder):
    @listed
    def forward(self, sample, *, scale: float = 1.0):
        sample = self.conv_norm_out(sample)
        sample = self.conv_act(sample)
        return sample * scale


ORIGINAL = Listed.forward


@functools.wraps(ORIGINAL)
def around_a_global(self, sample):
    return ORIGINAL(self, sample) + 1


def test_wrappers_from_outside_of_a_forwards_source_stay(monkeypatch):
    x, original = drawn(*IMAGE), Listed.forward

    @functools.wraps(original)
    def shifted(self, sample):
        return original(self, sample) + 1

    shifted_quietly = torch.no_grad()(shifted)
    for forward in (shifted, shifted_quietly, torch.no_grad()(original), around_a_global):
        monkeypatch.setattr(Listed, "forward", forward)
        model = Listed()
        expected = model(x)
        assert bool(fused(model)) == (forward is not around_a_global)
        torch.testing.assert_close(model(x), expected)
        assert model(x).requires_grad == expected.requires_grad
    assert DECORATED == ["forward"]


def test_only_the_norms_of_blocks_are_fused_and_only_if_asked():
    block = make()
    assert all("fused" not in one.runs for one in replace_norms(block).replaced)
    assert type(block) is Block
    assert not fused(block)  # its norms run cunorm already
    with pytest.raises(TypeError, match="fuse_activations is 1, expected True or False"):
        replace_norms(block, fuse_activations=1)


def test_a_fused_block_is_copied_pickled_and_restored():
    model = nn.Sequential(make(), make("scale_shift"))
    state, x = list(model.state_dict()), given()
    expected = model[0](*x)
    fused(model)
    y = model[0](*x)
    assert list(model.state_dict()) == state and isinstance(model[0], Block)
    assert type(model[0]).__name__ == "Block"  # diffusers saves the names of classes
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied[0]) is type(model[0]) is not Block
        assert torch.equal(copied[0](*x), y)
        assert restore_norms(copied) == 4 and type(copied[0]) is Block
    assert not replace_norms(model).replaced
    assert {one.kind for one in replace_norms(model).left} == {"CunormGroupNorm"}
    assert restore_norms(model) == 4
    assert type(model[0]) is Block and torch.equal(model[0](*x), expected)


@pytest.mark.parametrize("name", ["norm1", "nonlinearity"])
def test_hooks_on_a_norm_or_an_activation_see_the_norms_result(name):
    block, seen = make(), []
    own = copy.deepcopy(block)
    fused(block)
    module = getattr(block, name)
    module.register_forward_hook(lambda _, x, y: seen.append(y if name == "norm1" else x[0]))
    torch.testing.assert_close(block(*given()), own(*given()))
    torch.testing.assert_close(seen[0], own.norm1(given()[0]))


@pytest.mark.parametrize("name", ["norm1", "nonlinearity"])
def test_a_forward_that_is_set_on_a_norm_or_an_activation_later_runs(name):
    block = make()
    own = copy.deepcopy(block)
    fused(block)
    for one in (block, own):
        getattr(one, name).forward = torch.tanh
    torch.testing.assert_close(block(*given()), own(*given()))


def test_hooks_of_all_modules_see_the_norms_and_the_activations():
    block, seen = make(), []
    fused(block)
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        block(*given())
    finally:
        hook.remove()
    assert seen.count("CunormGroupNorm") == 2 and seen.count("SiLU") == 3


def test_a_setting_of_an_activation_that_changes_later_takes_effect():
    block = make("default", nn.GELU())
    own = copy.deepcopy(block)
    assert fused(block)
    block.nonlinearity.approximate = own.nonlinearity.approximate = "tanh"
    torch.testing.assert_close(block(*given()), own(*given()), atol=1e-6, rtol=1e-5)


def test_another_activation_or_norm_that_is_set_later_runs():
    block = make()
    fused(block)
    own = make()
    for changed in (block, own):
        changed.nonlinearity = nn.Tanh()
    torch.testing.assert_close(block(*given()), own(*given()))
    for changed in (block, own):
        changed.nonlinearity, changed.norm1 = nn.SiLU(), nn.Identity()
    torch.testing.assert_close(block(*given()), own(*given()))


def test_a_norm_that_cannot_run_cunorm_runs_itself_before_the_activation(monkeypatch):
    block, (x, step) = make(), given()
    expected = block(x, step)
    fused(block)
    calls = counted(monkeypatch)
    torch.testing.assert_close(block(Wrapped(x), step), expected)
    assert calls == [4, 2]  # norm1 got a tensor with operators of its own, norm2 its plain result
    with pytest.raises(RuntimeError, match="divisible by num_groups"):
        block(torch.ones(2, CHANNELS + 1, 5, 7))


def test_exact_fuses_only_activations_that_commute_with_a_rounding():
    assert not fused(make(), exact=True)
    relu = "nonlinearity as activation=relu"
    block = make("default", nn.ReLU()).to(BF16)
    expected = block(*given(BF16))
    assert fused(block, exact=True) == {"norm1": relu, "norm2": relu}
    assert torch.equal(block(*given(BF16)), expected)


def test_a_fused_block_compiles_as_one_graph():
    block = make()
    fused(block)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for one, other in zip(results(compiled, *given()), results(block, *given()), strict=True):
        torch.testing.assert_close(one, other)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.act, self.other = nn.GroupNorm(2, CHANNELS), nn.SiLU(), nn.Identity()


class ReadLater(Base):
    """The norm's result has a name of its own, and is read again."""

    def forward(self, x):
        h = self.norm(x)
        y = self.act(h)
        return y + h


class OtherStatement(Base):
    def forward(self, x):
        x = self.norm(x)
        x = x * 2
        x = self.act(x)
        return x


class OtherArgument(Base):
    def forward(self, x):
        y = x
        x = self.norm(x)
        x = self.act(y)
        return x


class OtherTarget(Base):
    def forward(self, x):
        h = self.norm(x)
        x = self.act(x)
        return x + h


class Shared(Base):
    """The name of the norm's result is one that another function may read."""

    def forward(self, x):
        global RESULT
        RESULT = self.norm(x)
        RESULT = self.act(RESULT)
        return RESULT


class Nested(Base):
    """A function inside of forward, whose self is another object."""

    def forward(self, x):
        def run(self, x):
            x = self.norm(x)
            x = self.act(x)
            return x

        return run(self, x)


class WithSuper(Base):
    def forward(self, x):
        x = self.norm(x)
        x = self.act(x)
        return x + len(super().__repr__()) * 0


class ChangedSelf(Base):
    def forward(self, x):
        self = self.other
        x = self.norm(x)
        x = self.act(x)
        return x


class InOneExpression(Base):
    def forward(self, x):
        x = self.act(self.norm(x))
        return x


@pytest.mark.parametrize(
    "kind",
    [
        ReadLater,
        OtherStatement,
        OtherArgument,
        OtherTarget,
        Shared,
        Nested,
        WithSuper,
        ChangedSelf,
        InOneExpression,
    ],
)
def test_blocks_in_which_other_code_may_read_the_norms_result_are_not_fused(kind):
    block = kind()
    if kind is ChangedSelf:
        block.other = Base()
    own = copy.deepcopy(block)
    assert not fused(block) and type(block) is kind
    torch.testing.assert_close(block(drawn(*IMAGE)), own(drawn(*IMAGE)))


def test_a_forward_that_its_source_does_not_define_is_not_fused(monkeypatch):
    def changed(self, *given):
        raise NotImplementedError

    code = Block.forward.__code__
    consts = tuple("other" if one == "scale_shift" else one for one in code.co_consts)
    changed.__code__, changed.__name__ = code.replace(co_consts=consts), "forward"
    for forward in (changed, lambda self, x, temb=None: self.norm1(x)):
        monkeypatch.setattr(Block, "forward", forward)
        assert not fused(make())
    namespace = {"Base": Base}
    source = "class Typed(Base):\n    def forward(self, x):\n        x = self.norm(x)\n"
    exec(f"{source}        x = self.act(x)\n        return x", namespace)
    assert not fused(namespace["Typed"]())


@pytest.mark.parametrize(
    "act", [nn.Hardswish(), nn.Identity(), nn.PReLU(), nn.Dropout(0.5), nn.Linear(7, 7)]
)
def test_other_submodules_after_a_norm_are_not_fused(act):
    block = make("default", act)
    assert not fused(block) and type(block) is Block


def test_norms_of_other_kinds_are_not_fused():
    block = make()
    block.norm1, block.norm2 = nn.LayerNorm(7), nn.BatchNorm2d(CHANNELS)
    assert not fused(block) and type(block) is Block


class Unwritten(Decoder):
    pass


class Sealed(Base):
    """A block whose class refuses subclasses."""

    def __init_subclass__(cls):
        raise TypeError("sealed")

    def forward(self, x):
        x = self.norm(x)
        x = self.act(x)
        return x


def test_a_block_that_cannot_get_another_class_is_not_reported_as_fused(monkeypatch):
    block = Sealed()
    assert not fused(block) and type(block) is Sealed
    monkeypatch.setattr("cunorm.torch._replace.swap.rewritten", lambda *_: None)
    block = Unwritten()
    assert not fused(block) and type(block) is Unwritten
