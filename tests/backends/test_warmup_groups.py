# SPDX-License-Identifier: MIT
"""A warmup that is told no rows serves any number of them, also of rows in several groups."""

import numpy as np
import pytest

import cunorm
from tests.support import described

FUNCTIONS = ("rms_norm_forward", "rms_norm_backward")
# So close to each other that of one of them, whatever the cache, six rows are too large for it and
# five are not.
WIDTHS = [393_216, *(768 * round(200 * 1.3**step) for step in range(9))]


@pytest.mark.parametrize("groups", [2, 3, 4, 16])
def test_a_warmup_that_is_told_no_rows_serves_few_long_rows_in_groups(groups, monkeypatch):
    loads = described.loads(monkeypatch)
    cunorm.warmup(FUNCTIONS, WIDTHS, "float32", device="cpu", groups=groups, progress=False)
    warmed = len(loads)
    for rows in range(1, 17):
        for width in WIDTHS:
            x, weight = np.empty((rows, width), np.float32), np.empty(width, np.float32)
            saved = cunorm.rms_norm_forward(x, weight, groups=groups)
            cunorm.rms_norm_backward(x, x, weight, rstd=saved.rstd, groups=groups)
    assert len(loads) == warmed
