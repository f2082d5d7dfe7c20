# SPDX-License-Identifier: MIT
"""The JAX example runs, and fails for a wrong norm."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

from tests.support.printed import figures, shows_picture  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--width", "16", "--heads", "2", "--context", "8", "--batch", "2", "--steps", "20")
LARGEST = r"^largest difference: (\S+), tolerance 0\.001 nats per character$"


@pytest.fixture
def example(monkeypatch, tmp_path):
    """Import a module as the script does; pictures go to a temporary folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def trained(printed, trains, fall):
    """Return the figures of the last line: steps, the difference, the first loss and the last."""
    return figures(
        printed,
        rf"With cunorm's norms the model {trains} as with norms written in jax\.numpy: in (\d+) "
        rf"steps the losses differ by at most (\S+), and {fall}: from (\S+) to (\S+) nats per "
        r"character\.",
    )


BUILD = pytest.mark.real_gpu("JAX does not run on the software GPU")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, BUILD])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_both_runs_have_the_same_loss_curve(device, example, capsys):
    with jax.default_matmul_precision("highest"):  # on a GPU JAX rounds to TF32 by default
        assert example("jax_train").main([*SMALL, "--device", device]) == 0
    printed = capsys.readouterr().out
    assert float(re.search(LARGEST, printed, re.M)[1]) < 1e-4
    assert len(re.findall(r"^ +\d+( +\d\.\d{5}){2} +\S+$", printed, re.M)) == 10
    assert shows_picture(printed, "jax_train.png")
    steps, difference, *losses = trained(printed, "trains", "fall")
    assert (steps, difference) == (20, float(re.search(LARGEST, printed, re.M)[1]))
    ends = re.search(r"^loss: (\S+) at first, (\S+) at last", printed, re.M).groups()
    assert losses == pytest.approx([*map(float, ends)], abs=0.0051)


def test_a_wrong_norm_separates_the_curves(example, monkeypatch, capsys):
    script, norms = example("jax_train"), example("jax_char_lm.norms")

    def dropped(x, stream, weight):
        y, new = norms.CUNORM.add_rms_norm(x, stream, weight)
        return y, example("jax").lax.stop_gradient(new)

    monkeypatch.setattr(script, "CUNORM", norms.CUNORM._replace(add_rms_norm=dropped))
    monkeypatch.setattr(script, "save_picture", lambda *given: None)
    assert script.main([*SMALL, "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert float(re.search(LARGEST, printed, re.M)[1]) > 1e-3
    trained(printed, "does not train", "(?:do not )?fall")
