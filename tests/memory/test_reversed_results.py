# SPDX-License-Identifier: MIT
"""A result that is reversed lies before its first element, too."""

import numpy as np
import pytest

import cunorm


def test_a_reversed_result_that_overlaps_the_end_of_an_input_is_refused():
    memory = np.ones((10, 8), np.float32)
    with pytest.raises(ValueError, match="out overlaps x"):
        cunorm.rms_norm(memory[:6], out=memory[4:][::-1])
