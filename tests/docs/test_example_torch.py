# SPDX-License-Identifier: MIT
"""The PyTorch example trains alike with both libraries' norms; it fails for a wrong gradient."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cunorm  # noqa: E402
from cunorm.torch._pair import OpPair  # noqa: E402
from tests.support.printed import figures, shows_picture  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ("--quick", "--device", "cpu")


@pytest.fixture
def torch_train(monkeypatch, tmp_path):
    """Import the example from its own folder; restore the numbers of threads afterwards.

    The picture goes to a temporary folder.
    """
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("torch_train")
    torch.set_num_threads(threads)
    cunorm.set_num_threads(None)


def difference(printed):
    """Return the largest difference between the two curves."""
    return float(re.findall(r"^largest difference: (\S+),", printed, re.M)[0])


def trained(printed, trains, than):
    """Return the last line's figures: steps, the difference, the loss, the bigram model's loss."""
    return figures(
        printed,
        rf"With cunorm's norms the model {trains} as with PyTorch's: in (\d+) steps the losses "
        r"differ by at most (\S+), and at the end they are (\S+) nats per character, "
        rf"{than} a bigram model's (\S+)\.",
    )


BUILD = pytest.mark.real_gpu("PyTorch does not run on the software GPU")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, BUILD])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_both_norms_train_alike_and_beat_the_bigram_model(device, tmp_path):
    picture = tmp_path / "curves.png"
    command = [sys.executable, EXAMPLES / "torch_train.py", "--quick", "--output", picture]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # other tests run in parallel
    options = {"capture_output": True, "text": True, "env": one_thread, "check": False}
    done = subprocess.run([*command, "--device", device], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    # The norms before attention and before the MLP, of queries and of keys, and the last norm.
    assert "5 norms replaced" in done.stdout
    curves = re.findall(r"^ +\d+ +(\d\.\d{5}) +(\d\.\d{5}) +\d\.\de.\d\d$", done.stdout, re.M)
    assert len(curves) == 10
    assert all(abs(float(a) - float(b)) <= 1e-4 for a, b in curves)
    assert difference(done.stdout) <= 1e-4
    baseline, last = map(float, re.findall(r": (\d\.\d{4})", done.stdout)[-2:])
    assert last < baseline - 0.02
    assert shows_picture(done.stdout, picture)
    steps, of_losses, *losses = trained(done.stdout, "trains", "less than")
    assert (steps, of_losses) == (200, difference(done.stdout))
    assert losses == pytest.approx([last, baseline], abs=0.0051)


def test_the_example_exits_with_1_if_its_loss_is_above_the_bigram_models(torch_train, capsys):
    assert torch_train.main([*QUICK, "--steps", "2"]) == 1
    printed = capsys.readouterr().out
    assert difference(printed) <= 1e-4
    assert shows_picture(printed, "torch_train.png")
    assert trained(printed, "trains", "not less than")[0] == 2


def test_the_example_exits_with_1_if_a_gradient_is_a_little_wrong(torch_train, monkeypatch, capsys):
    right = OpPair.gradients

    def too_large(*arguments):
        dx, *others = right(*arguments)
        return (dx * 1.01, *others)

    monkeypatch.setattr(OpPair, "gradients", too_large)
    monkeypatch.setattr(torch_train, "bigram_loss", lambda *given: float("inf"))
    monkeypatch.setattr(torch_train, "save_picture", lambda *given: None)
    assert torch_train.main([*QUICK, "--steps", "40"]) == 1
    printed = capsys.readouterr().out
    assert difference(printed) > 1e-4
    assert trained(printed, "does not train", "less than")[1] == difference(printed)
