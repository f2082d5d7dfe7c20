# SPDX-License-Identifier: MIT
"""The examples run and do what they claim; they fail if a result is wrong."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cunorm
from tests.support.processes import python

EXAMPLES = Path(__file__).parents[2] / "examples"
LONG = pytest.mark.real_gpu("PyTorch, JAX and hundreds of steps need a real GPU")
STACK, TRAINING, DENOISING, TORCH, DIT, FLOAT8, JAX, SPLIT, JAX_SPLIT, PINN, FLOW, JAX_FLOW = [
    "prenorm_stack",
    "train_char_lm",
    "vae_block",
    "torch_train",
    "torch_dit",
    "torch_fp8_mlp",
    "jax_train",
    "torch_split_rows",
    "jax_split_rows",
    "jax_pinn",
    "torch_meanflow",
    "jax_meanflow",
]
SMALL = {
    STACK: "--layers 3 --rows 64 --width 64 --repeats 2",
    JAX: "--width 16 --heads 2 --context 8 --batch 2 --steps 20",
}
NUMBER = r"\d+(?:\.\d+)?(?:e[+-]\d+)?"


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Import a module as the scripts do, from their own folder; restore settings afterwards.

    Pictures go to a temporary folder.
    """
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)

    def imported(name):
        library = name.partition("_")[0]
        if library in ("torch", "jax"):
            pytest.importorskip(library, reason=f"{library} is not installed")
        module = importlib.import_module(name)
        if hasattr(module, "keep_freed_memory"):
            monkeypatch.setattr(module, "keep_freed_memory", lambda: None)
        if name in (TORCH, DIT, FLOW):  # the example sets the number of threads, fixed here
            monkeypatch.setattr(module.torch, "set_num_threads", lambda count: None)
        return module

    yield imported
    cunorm.set_num_threads(None)


@pytest.fixture
def run(example, capsys):
    """Return a function that runs an example; its last line must have all of some texts.

    It returns what was printed and, as numbers, the figures of the last line.
    """

    def ran(script, *texts, arguments="", device="cpu", status=0):
        given = f"{SMALL.get(script, '--quick')} {arguments} --device {device}"
        module = example(script)
        if hasattr(module, "jax"):
            module.jax.clear_caches()  # of what was compiled with another test's replacements
        found = module.main(given.split())
        printed = SimpleNamespace(**capsys.readouterr()._asdict())
        assert found == status, printed.out
        *_, picture, last = printed.out.splitlines()
        assert all(text in last for text in texts), last
        path = Path(re.fullmatch(r"picture: (\S+)", picture)[1])
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return printed, [float(figure) for figure in re.findall(NUMBER, last)]

    return ran


def on_devices(*names, gpu_marks=()):
    """Return test parameters: each name on a CPU and on a GPU."""
    gpu = [pytest.mark.gpu, *gpu_marks]
    return [(*name, "cpu") for name in names] + [
        pytest.param(*name, "cuda", marks=gpu) for name in names
    ]


@pytest.mark.parametrize("dtype, device", on_devices(["float32"], ["bfloat16"]))
def test_the_fused_stack_agrees_with_the_naive_one(dtype, device, run):
    printed, shown = run(STACK, " gives ", arguments=f"--dtype {dtype}", device=device)
    errors = dict(re.findall(r"^  (\w+) +(\d\.\de[+-]\d\d)", printed.out, re.M))
    assert list(errors) == ["output", "y", "dx", "dweight", "dy", "dmatrix"]
    # The fused sum is rounded to the stream's dtype like a separate addition.
    assert float(errors["output"]) == float(errors["y"]) == 0
    saved = re.findall(r"^saved(?: +-?\d+\.\d %){2} +(-?\d+\.\d) % $", printed.out, re.M)
    *differences, fewer, less = shown
    worst = max(map(float, errors.values()))
    assert differences == ([worst] if worst else [])
    assert ("to the last bit" in printed.out) == (not worst)
    signed = less if printed.out.endswith("less time.\n") else -less
    assert [fewer, signed] == pytest.approx([*map(float, saved)], abs=0.551)


def test_the_stack_exits_with_1_if_the_gradient_of_the_stream_is_dropped(run, monkeypatch):
    backward = cunorm.rms_norm_backward

    def broken(*arrays, d_residual=None, **options):
        return backward(*arrays, **options)

    monkeypatch.setattr(cunorm, "rms_norm_backward", broken)
    printed, _ = run(STACK, " does not give ", arguments="--dtype float32", status=1)
    assert re.search(r"^  y +0\.0e\+00", printed.out, re.M)
    assert not re.search(r"^  dx +0\.0e\+00", printed.out, re.M)
    wrong = ", ".join(re.findall(r"^  (d\w+) ", printed.out, re.M))
    assert printed.out.endswith(f" results of {wrong}.\n")


def nats(printed):
    """Return the losses of the bigram model and of the trained model."""
    return [*map(float, re.findall(r": +(\d\.\d{4})(?= nats|,)", printed.out)[-2:])]


@pytest.mark.parametrize(["device"], on_devices([], gpu_marks=[LONG]))
def test_a_short_training_run_beats_the_bigram_model(device, example, run, monkeypatch):
    monkeypatch.setattr(example(TRAINING), "VALIDATIONS", 1)
    printed, shown = run(TRAINING, " predicts text ", device=device)
    baseline, final = nats(printed)
    assert final < baseline - 0.1  # it is 2.23, the bigram model's is 2.40
    assert "200/200" in printed.err  # the progress bar
    assert shown == pytest.approx([200, final, baseline], abs=0.0051)


@pytest.mark.parametrize(
    "script, steps, text",
    [(TRAINING, 1, " does not predict text "), (TORCH, 2, " not less than a bigram ")],
)
def test_an_example_exits_with_1_if_its_loss_is_above_the_bigram_models(script, steps, text, run):
    printed, shown = run(script, text, arguments=f"--steps {steps}", status=1)
    baseline, final = nats(printed)
    assert final > baseline and shown[0] == steps


def denoised(printed):
    """Return the printed losses of the model and the blur, and the error of the gradient."""
    (error,) = re.findall(r"^gradient .* by (\d\.\de[+-]\d\d) of it$", printed.out, re.M)
    blur, model = re.findall(r"blur: (\S+), model: (\S+) mean", printed.out)[0]
    return float(model), float(blur), float(error)


@pytest.mark.parametrize(["device"], on_devices([], gpu_marks=[LONG]))
def test_the_block_learns_to_denoise_better_than_a_blur(device, tmp_path, run):
    given = {"arguments": f"--output {tmp_path / 'block.png'}", "device": device}
    printed, shown = run(DENOISING, " removes ", " is right: ", **given)
    model, blur, error = denoised(printed)
    assert error < 1e-8
    assert model < 0.8 * blur  # it is 0.0072, the best blur's is 0.0102
    assert "100/100" in printed.err  # the progress bar
    assert shown == pytest.approx([model, blur, error], rel=0, abs=0.000051)
    assert shown[-1] == error and str(tmp_path / "block.png") in printed.out


@pytest.mark.exhaustive
def test_the_block_exits_with_1_if_a_gradient_is_wrong_or_its_error_is_above_the_blurs(
    example, run, monkeypatch
):
    backward = cunorm.group_norm_backward

    def broken(*arrays, activation, **options):
        if wrong == "activation":
            return backward(*arrays, activation=None, **options)
        grads = backward(*arrays, activation=activation, **options)
        return grads._replace(**({wrong: 0 * getattr(grads, wrong)} if wrong else {}))

    block = example(DENOISING)
    monkeypatch.setattr(cunorm, "group_norm_backward", broken)
    # The test above checks the progress bar.
    monkeypatch.setattr(block, "train", lambda *arguments: [1.0])
    monkeypatch.setattr(block, "blur_error", lambda *arguments: blur)
    for wrong, blur in (("activation", 1), ("dweight", 1), ("dbias", 1), (None, 0), (None, 1)):
        texts = " removes " if blur else " does not remove ", "wrong" if wrong else "right"
        printed, _ = run(DENOISING, *texts, status=1 if wrong or not blur else 0)
        assert (denoised(printed)[2] > 1e-3) == (wrong is not None)


# --- examples that train with two libraries' norms ------------------------------------------------


def difference(printed):
    """Return the largest difference between the two curves."""
    return float(re.findall(r"^largest difference: (\S+), tolerance ", printed.out, re.M)[0])


@pytest.mark.parametrize("script, device", on_devices([TORCH], [JAX], gpu_marks=[LONG]))
def test_both_norms_train_alike(script, device, run):
    if script == JAX:  # on a GPU JAX rounds to TF32 by default
        jax = pytest.importorskip("jax", reason="JAX is not installed")
        with jax.default_matmul_precision("highest"):
            printed, shown = run(JAX, " trains as ", " and fall: from ", device=device)
        ends = re.search(r"^loss: (\S+) at first, (\S+) at last", printed.out, re.M).groups()
        steps, losses = 20, [*map(float, ends)]
    else:
        printed, shown = run(TORCH, " trains as ", " less than a bigram ", device=device)
        assert "not less than" not in printed.out
        # The norms before attention and before the MLP, of queries and of keys, and the last norm.
        assert "5 norms replaced" in printed.out
        baseline, last = nats(printed)
        assert last < baseline - 0.02
        steps, losses = 200, [last, baseline]
    curves = re.findall(r"^ +\d+ +(\d\.\d{5}) +(\d\.\d{5}) +\d\.\de.\d\d$", printed.out, re.M)
    assert len(curves) == 10
    assert all(abs(float(a) - float(b)) <= 1e-4 for a, b in curves)
    assert difference(printed) <= 1e-4
    assert shown[:2] == [steps, difference(printed)]
    assert shown[2:] == pytest.approx(losses, abs=0.0051)


@pytest.mark.parametrize(["device"], on_devices([], gpu_marks=[LONG]))
def test_modulated_norms_and_gated_branches_train_alike_and_draw_strokes(device, run):
    printed, (steps, shown, percent) = run(DIT, " trains as ", " show the stroke ", device=device)
    assert "only" not in printed.out
    curves = re.findall(r"^ +\d+ +(\d\.\d{5}) +(\d\.\d{5}) +\d\.\de.\d\d$", printed.out, re.M)
    losses = np.array(curves, dtype=float)
    assert len(losses) == 10 and losses[-1].max() < 0.5 * losses[0].min()
    assert steps == 150 and shown == difference(printed) <= 1e-4
    assert percent > 60  # it is 73; by chance it would be 25


@pytest.mark.exhaustive
def test_the_diffusion_example_exits_with_1_if_a_gradient_is_wrong_or_few_pictures_show_strokes(
    run, example, monkeypatch
):
    printed, (*_, percent) = run(DIT, " trains as ", "only ", arguments="--steps 2", status=1)
    assert percent < 50
    example(DIT)
    from cunorm.torch._pair import OpPair

    right = OpPair.gradients

    def too_large(*arguments):
        dx, dweight, *others = right(*arguments)
        return (dx, dweight * 1.01, *others)

    monkeypatch.setattr(OpPair, "gradients", too_large)
    printed, (_, shown, _) = run(DIT, " does not train as ", arguments="--steps 40", status=1)
    assert shown == difference(printed) > 1e-4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, LONG])])
@pytest.mark.parametrize("has_product", [True, False])
def test_products_of_8_bit_floats_are_as_near_to_bfloat16_as_their_digits_allow(
    device, has_product, run, example, monkeypatch
):
    if not has_product:
        monkeypatch.delattr(example(FLOAT8).torch, "_scaled_mm", raising=False)
    printed, figures = run(FLOAT8, " % from bfloat16 (tolerance ", device=device)
    *_, difference, _, tolerance = figures  # between them is the 16 of bfloat16
    assert has_product or "products: of dequantised float32 factors\n" in printed.out
    rows = re.findall(r"^ +\d+ +(\d+\.\d\d)% +(\d+\.\d\d)%$", printed.out, re.M)
    half, quantized = np.array(rows, dtype=float).T
    assert len(rows) == 2
    assert half.max() < 2 and quantized.min() > 4  # two digits less
    assert 4 < difference < tolerance == 10


def test_the_example_of_8_bit_floats_exits_with_1_if_scales_are_too_large(
    run, example, monkeypatch
):
    example(FLOAT8)
    right = cunorm.rms_norm_quantized

    def too_large(*arrays, **options):
        found = right(*arrays, **options)
        return found._replace(scale=found.scale * 1.125)

    monkeypatch.setattr(cunorm, "rms_norm_quantized", too_large)
    _, (*_, difference, _, tolerance) = run(FLOAT8, ", which is too much ", status=1)
    assert difference > tolerance


def test_the_torch_example_exits_with_1_if_a_gradient_is_a_little_wrong(run, example, monkeypatch):
    script = example(TORCH)
    from cunorm.torch._pair import OpPair

    right = OpPair.gradients

    def too_large(*arguments):
        dx, *others = right(*arguments)
        return (dx * 1.01, *others)

    monkeypatch.setattr(OpPair, "gradients", too_large)
    monkeypatch.setattr(script, "bigram_loss", lambda *given: float("inf"))
    printed, shown = run(TORCH, " does not train as ", arguments="--steps 40", status=1)
    assert shown[1] == difference(printed) > 1e-4


def test_the_jax_example_exits_with_1_if_a_norm_drops_the_streams_gradient(
    run, example, monkeypatch
):
    script, norms = example(JAX), example("jax_char_lm.norms")

    def dropped(x, stream, weight):
        y, new = norms.CUNORM.add_rms_norm(x, stream, weight)
        return y, example("jax").lax.stop_gradient(new)

    monkeypatch.setattr(script, "CUNORM", norms.CUNORM._replace(add_rms_norm=dropped))
    printed, _ = run(JAX, " does not train as ", status=1)
    assert difference(printed) > 1e-3


# --- rows that are split --------------------------------------------------------------------------


def relative_errors(printed):
    """Return the largest error with norms of the rows, and the least with norms of their parts."""
    found = re.findall(r"^ *(\w+) +(\d\.\de[+-]\d\d) +(\d\.\de[+-]\d\d)$", printed, re.M)
    assert len(found) == 8  # y and the gradients of x and of six parameters
    _, of_rows, of_parts = zip(*found, strict=True)
    return max(map(float, of_rows)), min(map(float, of_parts))


def test_a_layer_that_two_processes_share_gives_the_results_of_the_whole_layer(run):
    printed, (processes, shown, *_) = run(SPLIT, " gives the results and gradients ")
    worst, of_parts = relative_errors(printed.out)
    assert worst == shown < 1e-6 and of_parts > 0.05 and processes == 2


def test_a_layer_that_devices_share_gives_the_results_of_the_whole_layer(run):
    printed, (devices, shown, *_) = run(JAX_SPLIT, " gives ", arguments="--devices 1")
    assert relative_errors(printed.out)[0] == shown < 1e-6 and devices == 1


@pytest.mark.exhaustive
def test_a_layer_that_four_devices_share_gives_the_results_of_the_whole_layer(tmp_path):
    pytest.importorskip("jax", reason="JAX is not installed")
    given = ["--quick", "--device", "cpu", "--output", str(tmp_path / "a.png")]
    printed = python(str(EXAMPLES / f"{JAX_SPLIT}.py"), *given)
    assert printed.returncode == 0, printed.stderr
    worst, of_parts = relative_errors(printed.stdout)
    assert worst < 1e-6 and of_parts > 0.05


def test_an_example_of_split_rows_exits_with_1_if_a_gradient_is_wrong(run, example, monkeypatch):
    script = example(SPLIT)

    def wrong(arrays, options):
        found = script.differentiated(arrays, options.width // options.heads)
        return [found | {"dk_norm": found["dk_norm"] * 1.0001}] * 2

    monkeypatch.setattr(script, "run_split", wrong)
    _, (_, shown, *_) = run(SPLIT, " does not give ", status=1)
    assert shown == 1e-4


# --- higher derivatives ---------------------------------------------------------------------------


@pytest.mark.exhaustive  # takes long; tests/jax/test_derived_transforms.py trains such a network
def test_a_network_solves_the_heat_equation_by_derivatives_of_its_norms(run):
    printed, (steps, before, after, tolerance) = run(PINN, " solves ")
    first, last = map(float, re.findall(r"(\S+) at (?:first|last)", printed.out))
    assert steps == 300 and before > 0.5
    assert after < tolerance == 0.02  # it is 0.012
    assert last < 0.01 * first


of_flows = pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of torch.func.jvp


@of_flows
@pytest.mark.parametrize("script", [FLOW, JAX_FLOW])
def test_a_mean_flow_draws_data_in_one_step(script, run):
    printed, (steps, before, after, tolerance) = run(script, " draws the data: ")
    assert steps == 150
    assert after < tolerance < 0.51 * before  # it is 0.4 of it
    (least,) = re.findall(r"^(\d\.\d+) of other data$", printed.out, re.M)
    assert float(least) < 0.1 * before  # two sets of data differ, too


@of_flows
@pytest.mark.exhaustive
def test_a_mean_flow_that_is_not_trained_exits_with_1(run):
    _, (_, before, after, tolerance) = run(FLOW, " does not draw ", arguments="--steps 2", status=1)
    assert tolerance < after < 1.1 * before


@of_flows
@pytest.mark.exhaustive
@pytest.mark.parametrize("script", [FLOW, JAX_FLOW])
def test_a_mean_flow_without_its_derivative_of_time_exits_with_1(script, run, example, monkeypatch):
    def wrong(function, primals, tangents):
        return function(*primals), 0

    module = example(script)
    monkeypatch.setattr(module.jax if script == JAX_FLOW else module.torch.func, "jvp", wrong)
    _, (*_, after, tolerance) = run(script, " does not draw ", status=1)
    assert after > 2 * tolerance


@pytest.mark.exhaustive
def test_a_network_whose_norms_have_wrong_derivatives_exits_with_1(run, example, monkeypatch):
    script = example(PINN)
    right, stop = script.cunorm.jax.layer_norm, script.jax.lax.stop_gradient

    def wrong(x, weight, bias):
        return stop(right(x, weight, bias)) + x - stop(x)

    monkeypatch.setattr(script.cunorm.jax, "layer_norm", wrong)
    _, (*_, after, tolerance) = run(PINN, " does not solve ", status=1)
    assert after > 5 * tolerance


# --- what examples share --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, arguments, text",
    [
        (STACK, "--width 1.5", "argument --width: invalid size value: '1.5'"),
        (TRAINING, "--width 30 --heads 4", "--width is 30, expected a multiple of --heads, 4"),
        (TRAINING, "--context 100000000", "--context is 100000000, expected at most "),
        (TRAINING, "--rate nan", "argument --rate: is nan, expected a finite number above 0"),
        (DENOISING, "--channels 30", "--channels is 30, expected a multiple of --groups, 8"),
        (DENOISING, "--shrink 41", "--shrink is 41, expected at most 40"),
        (FLOAT8, "--tokens 40", "--tokens is 40, expected a multiple of 16"),
        (DIT, "--width 12", "--width is 12, expected a multiple of twice --heads, 8"),
        (FLOW, "--width 30", "--width is 30, expected a multiple of 4"),
        (SPLIT, "--heads 8 --ranks 3", "--heads is 8, expected a multiple of the parts, 3"),
        (STACK, "--output no/a.png", "argument --output: is no/a.png, expected a file in a folder"),
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
