"""Draws a results file: `python benchmarks/plot.py benchmarks/results/DEVICE.json`.

Writes DEVICE.svg beside it: for each row the share of the memory's speed that ours and each peer
reach (the limit's time over theirs, on a logarithmic scale), and bytes per second by length.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

_DIRECTIONS = ("forward", "backward")
_OURS = "jax_scan"
_COLOURS = {
    _OURS: "#1f77b4",
    "lax.associative_scan": "#ff7f0e",
    "lax.scan": "#7f7f7f",
    "accelerated-scan Triton": "#2ca02c",
    "accelerated-scan warp": "#98df8a",
    "FLA chunk_hgrn": "#9467bd",
    "torch.compile associative_scan": "#d62728",
    "CUDA thread per channel": "#c7c7c7",
    "CUDA tiles": "#8c564b",
    "CUDA three passes": "#e377c2",
    "XLA elementwise": "#000000",
    "NumPy": "#bcbd22",
    "numba": "#17becf",
}
_LEAST = 0.01  # slower ones stand at the left edge


def main() -> int:
    draw(Path(sys.argv[1]))
    return 0


def draw(source: Path) -> None:
    results = json.loads(source.read_text())
    mpl.rcParams["svg.hashsalt"] = "jax_scan"  # the same file from the same results
    rows = results["rows"]
    by_length = [row for row in rows if row["case"] == "length"]
    groups = _groups([row for row in rows if row["case"] != "length"])
    heights = [max(2.0, 0.17 * len(groups))] + ([2.5] if by_length else [])
    figure = plt.figure(figsize=(11, sum(heights) + 1.2), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    left = figure.add_subplot(grid[0, 0])
    panels = (left, figure.add_subplot(grid[0, 1], sharey=left))
    for ax, direction in zip(panels, _DIRECTIONS, strict=True):
        _draw_shares(ax, direction, groups)
    left.set_yticks(range(len(groups)), list(groups), fontsize=7)
    left.set_ylim(len(groups) - 0.5, -0.5)
    panels[1].tick_params(labelleft=False)
    if by_length:
        _draw_lengths(figure.add_subplot(grid[1, :]), by_length)
    entries = {}
    for ax in panels:
        handles, labels = ax.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    entries = {name: entries[name] for name in _COLOURS if name in entries}
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"{results['device']}: share of an elementwise operation's speed")
    figure.savefig(source.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


def _groups(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By label the rows of both directions."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(_label(row), {})[row["direction"]] = row
    return found


def _draw_shares(ax: Any, direction: str, groups: dict[str, dict[str, Any]]) -> None:
    present = [(y, rows[direction]) for y, rows in enumerate(groups.values()) if direction in rows]
    for name, colour in reversed(_COLOURS.items()):
        points = [(y, _share(row, name)) for y, row in present]
        points = [(y, max(_LEAST, share)) for y, share in points if share]
        if points:
            ys, shares = zip(*points, strict=True)
            size = 30 if name == _OURS else 14
            ax.scatter(shares, ys, size, color=colour, label=name, zorder=3)
    ax.set_xscale("log")
    ax.set_xlim(_LEAST * 0.9, 1.3)
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.axvline(1, color="black", linewidth=1)
    ax.grid(alpha=0.3)
    ax.set_title(direction)
    ax.set_xlabel("limit / time")


def _draw_lengths(ax: Any, rows: list[dict[str, Any]]) -> None:
    lengths = [max(row["shape"]) for row in rows]
    ax.plot(
        lengths, [row["gb_per_s"] for row in rows], "o-", color=_COLOURS[_OURS], label="jax_scan"
    )
    limits = [row["gb_per_s"] / row["ratio"] for row in rows]
    ax.plot(lengths, limits, "o-", color="black", markersize=3, linewidth=1, label="limit")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.grid(alpha=0.3)
    ax.legend()
    ax.set_title("(1, L, 64) float32 forward")
    ax.set_xlabel("L")
    ax.set_ylabel("GB/s")


def _share(row: dict[str, Any], name: str) -> float | None:
    us = row["ours_us"] if name == _OURS else row["peers"].get(name)
    return row["limit_us"] / us if us and math.isfinite(us) else None


def _label(row: dict[str, Any]) -> str:
    shape = "x".join(map(str, row["shape"]))
    extra = "" if row["variant"] == "plain" else f", {row['variant']}"
    cores = f", {row['cores']} cores" if "cores" in row else ""
    return f"{shape} {row['dtype']}{extra}{cores}"


if __name__ == "__main__":
    sys.exit(main())
