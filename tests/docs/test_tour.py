# SPDX-License-Identifier: MIT
"""The notebook's code runs, prints what is stored in it, and draws as many pictures.

After a change, run the notebook twice from top to bottom, because in the first run a line on stderr
says that kernels are compiled. Then clear all metadata that no test below requires.
"""

import json
from base64 import b64decode
from pathlib import Path

import matplotlib
import pytest

pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"
NOTEBOOK = json.loads(TOUR.read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def stored(cell):
    """Return the text that a cell has printed, and its pictures."""
    texts, pictures = [], []
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            assert output["name"] == "stdout"
            texts += output["text"]
        else:
            assert output["output_type"] == "display_data"  # not an error or a value
            pictures.append(b64decode(output["data"]["image/png"]))
    return "".join(texts), pictures


@pytest.fixture
def pyplot():
    """Return pyplot, which draws into memory, and restore its settings afterwards."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    with matplotlib.rc_context():
        yield pyplot
    pyplot.close("all")


def test_every_cell_gives_its_stored_output(pyplot, capsys):
    names = {}
    for number, cell in enumerate(CODE, 1):
        exec(compile("".join(cell["source"]), f"{TOUR.name}, code cell {number}", "exec"), names)
        text, pictures = stored(cell)
        assert capsys.readouterr().out == text
        assert len(pyplot.get_fignums()) == len(pictures)
        for figure in map(pyplot.figure, pyplot.get_fignums()):
            figure.draw_without_rendering()  # lays out the figure
        pyplot.close("all")


def test_the_pictures_are_small_pngs():
    pictures = [picture for cell in CODE for picture in stored(cell)[1]]
    assert len(pictures) == 6
    assert all(picture.startswith(b"\x89PNG\r\n\x1a\n") for picture in pictures)
    assert TOUR.stat().st_size < 500_000


def test_the_notebook_was_run_once_in_order_and_names_no_machine():
    assert [cell["execution_count"] for cell in CODE] == [*range(1, len(CODE) + 1)]
    assert [cell["metadata"] for cell in NOTEBOOK["cells"]] == [{}] * len(NOTEBOOK["cells"])
    assert NOTEBOOK["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
