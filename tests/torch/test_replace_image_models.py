# SPDX-License-Identifier: MIT
"""replace_norms on small models of timm and diffusers with random weights."""

import copy
import importlib
import json
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cunorm.torch import replace_norms, restore_norms  # noqa: E402
from tests.support.torch_norms import BF16, F32, F64, drawn  # noqa: E402

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings(
        "ignore:Mismatch dtype between input and weight"
    ),  # of torch's norms
]


def efficientnet(norm, **options):
    layers = importlib.import_module("timm.layers")
    return {"norm_layer": partial(getattr(layers, norm), **options)}


# By name: the options of timm's create_model, the numbers of norms that are replaced and left, and
# what the reports say of the first norm. Those left are batch norms, and modules around norms.
TIMM = {
    "convnext_atto": (dict, 17, 1, "layer_norm(eps=1e-06, axis=(1,))"),
    "convnextv2_atto": (dict, 17, 25, "layer_norm(eps=1e-06, axis=(1,))"),
    "coatnext_nano_rw_224": (lambda: {"img_size": 64}, 27, 0, "then drop, act"),
    "resnet50_gn": (lambda: {"layers": (1, 1, 1, 1)}, 17, 0, "group_norm(32, eps=1e-05)"),
    "poolformer_s12": (dict, 25, 0, "group_norm(1, eps=1e-05)"),
    "efficientnet_lite0 GroupNormAct": (
        lambda: efficientnet("GroupNormAct", num_groups=8),
        49,
        0,
        "group_norm(8, eps=1e-05), then drop, act",
    ),
    "efficientnet_b0 GroupNormAct": (
        lambda: efficientnet("GroupNormAct", num_groups=8),
        49,
        0,
        "group_norm(8, eps=1e-05, activation=silu)",
    ),
    "efficientnet_b0 LayerNormAct2d": (
        lambda: efficientnet("LayerNormAct2d"),
        49,
        0,
        "layer_norm(eps=1e-05, axis=(1,)), then drop, act",
    ),
    "efficientnet_b0 RmsNormAct2d": (
        lambda: efficientnet("RmsNormAct2d"),
        49,
        0,
        "rms_norm(eps=1e-06, axis=(1,)), then drop, act",
    ),
    "maxvit_nano_rw_256": (lambda: {"img_size": 64}, 29, 22, "layer_norm(eps=1e-06)"),
    "edgenext_xx_small": (dict, 20, 1, "layer_norm(eps=1e-06, axis=(1,))"),
}

BLOCKS = ("ResBlock", "EfficientViTBlock")
UNET = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (8, 16)}
UNET |= {"norm_num_groups": 4, "cross_attention_dim": 8, "attention_head_dim": 4}
UNET |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
UNET |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
KL = {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4}
KL |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
DC = {"latent_channels": 4, "attention_head_dim": 4, "upsample_block_type": "interpolate"}
for part in ("encoder", "decoder"):
    DC |= {f"{part}_block_types": BLOCKS, f"{part}_block_out_channels": (8, 16)}
    DC |= {f"{part}_layers_per_block": (1, 1), f"{part}_qkv_multiscales": ((), (5,))}
WAN = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
WAN |= {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
HEADS = {"num_attention_heads": 2, "in_channels": 4, "num_layers": 2}
DIT = HEADS | {"attention_head_dim": 8, "out_channels": 8, "norm_num_groups": 4, "sample_size": 8}
SD3 = HEADS | {
    "attention_head_dim": 8,
    "out_channels": 4,
    "sample_size": 8,
    "pos_embed_max_size": 8,
}
SD3 |= {"caption_projection_dim": 16, "joint_attention_dim": 8, "pooled_projection_dim": 8}
SD3 |= {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}
FLUX = HEADS | {"attention_head_dim": 16, "joint_attention_dim": 8, "pooled_projection_dim": 8}
FLUX |= {"num_single_layers": 1, "patch_size": 1, "axes_dims_rope": (4, 4, 8)}

IMAGE, LATENT = {"sample": (2, 3, 8, 8)}, (2, 4, 8, 8)
TEXT = {"encoder_hidden_states": (2, 5, 8), "pooled_projections": (2, 8)}
STEPS = {"timestep": torch.tensor([3, 4])}
IDS = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}
# By class: the options, the inputs (shapes of those that are drawn), and as above.
DIFFUSERS = {
    "UNet2DConditionModel": (
        UNET,
        {"sample": LATENT, "encoder_hidden_states": (2, 5, 8)} | STEPS,
        33,
        0,
        "group_norm(4, eps=1e-06)",
    ),
    "AutoencoderKL": (KL, IMAGE, 24, 0, "group_norm(4, eps=1e-06)"),
    "AutoencoderDC": (DC, IMAGE, 7, 2, "normalize(eps=1e-05, dtype=float32)"),
    "AutoencoderKLWan": (WAN, {"sample": (1, 3, 5, 16, 16)}, 0, 36, ""),
    "AutoencoderKLQwenImage": (WAN, {"sample": (1, 3, 1, 16, 16)}, 0, 36, ""),
    "DiTTransformer2DModel": (
        DIT | {"num_embeds_ada_norm": 10},
        {"hidden_states": LATENT, "class_labels": torch.tensor([1, 2])} | STEPS,
        5,
        2,
        "layer_norm(eps=1e-06)",
    ),
    "SD3Transformer2DModel": (
        SD3,
        {"hidden_states": LATENT} | TEXT | STEPS,
        18,
        5,
        "layer_norm(eps=1e-06)",
    ),
    "FluxTransformer2DModel": (
        FLUX,
        {"hidden_states": (2, 16, 4)} | TEXT | IDS | {"timestep": torch.tensor([0.3, 0.4])},
        20,
        6,
        "layer_norm(eps=1e-06)",
    ),
}
MODELS = TIMM | DIFFUSERS
# Norms that round each step in half precision, and so are left in a model of half precision.
ROUNDED = {"efficientnet_b0 RmsNormAct2d": 49, "AutoencoderDC": 7}


# By name: the dtype of the model and of x, their memory, and whether autocast is on.
MODES = {
    "float32": (F32, torch.contiguous_format, False),
    "channels_last": (F32, torch.channels_last, False),
    "autocast": (F32, torch.contiguous_format, True),
    "bfloat16": (BF16, torch.contiguous_format, False),
}


def make(name, mode="float32"):
    """Return a model with random weights, what it is given, and the values of a mode."""
    dtype, memory, autocast = MODES[mode]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name in TIMM:
            timm = pytest.importorskip("timm", reason="timm is not installed")
            options = TIMM[name][0]()
            model = timm.create_model(name.split()[0], num_classes=10, **options)
            inputs = {"x": (2, 3, 64, 64)}
        else:
            diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
            options, inputs, *_ = DIFFUSERS[name]
            model = getattr(diffusers, name)(**options)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # a bias, or a weight of a norm, which is usually 0 or 1
                    parameter.add_(0.2 * torch.randn_like(parameter))
    if all(parameter.dim() < 5 for parameter in model.parameters()):
        model = model.to(memory_format=memory)
    return model.eval().to(dtype), inputs, dtype, memory, autocast


def outputs(model, inputs, dtype, memory=torch.contiguous_format):
    """Return the result and the gradients of all parameters and of the image, in float64."""
    given = {
        name: drawn(*one).to(dtype) if isinstance(one, tuple) else one
        for name, one in inputs.items()
    }
    image = next(iter(given))
    x = given.pop(image)
    x = (x.contiguous(memory_format=memory) if x.dim() == 4 else x).requires_grad_()
    y = model(x, **given)
    y = getattr(y, "sample", y)
    model.zero_grad()
    y.double().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [one.detach().double() for one in (y, x.grad, *gradients)]


def check_errors(actual, own, exact, dtype):
    """Check that errors are those of the unreplaced model, measured against float64.

    The same number of roundings at the same places gives errors of about the same size. Errors
    are root mean squares, so that only few of these numbers are small by chance: they may be three
    times as large. A gradient that is 0 in exact arithmetic, such as that of a bias before a norm,
    is all error: each side may have one unit of the largest gradient.
    """
    floor = torch.finfo(dtype).eps * max(float(one.norm()) for one in exact[1:])
    for one, usual, right in zip(actual, own, exact, strict=True):
        allowed = 3 * (usual - right).norm() + (floor if one is not actual[0] else 0)
        off = (one - right).norm()
        assert off <= allowed, f"{off:.3g} is more than {allowed:.3g}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_replaced_models_have_the_errors_of_the_original(name, mode):
    model, inputs, dtype, memory, autocast = make(name, mode)
    exact = outputs(copy.deepcopy(model).to(F64), inputs, F64)
    run = torch.autocast("cpu", BF16, enabled=autocast)(outputs)
    own = run(model, inputs, dtype, memory)
    done = replace_norms(model)
    *_, replaced, left, runs = MODELS[name]
    rounded = ROUNDED.get(name, 0) if dtype == BF16 else 0
    replaced, left = replaced - rounded, left + rounded
    assert (len(done.replaced), len(done.left)) == (replaced, left)
    assert any(runs in one.runs for one in done.replaced) or not replaced
    check_errors(run(model, inputs, dtype, memory), own, exact, BF16 if autocast else dtype)
    assert restore_norms(model) == replaced
    assert all(map(torch.equal, run(model, inputs, dtype, memory), own))


@pytest.mark.parametrize("name", ["resnet50_gn", "UNet2DConditionModel", "AutoencoderKL"])
@pytest.mark.parametrize("mode", MODES)
def test_models_with_fused_activations_have_the_errors_of_the_original(name, mode):
    model, inputs, dtype, memory, autocast = make(name, mode)
    exact = outputs(copy.deepcopy(model).to(F64), inputs, F64)
    run = torch.autocast("cpu", BF16, enabled=autocast)(outputs)
    own = run(model, inputs, dtype, memory)
    done = replace_norms(model, fuse_activations=True)
    # All but those of attention and, in the ResNet, those before a sum or a drop_block.
    fused = {"resnet50_gn": 4, "UNet2DConditionModel": 17, "AutoencoderKL": 22}[name]
    assert sum("fused with" in one.runs for one in done.replaced) == fused
    check_errors(run(model, inputs, dtype, memory), own, exact, BF16 if autocast else dtype)


@pytest.mark.parametrize("name", ["convnext_atto", "AutoencoderKL"])
def test_replaced_models_compile_as_one_graph(name):
    model, inputs, *_ = make(name)
    replace_norms(model, fuse_activations=True)
    expected = outputs(model, inputs, F32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one, other in zip(outputs(compiled, inputs, F32), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_fused_model_is_saved_and_loaded_under_its_own_class(tmp_path):
    model, inputs, *_ = make("AutoencoderKL")
    expected = outputs(model, inputs, F32)
    replace_norms(model, fuse_activations=True)
    model.save_pretrained(tmp_path)
    diffusers = importlib.import_module("diffusers")
    assert json.loads((tmp_path / "config.json").read_text())["_class_name"] == "AutoencoderKL"
    loaded = diffusers.AutoencoderKL.from_pretrained(tmp_path).eval()
    assert all(map(torch.equal, outputs(loaded, inputs, F32), expected))
