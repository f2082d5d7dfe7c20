# SPDX-License-Identifier: MIT
"""Memory that cannot be that of results or a workspace is refused, and nothing is written to it."""

from __future__ import annotations

from tests.arguments.wrong_memory import TABLE
from tests.support.refused import check_refused, rows_of


@rows_of(TABLE)
def test_memory_that_cannot_be_a_results_or_a_workspace_is_refused(cases):
    check_refused(cases)
