"""The openb trace through `gangline simulate --protocol fgd`, beside the published FGD, as a table in Markdown."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from gangline.core.simulate import fgd
from gangline.core.simulate.protocols import Asked

#: of the published runs
SEEDS = tuple(range(42, 52))


def table(folder: Path, seeds: tuple[int, ...] = SEEDS) -> Iterator[str]:
    """Yield the lines of the table: GPU allocation on all lists in the folder, ours beside the published FGD, each line when it is known."""
    yield "| list | ours, % allocated (sd) | FGD published | difference | at 100 % arrived | FGD published | fragments, % | FGD published |"
    yield "|---|---|---|---|---|---|---|---|"
    known = _published(folder / "fgd_published.csv")
    nodes = folder / "openb_node_list_gpu_node.csv"
    with ProcessPoolExecutor() as pool:
        for tasks in sorted(folder.glob("openb_pod_list_*")):
            name = tasks.name.removeprefix("openb_pod_list_").partition(".")[0]
            runs = list(pool.map(_one, [nodes] * len(seeds), [tasks] * len(seeds), seeds))
            got = [run["allocated_pct"] for run in runs]
            at_100, fragments = mean(run["allocated_pct_at"]["100"] for run in runs), mean(run["fragmentation_pct"] for run in runs)
            then, there = known.get((name, "130")), known.get((name, "100"))
            cells = [name, f"{mean(got):.2f} ({pstdev(got):.2f})", _cell(then, 0), f"{mean(got) - then[0]:+.2f}" if then else "-"]
            cells += [f"{at_100:.2f}", _cell(there, 0), f"{fragments:.2f}", _cell(then, 1)]
            yield f"| {' | '.join(cells)} |"


def _one(nodes: Path, tasks: Path, seed: int) -> dict[str, Any]:
    return fgd.run(Asked((tasks,), nodes, seed), lambda done, total: None).figures


def _published(path: Path) -> dict[tuple[str, str], tuple[float, float]]:
    """Return allocation and fragments, in % of all GPUs, of the published FGD by list and per cent arrived; empty where the file is missing."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["policy"] == "FGD"]
    return {(row["workload"], row["arrived_pct"]): (float(row["alloc_pct_mean"]), float(row["frag_pct_of_all_gpus_mean"])) for row in rows}


def _cell(figures: tuple[float, float] | None, at: int) -> str:
    return "-" if figures is None else f"{figures[at]:.2f}"
