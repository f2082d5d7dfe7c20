# SPDX-License-Identifier: MIT
"""Calls import no framework that the caller has not imported, and ml_dtypes only if needed."""

from __future__ import annotations

from tests.support.processes import in_process

SCRIPT = """
def imported(*names):
    return [name for name in names if name in sys.modules]

others = ("jax", "jaxlib", "cupy", "triton")
assert not imported("torch", "ml_dtypes", *others)
check(0)
assert not imported("torch", "ml_dtypes", *others)

sys.modules["ml_dtypes"] = None
x = np.ones((2, 8), np.float32)
assert cunorm.rms_norm(x, dtype="float16").dtype == np.float16
try:
    cunorm.rms_norm(x, dtype="bfloat16")
except TypeError as error:
    assert "pip install ml_dtypes" in str(error), error
else:
    raise AssertionError("no error")

try:
    import torch
except ImportError:
    sys.exit()
before = imported(*others)
import cunorm.torch
assert (cunorm.torch.rms_norm(torch.ones(600, 257, dtype=torch.bfloat16)) == 1).all()
assert (cunorm.rms_norm(torch.ones(600, 257, dtype=torch.bfloat16)) == 1).all()
assert imported(*others) == before
"""


def test_calls_import_no_framework_and_torchs_bfloat16_needs_no_ml_dtypes():
    in_process(SCRIPT)
