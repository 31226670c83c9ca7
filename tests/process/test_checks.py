"""The site's own checks: what each exit status means, and that none holds anything up."""

from __future__ import annotations

import asyncio
import io
import os
import time
from pathlib import Path

import pytest

from gangline.core.model.documents import CheckReport
from gangline.core.model.problems import BadJob
from gangline.core.telemetry import structured_logging
from gangline.nodeagent.checks import Check, Checks, perform
from gangline.nodeagent.nodefile import parse


def check(script: str, timeout_s: float = 10.0) -> CheckReport | None:
    return asyncio.run(perform(Check("c", ("/bin/sh", "-c", script), timeout_s=timeout_s), {"PATH": "/usr/bin:/bin", "GANGLINE_NODE": "n1"}))


@pytest.mark.parametrize(
    ("script", "report"),
    [
        ("echo fine; exit 0", None),
        ("echo $GANGLINE_NODE is warm; echo more; exit 1", CheckReport("c", "warning", "n1 is warm")),
        ("printf 'no \\033 mount' >&2; exit 2", CheckReport("c", "critical", "no ? mount")),
        ("exit 7", CheckReport("c", "unknown", "it ended with 7")),
        ("kill -9 $$", CheckReport("c", "unknown", "it ended with -9")),
    ],
)
def test_what_an_exit_status_means(script: str, report: CheckReport | None) -> None:
    assert check(script) == report


def test_one_that_cannot_be_run() -> None:
    found = asyncio.run(perform(Check("c", ("/nowhere/check",)), {}))
    assert found == CheckReport("c", "unknown", "it cannot be run: No such file or directory")


def test_one_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    began = time.monotonic()
    found = check(f"sleep 1000 & echo $! > {tmp_path}/child; wait", timeout_s=0.5)
    assert found == CheckReport("c", "unknown", "it did not end within 0.5 s")
    assert time.monotonic() - began < 60
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_prints_for_ever_takes_no_memory() -> None:
    found = check("yes | head -c 3000000; exit 1")
    assert found == CheckReport("c", "warning", "y")


def test_what_changes_is_told(tmp_path: Path) -> None:
    """A check that is critical until a file is there."""

    async def play() -> None:
        news = asyncio.Event()
        one = Check("mount", ("/bin/sh", "-c", f"test -e {tmp_path}/there || {{ echo gone; exit 2; }}"), every_s=0.02)
        checks = Checks([one], dict(os.environ), news.set, structured_logging("error", io.StringIO()))
        running = asyncio.create_task(checks.run())
        await asyncio.wait_for(news.wait(), 30)
        assert checks.reports == (CheckReport("mount", "critical", "gone"),)
        news.clear()
        (tmp_path / "there").touch()
        await asyncio.wait_for(news.wait(), 30)
        assert checks.reports == ()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(play())


def test_the_node_file_names_checks() -> None:
    text = "checks:\n  disks: {command: [/bin/check, -w], every: 2m, timeout: 5s}\n  net: {command: [/bin/net]}\n"
    assert parse(text).checks == (Check("disks", ("/bin/check", "-w"), 120.0, 5.0), Check("net", ("/bin/net",)))
    with pytest.raises(BadJob) as bad:
        parse("checks:\n  a: {every: 1s}\n  b: {command: [check]}\n  'x y': {command: [/c]}\n  d: {command: [/c], often: 1}\n")
    assert sorted(p.pointer for p in bad.value.problems) == ["/checks/a", "/checks/b/command", "/checks/d/often", "/checks/x y"]


def test_the_example_for_systemd_is_a_node_file() -> None:
    rules = parse((Path(__file__).parents[2] / "examples" / "systemd" / "node.yaml").read_text())
    assert rules.ranks.refuse_root
    assert [c.name for c in rules.checks] == ["root-disk"]
