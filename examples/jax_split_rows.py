# SPDX-License-Identifier: MIT
"""Split an attention of OLMo 2 over devices of JAX, and compare it with the whole layer.

Each device has some of the heads. OLMo 2 normalises the queries of all heads as one row, and the
keys, so a device has only a part of each row: ``cunorm.jax.rms_norm(…, axis_name="heads")`` inside
of ``jax.shard_map`` exchanges one number for each row and device. The script compares the output
and all gradients with those of one device that has all heads, and shows what norms of the parts
alone would give. It prints and draws the differences, and exits with 1 if those of the split layer
are too large. On a CPU, JAX divides the CPU into the devices.

Usage: ``python examples/jax_split_rows.py --devices 4 --output jax_split_rows.png``
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, P
from options import parse, size
from split_rows.report import QUICK, check_sizes, command_line, drawn, report

import cunorm.jax

COLUMNS, PART = P(None, "heads"), P("heads")
SPECS = dict.fromkeys(("q", "k", "v"), COLUMNS) | {"out": P("heads", None), "x": P()}
SPECS |= {"q_norm": PART, "k_norm": PART}
Arrays = dict[str, Array]


def attention(width_of_head: int, axis_name: str | None, of: Arrays) -> Array:
    """Return the causal attention of the heads of which `of` has the parameters.

    OLMo 2 normalises the queries of all heads together, and the keys: with an axis name, a device
    has only a part of these rows. (Rotary positions are left out.)
    """
    q, k, v = (of["x"] @ of[name] for name in ("q", "k", "v"))
    q = cunorm.jax.rms_norm(q, of["q_norm"], axis_name=axis_name)
    k = cunorm.jax.rms_norm(k, of["k_norm"], axis_name=axis_name)
    heads = [one.reshape(*one.shape[:2], -1, width_of_head) for one in (q, k, v)]
    mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
    return mixed.reshape(q.shape) @ of["out"]


def differentiated(layer: Any, arrays: Arrays) -> Arrays:
    """Return y and all gradients."""
    leaves = {name: one for name, one in arrays.items() if name != "dy"}
    y, derive = jax.vjp(layer, leaves)
    (found,) = derive(arrays["dy"])
    return {"y": y, **{f"d{name}": found[name] for name in leaves}}


def split(width_of_head: int, mesh: Any, axis_name: str | None) -> Any:
    """Return the layer whose heads are split over the devices of a mesh."""

    def part(of: Arrays) -> Array:
        return jax.lax.psum(attention(width_of_head, axis_name, of), "heads")

    return jax.shard_map(part, mesh=mesh, in_specs=(SPECS,), out_specs=P())


def devices_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Any]:
    """Return the devices; a CPU is divided into them."""
    with suppress(RuntimeError):  # this process has used its devices before
        jax.config.update("jax_num_cpu_devices", options.devices)
    try:
        found = jax.devices(options.device)
    except RuntimeError as error:
        parser.error(f"--device {options.device}: {error}")
    if len(found) < options.devices and options.device is None:
        found = jax.devices("cpu")
    if len(found) < options.devices:
        parser.error(f"--devices is {options.devices}, expected at most {len(found)}")
    return found[: options.devices]


def main(argv: list[str] | None = None) -> int:
    """Run the layer whole and split, compare, and draw; return the exit status."""
    parser = command_line(__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=size, default=4)
    options = parse(parser, argv, picture="jax_split_rows.png", quick=QUICK)
    check_sizes(parser, options, options.devices)
    mesh = jax.sharding.Mesh(devices_of(parser, options), "heads")
    head = options.width // options.heads
    with jax.default_device(mesh.devices[0]), jax.default_matmul_precision("highest"):
        arrays = {name: jnp.asarray(one) for name, one in drawn(options).items()}
        layers = [partial(attention, head, None)]
        layers += [split(head, mesh, axis_name) for axis_name in ("heads", None)]
        run = jax.jit(differentiated, static_argnums=0)
        right, of_rows, of_parts = (run(layer, arrays) for layer in layers)
        return report(f"{options.devices} devices", right, of_rows, of_parts, options)


if __name__ == "__main__":
    sys.exit(main())
