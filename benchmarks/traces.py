"""`make bench-traces`: the traces with published results, ours beside them, as one table in Markdown.

    python -m gangline.benchmarks.traces DIRECTORY [--quick]

DIRECTORY has the traces, which are not part of this repository: `jobs_muri/`, `swf/`, `jobs_philly_chronus/`, `openb/` (docs/simulate.md says
from where they are). What is not there is left out, and said so.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from gangline.benchmarks import openb
from gangline.core.simulate import jobs
from gangline.core.simulate.protocols import Asked

#: mean completion times in s, Muri (Zhao et al., SIGCOMM 2022), 64 GPUs: of SRTF, SRSF, Tiresias-L
MURI: dict[str, tuple[float, float, float]] = {
    "testbed_400.csv": (249_140, 238_612, 336_533),
    "trace1.csv.gz": (1_370_603, 980_141, 3_330_371),
    "trace3.csv.gz": (193_082, 185_022, 347_213),
    "trace4.csv.gz": (581_983, 487_167, 1_319_383),
}
#: our policy, and what the published column is called
_COLUMNS = (("shortest_remaining", "SRTF"), ("shortest_remaining_service", "SRSF"), ("least_attained", "Tiresias-L"))
Row = tuple[str, str, str, str, str]


def main(arguments: list[str]) -> int:
    """Print the table; rows appear on standard error as they are made."""
    if not arguments or arguments[0].startswith("-"):
        sys.stderr.write(f"{(__doc__ or '').strip()}\n")
        return 2
    where, quick = Path(arguments[0]), "--quick" in arguments
    rows: list[Row] = []
    for make in (_muri, _philly, _swf):
        make(where, quick, rows)
    sys.stdout.write("| trace | policy | ours | published | difference |\n|---|---|---|---|---|\n")
    sys.stdout.writelines(f"| {' | '.join(row)} |\n" for row in rows)
    if (where / "openb").is_dir():
        sys.stdout.write("\n")
        for line in openb.table(where / "openb", openb.SEEDS[: 1 if quick else None]):
            print(line, flush=True)
    return 0


def _run(path: Path, policy: str, cluster: str = "", **options: Any) -> dict[str, Any]:
    asked = Asked((path,), policy=policy, options={"cluster": cluster, **options})
    return jobs.run(asked, lambda _done, _total: None).figures


def _there(path: Path, rows: list[Row]) -> bool:
    if not path.exists():
        rows.append((path.name, "", "not there", "", ""))
    return path.exists()


def _say(rows: list[Row], row: Row) -> None:
    rows.append(row)
    sys.stderr.write(f"{'  '.join(row)}\n")


def _muri(where: Path, quick: bool, rows: list[Row]) -> None:
    for name, figures in MURI.items():
        path = where / "jobs_muri" / name
        if (quick and not name.startswith("testbed")) or not _there(path, rows):
            continue
        for (policy, title), published in zip(_COLUMNS, figures, strict=True):
            ours = _run(path, policy, "8x8")["mean_jct_s"]
            change = f"{ours / published - 1:+.1%}"
            _say(rows, (f"muri {name.partition('.')[0]}", policy, f"mean {ours:,.0f} s", f"{title} {published:,.0f} s", change))


def _philly(where: Path, quick: bool, rows: list[Row]) -> None:
    path = where / "jobs_philly_chronus" / "philly_14d_jobs.csv.gz"
    if not quick and _there(path, rows):
        began = time.process_time()
        found = _run(path, "production", "250x8")
        took = time.process_time() - began
        _say(rows, ("philly, 2,000 GPUs", "production", f"{found['jobs']:,} jobs in {took:.0f} s", "", ""))


def _swf(where: Path, quick: bool, rows: list[Row]) -> None:
    for name in ("hpc2n_excerpt_alea", "NASA-iPSC-1993-3.1-cln", "lublin_256_synthetic")[: 1 if quick else None]:
        path = where / "swf" / f"{name}.swf.gz"
        if not _there(path, rows):
            continue
        found = _run(path, "fifo,easy,conservative", overhead_s=0.0)["runs"]
        plain = found["fifo"]["mean_wait_s"]
        for policy, figures in found.items():
            change = f"{figures['mean_wait_s'] / plain - 1:+.1%} of plain FIFO" if plain and policy != "fifo" else ""
            _say(rows, (name, policy, f"mean wait {figures['mean_wait_s']:,.0f} s", "", change))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
