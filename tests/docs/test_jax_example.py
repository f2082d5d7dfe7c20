# SPDX-License-Identifier: MIT
"""The JAX example runs, and fails for a wrong norm."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--width", "16", "--heads", "2", "--context", "8", "--batch", "2", "--steps", "3")
LARGEST = r"^largest difference: (\S+), tolerance 0\.001 nats per character$"


@pytest.fixture
def example(monkeypatch):
    """Import a module as the script does, from its own folder."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


BUILD = pytest.mark.real_gpu("JAX does not run on it")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, BUILD])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_both_runs_have_the_same_loss_curve(device, example, capsys):
    assert example("jax_train").main([*SMALL, "--device", device]) == 0
    printed = capsys.readouterr().out
    assert float(re.search(LARGEST, printed, re.M)[1]) < 1e-4
    assert len(re.findall(r"^ +\d+( +\d\.\d{5}){2} +\S+$", printed, re.M)) == 3


def test_a_wrong_norm_parts_the_curves(example, monkeypatch, capsys):
    script, norms = example("jax_train"), example("jax_char_lm.norms")

    def dropped(x, stream, weight):
        y, new = norms.CUNORM.add_rms_norm(x, stream, weight)
        return y, example("jax").lax.stop_gradient(new)

    monkeypatch.setattr(script, "CUNORM", norms.CUNORM._replace(add_rms_norm=dropped))
    assert script.main([*SMALL, "--device", "cpu"]) == 1
    assert float(re.search(LARGEST, capsys.readouterr().out, re.M)[1]) > 1e-3
