# SPDX-License-Identifier: MIT
"""The examples run and do what they claim; they fail if a result is wrong."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cunorm
from tests.support.printed import figures, shows_picture

EXAMPLES = Path(__file__).parents[2] / "examples"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LONG = pytest.mark.real_gpu("hundreds of steps are too many for an interpreter")
QUICK_DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, LONG])]
STACK, TRAINING, DENOISING = "prenorm_stack", "train_char_lm", "vae_block"
SMALL_STACK = ("--layers", "3", "--rows", "64", "--width", "64", "--repeats", "2")


def run(
    script: str, folder: Path, *arguments: object, **patched: object
) -> subprocess.CompletedProcess[str]:
    """Run an example in a folder; on one thread, because other tests run in parallel."""
    code = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import {script} as script;"
    code += "".join(f"script.{name} = {value};" for name, value in patched.items())
    return subprocess.run(
        [sys.executable, "-c", f"{code} sys.exit(script.main())", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Import a module as the scripts do, from their own folder; restore settings afterwards.

    Pictures go to a temporary folder.
    """
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)

    def imported(name):
        module = importlib.import_module(name)
        if hasattr(module, "keep_freed_memory"):
            monkeypatch.setattr(module, "keep_freed_memory", lambda: None)
        return module

    yield imported
    cunorm.set_num_threads(None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_fused_stack_agrees_with_the_naive_one(dtype, device, example, capsys):
    stack = example(STACK)
    assert stack.main([*SMALL_STACK, "--dtype", dtype, "--device", device]) == 0
    printed = capsys.readouterr().out
    errors = dict(re.findall(r"^  (\w+) +(\d\.\de[+-]\d\d)", printed, re.M))
    assert list(errors) == ["output", "y", "dx", "dweight", "dy", "dmatrix"]
    # The fused sum is rounded to the stream's dtype like a separate addition.
    assert float(errors["output"]) == float(errors["y"]) == 0
    saved = re.findall(r"^saved(?: +-?\d+\.\d %){2} +(-?\d+\.\d) % $", printed, re.M)
    assert shows_picture(printed, "prenorm_stack.png")
    *differences, fewer, less = figures(
        printed,
        "The fused stack gives the naive stack's results (?:to the last bit|with differences of at "
        r"most (\S+) of the largest magnitude); its norms and additions move (\d+) % fewer bytes "
        r"and take (\d+) % (?:less|more) time\.",
    )
    assert differences == [worst for worst in [max(map(float, errors.values()))] if worst]
    signed = less if printed.endswith("less time.\n") else -less
    assert [fewer, signed] == pytest.approx([*map(float, saved)], abs=0.551)


def test_the_stack_exits_with_1_if_the_gradient_of_the_stream_is_dropped(
    example, monkeypatch, capsys
):
    backward = cunorm.rms_norm_backward

    def broken(*arrays, d_residual=None, **options):
        return backward(*arrays, **options)

    monkeypatch.setattr(cunorm, "rms_norm_backward", broken)
    stack = example(STACK)
    assert stack.main([*SMALL_STACK, "--dtype", "float32", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^  y +0\.0e\+00", printed, re.M)
    assert not re.search(r"^  dx +0\.0e\+00", printed, re.M)
    differ = re.escape(", ".join(re.findall(r"^  (d\w+) ", printed, re.M)))
    figures(printed, rf"The fused stack does not give the naive stack's results of {differ}\.")


def trained(printed, verb):
    """Return the last line's figures: steps, the model's loss, the bigram model's loss."""
    return figures(
        printed,
        f"The model, with every norm by cunorm, {verb} text that it has not seen better than a "
        r"bigram model: after (\d+) steps its loss is (\S+) nats per character, the bigram model's "
        r"(\S+)\.",
    )


def nats(printed):
    """Return the losses of the bigram model and of the trained model."""
    return map(float, re.findall(r": +(\d\.\d{4}) nats per character", printed))


@pytest.mark.parametrize("device", QUICK_DEVICES)
def test_a_short_training_run_beats_the_bigram_model(tmp_path, device):
    done = run(TRAINING, tmp_path, "--quick", "--device", device, VALIDATIONS=1)
    assert done.returncode == 0, done.stderr
    baseline, final = nats(done.stdout)
    assert final < baseline - 0.1  # it is 2.23, the bigram model's is 2.40
    assert "200/200" in done.stderr  # the progress bar
    assert shows_picture(done.stdout, "loss_curve.png", tmp_path)
    assert trained(done.stdout, "predicts") == pytest.approx([200, final, baseline], abs=0.0051)


def test_training_exits_with_1_if_its_loss_is_above_the_bigram_models(tmp_path):
    done = run(TRAINING, tmp_path, "--quick", "--steps", 1, "--device", "cpu")
    assert done.returncode == 1, done.stderr
    baseline, final = nats(done.stdout)
    assert final > baseline
    shown = trained(done.stdout, "does not predict")
    assert shown == pytest.approx([1, final, baseline], abs=0.0051)


def cleaned(printed, verb, gradient):
    """Return the figures of the last line: the errors of the block, the blur and the gradient."""
    return figures(
        printed,
        f"The block {verb} noise better than the best blur: its mean squared error is "
        rf"(\S+), the blur's (\S+); its gradient is {gradient}: off a central difference by "
        r"(\S+) of it\.",
    )


def denoised(printed):
    """Return the printed error of the gradient, and the losses of the blur and the model."""
    (error,) = re.findall(r"^gradient .* by (\d\.\de[+-]\d\d) of it$", printed, re.M)
    return float(error), *map(float, *re.findall(r"blur: (\S+), model: (\S+) mean", printed))


@pytest.mark.parametrize("device", QUICK_DEVICES)
def test_the_block_learns_to_denoise_better_than_a_blur(tmp_path, device):
    picture = tmp_path / "block.png"
    done = run(DENOISING, tmp_path, "--quick", "--device", device, "--output", picture)
    assert done.returncode == 0, done.stderr
    error, blur, model = denoised(done.stdout)
    assert error < 1e-8
    assert model < 0.8 * blur  # it is 0.0072, the best blur's is 0.0102
    assert "100/100" in done.stderr  # the progress bar
    assert shows_picture(done.stdout, picture)
    *errors, of_gradient = cleaned(done.stdout, "removes", "right")
    assert errors == pytest.approx([model, blur], abs=0.000051)
    assert of_gradient == error


def test_the_block_exits_with_1_if_a_gradient_is_wrong_or_its_error_is_above_the_blurs(
    example, monkeypatch, capsys
):
    backward = cunorm.group_norm_backward

    def broken(*arrays, activation, **options):
        if wrong == "activation":
            return backward(*arrays, activation=None, **options)
        grads = backward(*arrays, activation=activation, **options)
        return grads._replace(**({wrong: 0 * getattr(grads, wrong)} if wrong else {}))

    block = example(DENOISING)
    monkeypatch.setattr(block, "save_picture", lambda *arguments: None)
    monkeypatch.setattr(cunorm, "group_norm_backward", broken)
    # The tests above check the picture and the progress bar.
    monkeypatch.setattr(block, "train", lambda *arguments: [1.0])
    monkeypatch.setattr(block, "blur_error", lambda *arguments: blur)
    options = ["--quick", "--device", "cpu"]
    for wrong, blur in (("activation", 1), ("dweight", 1), ("dbias", 1), (None, 0), (None, 1)):
        assert block.main(options) == (1 if wrong or not blur else 0)
        printed = capsys.readouterr().out
        assert (denoised(printed)[0] > 1e-3) == (wrong is not None)
        cleaned(printed, "removes" if blur else "does not remove", "wrong" if wrong else "right")


@pytest.mark.parametrize(
    ("script", "arguments", "text"),
    [
        (STACK, "--width 1.5", "argument --width: invalid size value: '1.5'"),
        (TRAINING, "--width 30 --heads 4", "--width is 30, expected a multiple of --heads, 4"),
        (TRAINING, "--context 100000000", "--context is 100000000, expected at most "),
        (TRAINING, "--rate nan", "argument --rate: is nan, expected a finite number above 0"),
        (DENOISING, "--channels 30", "--channels is 30, expected a multiple of --groups, 8"),
        (DENOISING, "--shrink 41", "--shrink is 41, expected at most 40"),
        (
            STACK,
            "--output no/a.png",
            "argument --output: is no/a.png, expected a file in a folder ",
        ),
        (STACK, "--output .", "argument --output: is ., expected a file in a folder that exists"),
    ],
)
def test_wrong_arguments_are_named(script, arguments, text, example, capsys):
    with pytest.raises(SystemExit) as stopped:
        example(script).main(arguments.split())
    assert stopped.value.code == 2
    assert f"error: {text}" in capsys.readouterr().err


def test_every_gradient_of_the_model_is_that_of_finite_differences(example, step=1e-5):
    model_module, rng = example("char_lm.model"), np.random.default_rng(0)
    shape = model_module.Shape(vocabulary=5, width=6, layers=2, heads=2, context=4)
    model = model_module.Model(shape, rng, np, np.float64)
    for parameter in model.parameters.values():
        parameter *= rng.uniform(0.5, 1.5, parameter.shape)  # none of the weights is 1
    batch = rng.integers(0, 5, (2, 2, 3))  # inputs and targets, shorter than the context
    _, grads = model.loss_and_gradients(*batch)
    assert grads.keys() == model.parameters.keys()
    for name, parameter in model.parameters.items():
        expected = np.empty_like(parameter)
        for index in np.ndindex(parameter.shape):
            original, losses = parameter[index], []
            for shifted in (original + step, original - step):
                parameter[index] = shifted
                losses.append(model.loss(*batch))
            parameter[index] = original
            expected[index] = (losses[0] - losses[1]) / (2 * step)
        assert abs(expected).max() > 1e-3, name
        # The step's square, and the loss's rounding divided by the step, give errors near 1e-10.
        np.testing.assert_allclose(grads[name], expected, rtol=0, atol=1e-8, err_msg=name)


def test_the_bigram_baseline_counts_pairs_plus_one(example):
    loss = example("char_lm.data").bigram_loss
    training = np.array([0, 1, 0, 1, 0])
    # After 0, the counts of 0, 1 and 2 are 0, 2 and 0, plus one each; after 2 all are equal.
    assert loss(training, np.array([0]), np.array([1]), 3) == pytest.approx(np.log(5 / 3))
    assert loss(training, np.array([2]), np.array([1]), 3) == pytest.approx(np.log(3))
