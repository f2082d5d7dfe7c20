# SPDX-License-Identifier: MIT
"""The tests with many costly cases, of which a run of the whole suite takes a share."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterable

import pytest

_IS_WHOLE = "CUNORM_TESTS_WHOLE"  # set for a run of the whole suite, also in its workers
# Of each test of a file, the whole suite runs one case in this many, `-m exhaustive` the others.
# A run of named files has all cases.
ONE_IN = {
    "arguments/test_wrong_input.py": 18,
    "arrays/test_kinds.py": 5,
    "backends/test_cpu_build.py": 3,
    "backends/test_instruction_sets.py": 4,
    "backends/test_nvrtc.py": 4,
    "backends/test_warmup.py": 8,
    "backends/test_warmup_running.py": 2,
    "docs/test_examples.py": 3,
    "docs/test_pages.py": 4,
    "emulation/test_bits.py": 8,
    "emulation/test_bytes.py": 9,
    "emulation/test_modulated_groups.py": 3,
    "emulation/test_modulated_rows.py": 3,
    "emulation/test_operands.py": 6,
    "emulation/test_pairs.py": 3,
    "emulation/test_plans.py": 15,
    "emulation/test_quantized.py": 5,
    "emulation/test_split.py": 5,
    "fuzz/test_devices.py": 4,
    "fuzz/test_examples.py": 8,
    "fuzz/test_relations.py": 6,
    "fuzz/test_torch_programs.py": 3,
    "gpu/test_clusters.py": 6,
    "jax/test_branch_gates.py": 18,
    "jax/test_frozen_operands.py": 12,
    "jax/test_gradients.py": 5,
    "jax/test_modulation.py": 15,
    "jax/test_quantized.py": 5,
    "jax/test_transforms.py": 8,
    "memory/test_accumulate.py": 5,
    "memory/test_in_place.py": 6,
    "memory/test_out.py": 12,
    "memory/test_quantized.py": 3,
    "memory/test_reads.py": 3,
    "memory/test_remembered.py": 12,
    "memory/test_repeated_calls.py": 5,
    "memory/test_workspace.py": 18,
    "numerics/test_conversions.py": 6,
    "numerics/test_tolerance.py": 3,
    "operators/test_alone.py": 15,
    "operators/test_combinations.py": 8,
    "operators/test_cpu_plans.py": 12,
    "operators/test_levels.py": 9,
    "operators/test_modulated_groups.py": 18,
    "operators/test_modulated_rows.py": 21,
    "operators/test_named_norms.py": 12,
    "operators/test_needs.py": 14,
    "operators/test_quantized.py": 9,
    "operators/test_quantized_cpu.py": 5,
    "operators/test_results.py": 5,
    "operators/test_roundings.py": 12,
    "operators/test_special_data.py": 8,
    "tooling/test_bench_static.py": 3,
    "tooling/test_demo.py": 8,
    "torch/test_branch_gates.py": 21,
    "torch/test_gradients.py": 14,
    "torch/test_modulation.py": 12,
    "torch/test_modules.py": 3,
    "torch/test_quantized.py": 6,
    "torch/test_quantized_transforms.py": 5,
    "torch/test_replace.py": 5,
    "torch/test_replace_around.py": 3,
    "torch/test_tensors.py": 9,
    "torch/test_transforms.py": 14,
}


def note(config: pytest.Config) -> None:
    """Note whether this is a run of the whole suite; workers have the note of their controller."""
    if not hasattr(config, "workerinput"):
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        os.environ[_IS_WHOLE] = "yes" if is_whole else ""


def is_whole() -> bool:
    return bool(os.environ[_IS_WHOLE])


def leave_out(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that a whole run leaves out; the choice is the same in every run."""
    if not is_whole():
        return
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for test, found in cases.items():
        share = ONE_IN.get(test.removeprefix("tests/").partition("::")[0], 1)
        for item in random.Random(test).sample(found, len(found) - -(-len(found) // share)):
            item.add_marker(pytest.mark.exhaustive)
