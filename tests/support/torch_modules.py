# SPDX-License-Identifier: MIT
"""Operands of modules, and how near their results are to exact ones. It needs torch.

What is exact is computed by torch in float64, from the same numbers.
"""

from __future__ import annotations

import torch

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def drawn(*shape, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=F64) + 0.25).to(dtype)


def with_random_parameters(module):
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=2 + number))
    return module


def assert_near(actual, exact):
    """Hold a result to the exact one: to 32 roundings of the largest, and that of the store.

    Kernels make 8 roundings of the largest term in y and 16 in a gradient; of
    these sums of random numbers, the largest term is at most about twice the largest result.
    """
    dtype = actual.dtype
    wide = torch.finfo(torch.promote_types(dtype, F32)).eps / 2
    store = torch.finfo(dtype).eps / 2 if dtype in (BF16, F16) else 0.0
    bound = 32 * wide * exact.abs().max() + store * exact.abs()
    off = (actual.double() - exact).abs()
    assert (off <= bound).all(), f"{(off / bound).max():.3g} times the bound"
