# SPDX-License-Identifier: MIT
"""How a GPU's threads share the rows of a row norm; a CPU's team is one thread.

It depends on the width, the operands' dtypes and the GPU's features alone: a row's sums are taken
in the order that its team gives them.
"""

from __future__ import annotations

from typing import NamedTuple

from cunorm._builds import BackwardTypes, ForwardTypes, Macros
from cunorm._features import NONE, Features

ACCESS_BYTES = 16
# Threads that share a row, by the greatest width they serve.
_FORWARD_TEAMS = ((64, 8), (128, 16), (3072, 32), (6144, 64), (16384, 128), (32768, 256))
_BACKWARD_TEAMS = ((64, 8), (128, 16), (256, 32), (512, 64), (4096, 128), (16384, 256))
# Bytes of a row that a thread may keep in registers, by threads of the block: a block has 64 Ki
# registers, a thread at most 255.
_KEPT_BYTES = {8: 512, 16: 512, 32: 512, 64: 512, 128: 512, 256: 512, 512: 256, 1024: 64}
# Activations take registers too, and with more than this of what is kept ptxas spills: threads of a
# row, bytes that are left to a thread, its elements in a gated forward and a gated backward, and
# bytes of a pack, once converted, of a gated backward that streams.
_GATED_THREADS, _GATED_SPARE = 256, 32
_GATED_ELEMENTS, _GATED_BACKWARD_ELEMENTS, _GATED_BACKWARD_PACK_BYTES = 64, 24, 16
_STREAMED_THREADS = 512
# Bytes of a pack once converted, of which a thread has several in registers at a time.
PACK_BYTES = 32
# Blocks of a cluster: threads of each, bytes of a row that it keeps in a forward, elements that it
# keeps in a backward, and how many there are at most; and packs of a thread, where there is a gate.
# Where a GPU has no room for so many blocks, half as many of twice the threads add in the same
# order, that of the cluster's warps. Elements that a thread keeps at most, by the threads of its
# block, in a forward and in a backward: with more, ptxas spills.
_CLUSTER_THREADS, _CLUSTER_BYTES, _CLUSTER_ELEMENTS, _MOST_BLOCKS = 256, 32 << 10, 8 << 10, 16
_GATED_CLUSTER_PACKS = 32
_CLUSTER_KEPT = {256: (128, 128), 512: (56, 24)}


class Team(NamedTuple):
    """How threads share the rows: the constants of `struct Team` in row.cuh."""

    threads: int  # of a block
    threads_per_row: int  # more: those of a cluster of blocks
    pack: int
    packs: int  # 0: streamed

    @property
    def rows_per_block(self) -> int:
        """Return how many rows a block, or a cluster of blocks, takes at a time."""
        return max(1, self.threads // self.threads_per_row)

    @property
    def cluster(self) -> int:
        """Return how many blocks share a row."""
        return max(1, self.threads_per_row // self.threads)

    def macros(self, width: int, groups: int, access: int) -> Macros:
        """Return the part of the build that says how rows are walked; 0: known at run time."""
        return (
            ("WIDTH", str(width)),
            ("GROUPS", str(groups)),
            ("THREADS", str(self.threads)),
            ("THREADS_PER_ROW", str(self.threads_per_row)),
            ("PACK", str(self.pack)),
            ("PACKS", str(self.packs)),
            ("ACCESS", str(access)),
            *((("CLUSTER", str(self.cluster)),) if self.cluster > 1 else ()),
        )


def cuda_team(types: ForwardTypes | BackwardTypes, width: int, features: Features = NONE) -> Team:
    """Return how a GPU's threads share rows of a width."""
    itemsizes = [dtype.itemsize for dtype in types.row_operands() if dtype is not None]
    pack = min(ACCESS_BYTES // min(itemsizes), PACK_BYTES // types.compute.itemsize, width & -width)
    team = _block_team(types, width, pack)
    if features.clusters and (team is None or width > _block_share(types)):
        team = _cluster_team(types, width, pack, features.largest_cluster) or team
    if team is not None:
        return team
    if isinstance(types, BackwardTypes) and types.gate is not None:
        pack = min(pack, _GATED_BACKWARD_PACK_BYTES // types.compute.itemsize)
    return Team(_STREAMED_THREADS, _STREAMED_THREADS, pack, packs=0)


def _block_team(types: ForwardTypes | BackwardTypes, width: int, pack: int) -> Team | None:
    """Return how a block, or a part of one, keeps a row; None where it is too long."""
    teams = _FORWARD_TEAMS if isinstance(types, ForwardTypes) else _BACKWARD_TEAMS
    threads_per_row = next((threads for limit, threads in teams if width <= limit), None)
    while threads_per_row is not None and threads_per_row in _KEPT_BYTES:
        packs = -(-width // (threads_per_row * pack))
        if _fits(types, threads_per_row, packs * pack):
            threads = max(threads_per_row, 128) if threads_per_row <= 32 else threads_per_row
            return Team(threads, threads_per_row, pack, packs)
        threads_per_row *= 2
    return None


def _block_share(types: ForwardTypes | BackwardTypes) -> int:
    """Return how many elements of a row a block of a cluster takes, rather than more."""
    if isinstance(types, ForwardTypes):
        return _CLUSTER_BYTES // types.kept_bytes()
    return _CLUSTER_ELEMENTS


def _cluster_team(
    types: ForwardTypes | BackwardTypes, width: int, pack: int, largest: int
) -> Team | None:
    """Return how a cluster keeps a row; None where it is too long: in a backward, ptxas spills."""
    forward = isinstance(types, ForwardTypes)
    share, blocks = _block_share(types), 2
    while blocks <= _MOST_BLOCKS:
        threads = blocks * _CLUSTER_THREADS
        packs = -(-width // (threads * pack))
        short = width <= blocks * share or (forward and blocks == _MOST_BLOCKS)
        few = types.gate is None or packs <= _GATED_CLUSTER_PACKS
        of_block = threads // min(blocks, largest)
        kept = packs * pack <= _CLUSTER_KEPT[of_block][0 if forward else 1]
        if short and few and kept and _fits(types, of_block, packs * pack):
            return Team(of_block, threads, pack, packs)
        blocks *= 2
    return None


def _fits(types: ForwardTypes | BackwardTypes, threads: int, elements: int) -> bool:
    """Whether a thread's registers hold so many elements of a row, beside what is computed."""
    kept = elements * types.kept_bytes()
    if types.gate is None:
        return kept <= _KEPT_BYTES[threads]
    limit = _GATED_ELEMENTS if isinstance(types, ForwardTypes) else _GATED_BACKWARD_ELEMENTS
    within = elements <= limit and threads <= _GATED_THREADS
    return within and kept + _GATED_SPARE <= _KEPT_BYTES[threads]
