"""Draws a results file: `python benchmarks/plot.py benchmarks/results/DEVICE.json`.

Writes DEVICE.svg beside it: for each row the share of the memory's speed that ours and each peer
reach (the limit's time over theirs, on a logarithmic scale).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

_COLOURS = {"jax_scan": "#1f77b4", "lax.associative_scan": "#ff7f0e", "lax.scan": "#7f7f7f"}
_DIRECTIONS = ("forward", "backward")


def main() -> int:
    source = Path(sys.argv[1])
    results = json.loads(source.read_text())
    mpl.rcParams["svg.hashsalt"] = "jax_scan"  # the same file from the same results
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(10, 4.5), layout="constrained")
    for ax, direction in zip(axes, _DIRECTIONS, strict=True):
        rows = [row for row in results["rows"] if row["direction"] == direction]
        for name, colour in _COLOURS.items():
            points = [(y, _share(row, name)) for y, row in enumerate(rows)]
            points = [(y, share) for y, share in points if share is not None]
            if points:
                ys, shares = zip(*points, strict=True)
                ax.scatter(shares, ys, color=colour, label=name, zorder=3)
        ax.set_yticks(range(len(rows)), [_label(row) for row in rows])
        ax.set_xscale("log")
        ax.axvline(1, color="black", linewidth=1)
        ax.grid(axis="x", alpha=0.3)
        ax.set_title(direction)
        ax.set_xlabel("limit / time")
    axes[0].invert_yaxis()
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"{results['device']}: share of an elementwise operation's speed")
    figure.savefig(source.with_suffix(".svg"), metadata={"Date": None})
    return 0


def _share(row: dict, name: str) -> float | None:
    us = row["ours_us"] if name == "jax_scan" else row["peers"].get(name)
    return row["limit_us"] / us if us else None


def _label(row: dict) -> str:
    shape = "x".join(map(str, row["shape"]))
    extra = "" if row["variant"] == "plain" else f", {row['variant']}"
    return f"{shape} {row['dtype']}{extra}"


if __name__ == "__main__":
    sys.exit(main())
