# SPDX-License-Identifier: MIT
"""The columns of the static table that come from the SASS: counts and predictions."""

from __future__ import annotations

from bench.plans.model import Gpu, copy_time
from bench.plans.rounds import Shares

COLUMNS = (
    *("late_loads", "instructions", "issue_share", "overlap_share", "traffic_share"),
    *("waves_share", "prediction", "call_prediction", "microseconds", "limit"),
)


def launch_columns(found: Shares) -> dict[str, str]:
    """Return the columns of a launch."""
    return {
        "issue_share": f"{found.issue:.2f}",
        "overlap_share": f"{found.overlap:.2f}",
        "traffic_share": f"{found.traffic:.2f}",
        "waves_share": f"{found.waves:.2f}",
        "prediction": f"{found.prediction:.3f}",
        "limit": found.limit,
    }


def call_columns(gpu: Gpu, moved: float, time: float) -> dict[str, str]:
    """Return the columns of a call, given its seconds and the bytes that it must move."""
    share = min(1.0, copy_time(gpu, moved) / time)
    return {"call_prediction": f"{share:.3f}", "microseconds": f"{1e6 * time:.1f}"}
