# SPDX-License-Identifier: MIT
"""replace_norms on small models of transformers with random weights."""

import importlib

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from cunorm.torch import replace_norms, restore_norms  # noqa: E402
from tests.support.torch_norms import BF16, F32, results  # noqa: E402

ALLOWED = 2.0**-20  # relative to the largest of a row, as documented
TOKENS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
SMALL = TOKENS | LAYERS | ATTENTION | {"intermediate_size": 48}
HEADS = SMALL | {"head_dim": 8}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 40}
STATE = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 4}
MAMBA = TOKENS | LAYERS | STATE

LLAMA_RUNS, GEMMA_RUNS = "round_before_weight=True", "weight_offset=1.0"
# By name: the class, the configuration's class and options, the number of norms, what they run.
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL, 5, LLAMA_RUNS),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS, 9, LLAMA_RUNS),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", HEADS, 5, GEMMA_RUNS),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", HEADS, 9, GEMMA_RUNS),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", HEADS, 13, GEMMA_RUNS),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", SMALL, 9, "rms_norm(eps=1e-05)"),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, 12, LLAMA_RUNS),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", MAMBA, 5, LLAMA_RUNS),
}


def make_model(name, dtype=F32):
    """Return a model with random weights; weights of norms are about 0 instead of 1."""
    kind, config, options, *_ = MODELS[name]
    try:
        package = f"transformers.models.{name}"
        configuration = importlib.import_module(f"{package}.configuration_{name}")
        modeling = importlib.import_module(f"{package}.modeling_{name}")
    except ImportError as error:
        pytest.skip(f"this version of transformers has no {name}: {error}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(modeling, kind)(getattr(configuration, config)(**options)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                size = 1.0 if parameter.dim() == 1 else 0.1
                parameter.copy_(size * torch.randn_like(parameter))
    return model.to(dtype)


def outputs(model):
    """Return logits and the gradients of all parameters that have one."""
    ids = torch.arange(18).reshape(2, 9) % 7
    decoder = {"decoder_input_ids": ids + 3} if model.config.is_encoder_decoder else {}
    model.zero_grad()
    logits = model(input_ids=ids, **decoder).logits
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def dtypes():
    """Yield test parameters; CI runs the models in float32 and bfloat16 in turn."""
    for number, name in enumerate(MODELS):
        for turn, dtype in enumerate((F32, BF16)):
            marks = pytest.mark.exhaustive if (number + turn) % 2 else ()
            yield pytest.param(name, dtype, marks=marks)


@pytest.mark.parametrize(("name", "dtype"), [*dtypes()])
def test_every_norm_is_replaced_and_gives_the_same_results(name, dtype):
    """Float32 results are as close as documented; bfloat16 bits agree except at ties.

    One bfloat16 number in some hundreds is within 2**-20 of a tie, relative to its row's largest.
    """
    *_, count, runs = MODELS[name]
    model, calls = make_model(name, dtype), []
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    hooks = [
        module.register_forward_hook(lambda module, given, y: calls.append((module, given)))
        for module in norms
    ]
    outputs(model)
    for hook in hooks:
        hook.remove()
    before = [results(module, *given) for module, given in calls]
    done = replace_norms(model)
    assert len(done.replaced) == count == len(norms) <= len(calls)
    assert not done.left
    assert all(runs in norm.runs for norm in done.replaced)
    for (module, given), expected in zip(calls, before, strict=True):
        for index, (one, right) in enumerate(zip(results(module, *given), expected, strict=True)):
            assert one.dtype == right.dtype
            off, size = (one.double() - right.double()).abs(), right.double().abs()
            if one.dtype == F32:  # also the stream of a bfloat16 Mamba-2
                assert (off <= 2 * ALLOWED * size.amax(-1, keepdim=True)).all()
            elif index == 0:
                assert (off <= 2.0**-7 * size).all()
                assert (off > 0).sum() <= 0.01 * off.numel()
    assert all(one.isfinite().all() for one in outputs(model))


def test_a_model_that_is_saved_after_replacing_or_restored_is_unchanged(tmp_path):
    model = make_model("llama")
    expected = outputs(model)
    replace_norms(model)
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path).eval()
    assert type(saved.model.norm).__name__ == "LlamaRMSNorm"
    assert restore_norms(model) == MODELS["llama"][3]
    for copied in (saved, model):
        assert all(map(torch.equal, outputs(copied), expected))
