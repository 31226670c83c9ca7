"""The site's own checks of a node: executables that are run now and then, each with a time limit, and whose answers are reported.

Exit status 0 is well, 1 a warning, 2 critical, anything else, and no end in time, is unknown: as monitoring plugins have it. The first line of
what a check prints is its message. A check runs in a process group of its own, of which nothing is left when its time is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from gangline.core.model.documents import CheckReport
from gangline.core.telemetry import Log

_STATUS: dict[int, Literal["", "warning", "critical"]] = {0: "", 1: "warning", 2: "critical"}
_OUTPUT_BYTES = 4096
_MESSAGE = 300
_REAP_S = 5.0


class Check(msgspec.Struct, frozen=True):
    """One check: what is run, how often, and how long it may take, in seconds."""

    name: str
    command: tuple[str, ...]
    every_s: float = 60.0
    timeout_s: float = 30.0


class Checks:
    """Runs checks for ever and keeps what is not well. `changed` is called when that is something else."""

    def __init__(self, checks: Sequence[Check], environment: Mapping[str, str], changed: Callable[[], None], log: Log) -> None:
        self._checks = checks
        self._environment = dict(environment)
        self._changed = changed
        self._log = log
        self._found: dict[str, CheckReport] = {}

    @property
    def reports(self) -> tuple[CheckReport, ...]:
        """What is not well, by name."""
        return tuple(self._found[name] for name in sorted(self._found))

    async def run(self) -> None:
        """Run each check again and again, all of them side by side."""
        async with asyncio.TaskGroup() as tasks:
            for check in self._checks:
                tasks.create_task(self._repeat(check))

    async def _repeat(self, check: Check) -> None:
        while True:
            report = await perform(check, self._environment)
            if report != self._found.get(check.name):
                known = self._found.pop(check.name, None)
                if report is not None:
                    self._found[check.name] = report
                if (report.status if report else "") != (known.status if known else ""):
                    said = report.message if report else ""
                    self._log.info("check", name=check.name, status=report.status if report else "ok", message=said)
                self._changed()
            await asyncio.sleep(check.every_s)


async def perform(check: Check, environment: Mapping[str, str]) -> CheckReport | None:
    """Run a check once; None when it is well."""
    try:
        process = await asyncio.create_subprocess_exec(
            *check.command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env=dict(environment), start_new_session=True, cwd="/",
        )  # fmt: skip
    except OSError as e:
        return CheckReport(check.name, "unknown", f"it cannot be run: {e.strerror or e}")
    assert process.stdout is not None
    try:
        async with asyncio.timeout(check.timeout_s):
            out = b""
            while chunk := await process.stdout.read(_OUTPUT_BYTES):
                out = (out + chunk)[:_OUTPUT_BYTES]
            code = await process.wait()
    except TimeoutError:
        return CheckReport(check.name, "unknown", f"it did not end within {check.timeout_s:g} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_S):  # it is killed: this only collects it
                await process.wait()
                await asyncio.sleep(0)
    message = out.decode("utf-8", "replace").partition("\n")[0].strip()
    message = "".join(c if c.isprintable() else "?" for c in message)[:_MESSAGE]
    status = _STATUS.get(code)
    if status == "":
        return None
    return CheckReport(check.name, status or "unknown", message or f"it ended with {code}")
