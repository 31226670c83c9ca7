"""Play many seeds: `python tests/sim/many.py FIRST COUNT [FOLDER]`. Prints each that fails, and leaves its story in FOLDER.

Every other seed has declared queues, several users and reservations.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

from simworld import Scenario, play

from gangline.core.telemetry import setup


def main(first: int, count: int, folder: Path) -> int:
    """Return the number of seeds that fail."""
    telemetry, failed, began = setup("sim"), 0, time.perf_counter()
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as scratch:
            try:
                play(seed, Path(scratch), Scenario(jobs=20, queues=True) if seed % 2 else Scenario(), telemetry=telemetry)
            except BaseException as e:
                if isinstance(e, KeyboardInterrupt):
                    raise
                failed += 1
                print(f"seed {seed}: {type(e).__name__}: {str(e)[:600]}", flush=True)  # noqa: T201
                world = getattr(e, "world", None)
                if world is not None:
                    text = "".join(traceback.format_exception(e)) + "\n".join(world.story) + "\n\n" + world.journal.getvalue()
                    (folder / f"seed-{seed}.txt").write_text(text)
    print(f"{count} seeds from {first}, {failed} failed, {time.perf_counter() - began:.0f} s")  # noqa: T201
    return failed


if __name__ == "__main__":
    where = Path(sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp(prefix="gangline-sim-"))
    where.mkdir(parents=True, exist_ok=True)
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]), where)))
