# SPDX-License-Identifier: MIT
"""A fixture for tests that compile with inductor."""

import pytest


@pytest.fixture
def inductor(tmp_path):
    """Use an empty cache: inductor's key does not depend on the implementation of operators.

    Inductor also skips its tests of instruction sets and its precompiled header, which are slow.
    """
    import torch

    torch.compiler.reset()
    quick = {"cpp.vec_isa_ok": False}
    if hasattr(torch._inductor.config, "cpp_cache_precompile_headers"):
        quick["cpp_cache_precompile_headers"] = False
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(quick):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        yield
    torch.compiler.reset()
