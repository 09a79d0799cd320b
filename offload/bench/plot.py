"""A picture of what was tried."""

from __future__ import annotations

import statistics
from pathlib import Path

from offload.bench.search import BLOCKS, DEPTHS
from offload.bench.subject import KIB, USES, Subject


def plot(it: Subject, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(USES), figsize=(10, 4), sharey=True, constrained_layout=True)
    for axis, mode in zip(axes, USES, strict=True):
        for backend, block in sorted({(s.backend, s.block_bytes) for s in it.tried}):
            points = sorted(
                (s.depth, statistics.median(v[mode]))
                for s, v in it.tried.items()
                if (s.backend, s.block_bytes) == (backend, block)
            )
            axis.plot(
                *zip(*points, strict=True),
                "o-" if backend == "io_uring" else "s--",
                color=f"C{BLOCKS.index(block)}",
                label=f"{backend}, {block // KIB} KiB",
            )
        axis.set(title=mode, xlabel="blocks in flight", xscale="log")
        axis.set_xticks((2, *DEPTHS), [str(depth) for depth in (2, *DEPTHS)])
        axis.minorticks_off()
    axes[0].set(ylabel="GiB/s", ylim=(0, None))  # once all is drawn: the axes share their scale
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(target, dpi=120)
