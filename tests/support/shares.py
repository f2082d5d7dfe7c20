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
    "arguments/test_wrong_input.py": 36,
    "arrays/test_kinds.py": 5,
    "backends/test_cpu_build.py": 6,
    "backends/test_faults.py": 2,
    "backends/test_features.py": 7,
    "backends/test_instruction_sets.py": 4,
    "backends/test_nvrtc.py": 18,
    "backends/test_threads.py": 2,
    "backends/test_warmup.py": 8,
    "backends/test_warmup_running.py": 2,
    "docs/test_examples.py": 4,
    "docs/test_pages.py": 40,
    "emulation/test_bits.py": 12,
    "emulation/test_bytes.py": 13,
    "emulation/test_jvp.py": 2,
    "emulation/test_modulated_groups.py": 10,
    "emulation/test_modulated_rows.py": 5,
    "emulation/test_operands.py": 9,
    "emulation/test_pairs.py": 5,
    "emulation/test_plans.py": 30,
    "emulation/test_quantized.py": 7,
    "emulation/test_split.py": 14,
    "emulation/test_strided.py": 3,
    "fuzz/test_devices.py": 6,
    "fuzz/test_examples.py": 12,
    "fuzz/test_relations.py": 9,
    "fuzz/test_torch_programs.py": 30,
    "gpu/test_clusters.py": 9,
    "jax/test_axes.py": 4,
    "jax/test_branch_gates.py": 50,
    "jax/test_derivatives.py": 50,
    "jax/test_derived_transforms.py": 480,
    "jax/test_frozen_operands.py": 34,
    "jax/test_gradients.py": 7,
    "jax/test_modulation.py": 21,
    "jax/test_nnx.py": 24,
    "jax/test_quantized.py": 7,
    "jax/test_transforms.py": 12,
    "jax/test_where.py": 10,
    "memory/test_accumulate.py": 7,
    "memory/test_in_place.py": 18,
    "memory/test_out.py": 17,
    "memory/test_quantized.py": 5,
    "memory/test_reads.py": 5,
    "memory/test_remembered.py": 17,
    "memory/test_repeated_calls.py": 7,
    "memory/test_workspace.py": 80,
    "numerics/test_conversions.py": 27,
    "numerics/test_tolerance.py": 5,
    "operators/test_alone.py": 40,
    "operators/test_axes.py": 12,
    "operators/test_channel_axes.py": 8,
    "operators/test_combinations.py": 48,
    "operators/test_cpu_plans.py": 30,
    "operators/test_jvp.py": 6,
    "operators/test_levels.py": 26,
    "operators/test_modulated_groups.py": 52,
    "operators/test_modulated_rows.py": 60,
    "operators/test_named_norms.py": 30,
    "operators/test_needs.py": 20,
    "operators/test_quantized.py": 26,
    "operators/test_quantized_cpu.py": 7,
    "operators/test_results.py": 7,
    "operators/test_roundings.py": 30,
    "operators/test_special_data.py": 20,
    "operators/test_split.py": 4,
    "tooling/test_bench_bytes.py": 5,
    "tooling/test_bench_gpu_timings.py": 4,
    "tooling/test_bench_static.py": 3,
    "tooling/test_demo.py": 12,
    "tooling/test_main.py": 3,
    "torch/test_axes.py": 4,
    "torch/test_branch_gates.py": 60,
    "torch/test_compiled_derivatives.py": 8,
    "torch/test_derivatives.py": 16,
    "torch/test_forward_mode.py": 8,
    "torch/test_gradients.py": 40,
    "torch/test_modulation.py": 34,
    "torch/test_modules.py": 5,
    "torch/test_quantized.py": 18,
    "torch/test_quantized_transforms.py": 7,
    "torch/test_replace.py": 14,
    "torch/test_replace_around.py": 5,
    "torch/test_replace_calls.py": 11,
    "torch/test_replace_fused.py": 3,
    "torch/test_replace_images.py": 16,
    "torch/test_replace_models.py": 5,
    "torch/test_systems.py": 4,
    "torch/test_tensors.py": 13,
    "torch/test_tracing.py": 6,
    "torch/test_transforms.py": 40,
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
