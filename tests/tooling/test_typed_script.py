# SPDX-License-Identifier: MIT
"""Type checkers find exactly the errors in a user's script; types list what arguments accept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import cunorm
from tests.support.internals import ACTIVATIONS, DTYPES, LAYOUTS, _types
from tests.support.processes import ROOT, python

SCRIPT = str(Path(__file__).with_name("typed_script.py"))
X = np.ones((2, 3), np.float32)


# Modules that define no type that the script uses: reading them takes 15 s.
CONFIG = """[mypy]
[mypy-torch._inductor.*,torch._dynamo.*,torch._functorch.*,torch._higher_order_ops.*]
follow_imports = skip
[mypy-torch.ao.*,torch.distributed.*,torch.distributions.*,torch.fx.*,torch.onnx.*,torch.utils.*]
follow_imports = skip
[mypy-jaxlib.mlir.*,jaxlib.mosaic.*,jax._src.*]
follow_imports = skip
[mypy-jax._src.basearray]
follow_imports = silent
"""


MYPY = ("--strict", "--follow-imports=silent", "--cache-dir=/dev/null")


@pytest.mark.parametrize(("checker", "options"), [("mypy", MYPY), ("pyright", ())])
def test_a_type_checker_finds_the_errors_of_the_script_and_no_others(checker, options, tmp_path):
    for name in (checker, "torch", "jax"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    (tmp_path / "mypy.ini").write_text(CONFIG)
    options += (f"--config-file={tmp_path / 'mypy.ini'}",) if options else ()
    found = python("-m", checker, *options, SCRIPT, MYPYPATH=str(ROOT))
    assert found.returncode == 0, found.stdout + found.stderr


def names_in_the_error(**wrong: str) -> list[str]:
    with pytest.raises(ValueError, match="expected") as caught:
        cunorm.rms_norm_backward(X, X, gate=X, rstd=X[:, 0], **wrong)
    return re.findall(r"'(\w+)'", str(caught.value).partition("expected")[2])


def test_types_list_the_names_that_calls_accept():
    assert [*get_args(_types.Activation)] == [*ACTIVATIONS]
    assert [*get_args(_types.Activation)] == names_in_the_error(gate_activation="?")
    assert [*get_args(_types.GatePosition)] == names_in_the_error(gate_position="?")
    assert [*get_args(_types.Need)] == names_in_the_error(needs=("?",))
    assert [*get_args(_types.Layout)] == [*LAYOUTS]
    assert [*get_args(_types.DTypeName)] == [*DTYPES]
