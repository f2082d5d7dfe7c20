# SPDX-License-Identifier: MIT
"""replace_norms on models of transformers, small ones with random weights.

How far results of a model may be off is found, not guessed, as it depends on how a model amplifies
errors. In float32, each norm's results and gradients are moved by as much as the documentation of
`replace_norms` allows, 2**-20 of the largest of a row: what this makes of the model's is the bound.
In half precision, results of each norm have the same bits but for ties.
"""

from __future__ import annotations

import copy
import importlib

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from cunorm.torch import replace_norms, restore_norms  # noqa: E402

ALLOWED = 2.0**-20
TOKENS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
SMALL = TOKENS | LAYERS | ATTENTION | {"intermediate_size": 48}
HEADS = SMALL | {"head_dim": 8}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 40}
STATE = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 4}
MAMBA = TOKENS | LAYERS | STATE

LLAMA_RUNS, GEMMA_RUNS = "round_before_weight=True", "weight_offset=1.0"
# name: its class, that of its configuration and this, the number of norms and what they run
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


def made(name, dtype=torch.float32):
    """Return a model with random weights, those of the norms too: about 0, and not about 1."""
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
                # Of bfloat16, so that it is the same model in either dtype.
                parameter.copy_((size * torch.randn_like(parameter)).bfloat16())
    return model.to(dtype)


def norms(model):
    """Return the modules that are norms, found by what they were, not by what is replaced."""
    return {n: m for n, m in model.named_modules() if "norm" in type(m).__name__.lower()}


def results(model):
    """Return logits and the gradients of all parameters by their names."""
    ids = torch.arange(18).reshape(2, 9) % 7
    decoder = {"decoder_input_ids": ids + 3} if model.config.is_encoder_decoder else {}
    model.zero_grad()
    logits = model(input_ids=ids, **decoder).logits
    dy = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    logits.backward(dy.to(logits.dtype))
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert len(grads) > 10
    return {"logits": logits.detach(), **grads}


def moved(values, seed):
    """Move numbers by what they may be off, up or down."""
    signs = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    largest = values.detach().abs().amax(-1, keepdim=True)
    return values + ALLOWED * largest * (2.0 * signs - 1.0)


def differences(found, expected):
    assert list(found) == list(expected)
    return {name: float((found[name] - expected[name]).abs().max()) for name in expected}


def amplified(model, exact, seed):
    """Return how far results come to be off if those of each norm are as far as they may be."""
    perturbed = copy.deepcopy(model)
    for key, norm in enumerate(norms(perturbed).values(), seed):
        norm.register_forward_hook(lambda _m, _x, y, key=key: moved(y, key))
        norm.register_full_backward_hook(
            lambda _m, dx, _dy, key=key: tuple(None if d is None else moved(d, -key) for d in dx)
        )
    return differences(results(perturbed), exact)


@pytest.mark.parametrize("name", ["gemma2", "mamba2"])
def test_logits_and_gradients_in_float32_are_as_near_as_documented(name):
    model = made(name)
    expected = results(model)
    allowed = [amplified(model, expected, seed) for seed in (1000, 2000)]
    replace_norms(model)
    for what, off in differences(results(model), expected).items():
        assert off <= max(one[what] for one in allowed), what


@pytest.mark.parametrize("name", MODELS)
def test_every_norm_is_replaced_and_in_bfloat16_gives_the_bits_of_its_own_but_for_ties(name):
    """Within 2**-20 of its row's largest of a tie is a number of bfloat16 once in some hundreds."""
    *_, count, runs = MODELS[name]
    model = made(name, torch.bfloat16)
    seen = []
    for module in norms(model).values():
        module.register_forward_hook(lambda *told: seen.append(told))
    results(model)
    calls = list(seen)
    done = replace_norms(model)
    assert len(done.replaced) == count == len(norms(model))
    assert not done.left
    assert all(runs in norm.runs for norm in done.replaced)
    for module, given, expected in calls:
        y = module(*given)
        assert y.dtype == expected.dtype
        off, size = (y.double() - expected.double()).abs(), expected.double().abs()
        if y.dtype == torch.float32:  # the stream of Mamba-2
            assert (off <= 2 * ALLOWED * size.amax(-1, keepdim=True)).all()
        else:
            assert (off <= 2.0**-7 * size).all()
            assert (off > 0).sum() <= 0.01 * off.numel()
    assert len(calls) >= len(norms(model))


def test_a_model_that_is_saved_after_replacing_or_restored_is_what_it_was(tmp_path):
    model = made("llama")
    expected = results(model)
    replace_norms(model)
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path).eval()
    assert type(saved.model.norm).__name__ == "LlamaRMSNorm"
    assert restore_norms(model) == MODELS["llama"][3]
    for again in (saved, model):
        assert all(torch.equal(found, expected[what]) for what, found in results(again).items())
