# SPDX-License-Identifier: MIT
"""The scales of rows with quantised results: of whole rows, or of blocks of columns."""

from cunorm._core.dtypes import FLOAT64, DType
from cunorm._core.tensor import Shape

BLOCK_STEP = 4  # columns; 32 lanes with packs of 4 have a block of 128


def check_blocks(function: str, block: int, width: int, is_last_axis: bool, compute: DType) -> None:
    """Check that rows may have scales of blocks: a warp then has all columns of a block."""
    if not is_last_axis:
        raise ValueError(f"{function}: block is {block}, expected axis -1 with it")
    if width % BLOCK_STEP:
        raise ValueError(
            f"{function}: block is {block} for rows of {width} elements, expected a multiple of "
            f"{BLOCK_STEP} elements: leave block out, or pad x"
        )
    if compute is FLOAT64:
        raise TypeError(
            f"{function}: block is {block} for float64, expected x and its residual stream in a "
            "narrower type"
        )


def scale_shape(x_shape: Shape, leading_axes: int, groups: int, block: int | None) -> Shape:
    """Return the shape of the scales of rows or, if they have blocks, of the blocks of each row."""
    ones = (1,) * (len(x_shape) - leading_axes - 1)
    blocks = 1 if block is None else -(-(x_shape[-1] // groups) // block)
    return (*x_shape[:leading_axes], *ones, groups * blocks)
