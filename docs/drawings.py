# SPDX-License-Identifier: MIT
"""Write the drawings of the documentation: ``python docs/drawings.py``.

The drawings of the pages on kernels show numbers of cunorm's launch plans. All are so narrow that
their text of 12 pixels can be read on a telephone, and have a light background even in dark mode.
"""

from html import escape
from pathlib import Path

from cunorm._core.caps import Features, GpuCaps
from cunorm._core.dtypes import DTYPES, FLOAT32
from cunorm._group_norm.kernels import GroupForwardTypes
from cunorm._group_norm.layout import Samples
from cunorm._group_norm.tiling import VALUES, cuda_tiling
from cunorm._row_norm.cpu_launches import CPU_TEAM
from cunorm._row_norm.geometry import RowShape
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes
from cunorm._row_norm.launches import cuda_backward
from cunorm._row_norm.tiling import cuda_team

FOLDER = Path(__file__).parent / "_static" / "drawings"
PLAIN, BLUE, ORANGE, GREEN, VIOLET = "#ffffff", "#cfe3f7", "#fcdcb6", "#d2ebcf", "#e4d9f4"
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="350" height="{0}" viewBox="0 0 350 {0}"
 font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#1f2933">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
 orient="auto"><path d="M0 0L8 4L0 8Z"/></marker></defs>
<rect width="350" height="{0}" rx="6" fill="#f7f7f4"/>
"""

# The limits of an H100, and the calls whose plans are drawn.
GPU = GpuCaps(132, "90", 2048, 227 << 10, 228 << 10, 50 << 20, Features(True, True))
ROWS, SAMPLE = RowShape(16384, 4096), Samples(1, 64 * 64, 512, 32, channels_last=True)
FORWARD = ForwardTypes(**dict.fromkeys(("compute", "x", "y", "weight"), FLOAT32))
BACKWARD = BackwardTypes(
    **dict.fromkeys(("compute", "dy", "x", "dx", "weight"), FLOAT32), dweight=True
)
GROUP_FORWARD = GroupForwardTypes(FLOAT32, **dict.fromkeys(("x", "y"), DTYPES["bfloat16"]))


class _Drawing:
    def __init__(self, height: int) -> None:
        self.svg = HEAD.format(height)

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Draw lines of text; a line that begins with * is bold."""
        for i, line in enumerate(text.splitlines()):
            bold = ' font-weight="bold"' if line.startswith("*") else ""
            attributes = f'x="{x:g}" y="{y + 16 * i:g}" text-anchor="{anchor}"{bold}'
            self.svg += f"<text {attributes}>{escape(line.lstrip('*'))}</text>\n"

    def box(self, x: float, y: float, w: float, h: float, text: str, fill: str = PLAIN) -> None:
        attributes = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"'
        self.svg += f'<rect {attributes} fill="{fill}" stroke="#52606d"/>\n'
        self.text(x + w / 2, y + h / 2 + 4 - 8 * text.count("\n"), text, "middle")

    def arrow(self, x: float, y: float, x2: float, y2: float) -> None:
        line = f"M{x:g} {y:g}L{x2:g} {y2:g}"
        self.svg += f'<path d="{line}" stroke="#52606d" marker-end="url(#tip)"/>\n'


def _source() -> _Drawing:
    d, team = _Drawing(350), cuda_team(FORWARD, ROWS.width, GPU.features)
    macros = "X_T=fp32  Y_T=fp32  WEIGHT_T=fp32\nRESIDUAL_T=absent  CENTER=false  …"
    d.box(10, 10, 330, 62, f"*kernels_cu/row_norm_forward.cu\n{macros}", BLUE)
    shares = f"{team.threads_per_row} threads share a row,\n{team.packs * team.pack} numbers each"
    for x, compiler, width, held_by, runs in (
        (10, "NVRTC, by CuPy", ROWS.width, team, f"the GPU\n{shares}"),
        (182, "the C++ compiler", "0: an argument", CPU_TEAM, "all cores\na thread takes a row"),
    ):
        d.arrow(x + 79, 72, x + 79, 98)
        macros = f"WIDTH={width}\nPACK={held_by.pack}  PACKS={held_by.packs}"
        d.box(x, 100, 158, 60, f"*{compiler}\n{macros}", ORANGE)
        d.arrow(x + 79, 160, x + 79, 186)
        d.box(x, 188, 158, 60, f"*on {runs}", GREEN)
        d.arrow(x + 79, 248, x + 79, 292)
    d.text(97, 274, "or a software GPU")
    d.box(10, 294, 330, 44, "*cunorm.reference\nfloat64; the tests compare both with it", VIOLET)
    return d


def _row_packs() -> _Drawing:
    d, team = _Drawing(302), cuda_team(FORWARD, ROWS.width, GPU.features)
    threads, size = team.threads_per_row, team.pack * 4
    d.text(10, 22, f"*a row: {ROWS.width} float32, {ROWS.width // team.pack} packs of {size} bytes")
    for i in range(team.pack):
        d.box(60 + 32 * i, 34, 32, 24, f"x{i}", BLUE)
    d.text(200, 50, "is pack 0")
    d.text(10, 84, "thread")
    fills = {0: BLUE, 1: ORANGE, 2: GREEN, -1: PLAIN, threads - 1: VIOLET}
    for column, (thread, fill) in enumerate(fills.items()):
        d.text(88 + 56 * column, 84, "…" if thread < 0 else f"*{thread}", "middle")
        for row, load in enumerate((0, 1, 2, -1, team.packs - 1)):
            d.text(10, 113 + 30 * row, f"load {load + 1}" if column == 0 <= load else "")
            pack = "…" if min(thread, load) < 0 else str(thread + load * threads)
            d.box(60 + 56 * column, 94 + 30 * row, 56, 30, pack, fill)
    held = f"A thread holds {team.packs} packs: {team.packs * team.pack} numbers in registers."
    d.text(10, 268, f"{held}\nA load of a warp, 32 threads, is {32 * size} contiguous bytes.")
    return d


def _row_teams() -> _Drawing:
    d = _Drawing(370)
    lanes, block, cluster = (cuda_team(FORWARD, 1 << bits, GPU.features) for bits in (8, 12, 15))
    rows, warps, blocks = lanes.rows_per_block, block.threads // 32, cluster.cluster
    d.text(10, 22, f"*256 columns: {lanes.threads_per_row} lanes a row, {rows} rows a block")
    for row in range(rows):
        d.box(10 + 330 / rows * row, 32, 330 / rows, 34, f"row {row}", (BLUE, GREEN)[row // 2 % 2])
    d.text(10, 84, f"{rows // 4} rows a warp. The lanes of a row exchange sums.")
    d.text(10, 132, f"*4096 columns: a block of {block.threads} threads a row")
    for i in range(warps):
        d.box(10 + 330 / warps * i, 142, 330 / warps, 34, f"warp {i}", BLUE)
    d.text(10, 194, "Lanes of a warp exchange sums. Then warps\nexchange sums in shared memory.")
    d.text(10, 258, f"*32768 columns: a cluster of {blocks} blocks a row")
    for i in range(blocks):
        d.box(10 + 86 * i, 268, 72, 44, f"block {i}\n{cluster.threads // 32} warps", BLUE)
        if i:
            d.arrow(86 * i - 4, 282, 86 * i + 9, 282)
            d.arrow(86 * i + 10, 298, 86 * i - 3, 298)
    senders = cluster.threads_per_row // 32
    d.text(10, 332, f"Each of {senders} warps stores its sum to the shared\nmemory of every block.")
    return d


def _row_streamed() -> _Drawing:
    d, width = _Drawing(164), 32768
    team = cuda_team(FORWARD, width)  # without clusters
    d.text(10, 22, f"*a row: {width} float32, in chunks of {team.chunk}")
    for i, first in enumerate(range(0, width, team.chunk), start=1):
        columns = min(team.chunk, width - first)
        d.box(10 + 330 * first / width, 58, 330 * columns / width, 34, str(i), BLUE)
    d.text(10, 46, "first pass: sums")
    d.arrow(120, 42, 338, 42)
    d.text(340, 112, "second pass: y", "end")
    d.arrow(236, 108, 12, 108)
    d.text(10, 146, f"A chunk: {team.threads} threads, {team.packs} packs of {team.pack} each.")
    return d


def _backward_sums() -> _Drawing:
    d, launch = _Drawing(374), cuda_backward(BACKWARD, ROWS, 4, GPU).launch
    parts = launch.parts
    d.text(10, 22, f"*{ROWS.rows} rows of {ROWS.width} float32, {GPU.sm_count} multiprocessors")
    d.text(94, 44, f"{launch.grid} blocks walk rows", "middle")
    d.text(277, 44, "partial sums", "middle")
    for y, block, fill in ((54, 0, BLUE), (106, 1, ORANGE), (178, parts - 1, VIOLET)):
        walked = ", ".join(str(block + i * parts) for i in range(3))
        d.box(10, y, 168, 44, f"*block {block}\nrows {walked}, …", fill)
        d.arrow(178, y + 22, 212, y + 22)
        d.box(214, y + 8, 126, 28, f"row of {ROWS.width}", fill)
    d.text(94, 168, "…", "middle")
    d.text(277, 240, f"workspace: {launch.sums_size / 2**18:.1f} MiB", "middle")
    d.arrow(277, 246, 277, 268)
    text = f"*param_grad\nadds up {parts} numbers for each column,\nin float64"
    d.box(10, 270, 330, 62, text, GREEN)
    d.arrow(175, 332, 175, 348)
    d.text(175, 364, "*dweight, rounded once", "middle")
    return d


def _group_tiles() -> _Drawing:
    d, of_sample = _Drawing(352), f"{SAMPLE.positions} positions, {SAMPLE.channels} channels"
    d.text(10, 22, f"*a sample: {of_sample},\n*{SAMPLE.groups} groups, bfloat16")
    for x, layout, axes in (
        (10, SAMPLE, "channels →  positions ↓"),
        (188, SAMPLE._replace(channels_last=False), "positions →  channels ↓"),
    ):
        tiling, is_last = cuda_tiling(GROUP_FORWARD, layout, GPU), layout.channels_last
        groups, parts = tiling.unit_groups, tiling.parts
        units = SAMPLE.groups // groups
        d.text(x, 64, f"*channels {'last' if is_last else 'first'}\n{axes}")
        for tile in range(units * parts):
            unit, part = divmod(tile, parts)
            fill = PLAIN if unit != 1 else ORANGE if part == 1 else BLUE
            (column, columns), (row, rows) = ((unit, units), (part, parts))[:: 1 if is_last else -1]
            box = (x + 152 / columns * column, 90 + 152 / rows * row, 152 / columns, 152 / rows)
            d.box(*box, "", fill)
        channels = f"unit: {groups * SAMPLE.group_channels} channels,\n{groups} of 32 groups"
        kib = tiling.shared(GROUP_FORWARD, is_last) >> 10
        tile_of = f"part: {tiling.part_positions} positions\ntile: {kib} KiB"
        blocks = f"cluster: {tiling.cluster} blocks\n{units * parts} blocks a sample"
        d.text(x, 262, f"{channels}\n{tile_of}\n{blocks}")
    return d


def _group_passes() -> _Drawing:
    d, load, write = _Drawing(286), "load\nx", "WRITE\ny"
    find, combine = "FIND\nown sums", "COMBINE\nall sums"
    d.text(10, 22, "*one launch: a cluster has all tiles of a unit")
    d.text(10, 98, "Between FIND and COMBINE blocks send each")
    d.text(10, 114, f"other {VALUES} values of each group.")
    d.text(10, 150, "*two launches")
    d.box(200, 154, 140, 60, f"*workspace\n{VALUES} values of a group\nfrom each part")
    d.arrow(168, 184, 198, 184)
    d.arrow(270, 214, 270, 226)
    fills = {load: BLUE, find: ORANGE, combine: GREEN, write: VIOLET}
    for x, y, steps in (
        (10, 34, fills),
        (10, 162, [load, find]),
        (96, 228, [load, combine, write]),
    ):
        for i, step in enumerate(steps):
            d.box(x + 86 * i, y, 72, 44, f"*{step}", fills[step])
            if i:
                d.arrow(x + 86 * i - 14, y + 22, x + 86 * i - 1, y + 22)
    return d


def _split_rows() -> _Drawing:
    d = _Drawing(568)
    d.text(10, 22, "*x: rows whose columns three ranks share")
    fills, places = (BLUE, ORANGE, GREEN), [10 + 114 * rank for rank in range(3)]
    for rank, (x, width) in enumerate(((10, 130), (140, 110), (250, 90))):
        d.box(x, 32, width, 30, f"rank {rank}", fills[rank])
    for y, found, text, order, result in (
        (88, "row_moments", "*forward: each rank sends, for a row,\n", "in rank order", "y"),
        (338, "…backward_sums", "*backward: each rank sends, for a row,\n", "alike on all", "dx"),
    ):
        sent = "mean, correction, m2" if result == "y" else "sum_dr, sum_r_dr"
        of_rms, size = sent.rpartition(", ")[2], 12 if result == "y" else 8
        d.text(10, y, f"{text}{sent}: {size} bytes (RMS: {of_rms}, 4 bytes)")
        for rank, (x, fill) in enumerate(zip(places, fills, strict=True)):
            d.box(x, y + 28, 102, 34, found, fill)
            for other in places:
                d.arrow(x + 51, y + 62, other + 51 + 14 * (rank - 1), y + 116)
            d.box(x, y + 118, 102, 46, f"*{'combine' if result == 'y' else 'add'}\n{order}", VIOLET)
            d.arrow(x + 51, y + 164, x + 51, y + 182)
            d.box(x, y + 184, 102, 34, f"own part of {result}", fill)
    return d


DRAWINGS = (_source, _row_packs, _row_teams, _row_streamed, _backward_sums)
DRAWINGS += (_group_tiles, _group_passes, _split_rows)


def files() -> dict[str, str]:
    """Return the text of each file, by its name."""
    names = [f"{draw.__name__[1:].replace('_', '-')}.svg" for draw in DRAWINGS]
    return {name: f"{draw().svg}</svg>\n" for name, draw in zip(names, DRAWINGS, strict=True)}


if __name__ == "__main__":
    for name, text in files().items():
        FOLDER.joinpath(name).write_text(text, encoding="utf-8")
