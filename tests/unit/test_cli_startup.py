"""Start-up of the command is a promise. What is loaded is counted, because time on a busy machine is not a measure."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: what no daily command may load: each costs as much as all the rest of the start
HEAVY = {
    "msgspec",
    "yaml",
    "aiohttp",
    "grpc",
    "asyncio",
    "tenacity",
    "opentelemetry",
    "subprocess",
    "importlib.metadata",
    "rich",
    "unittest",
}
#: modules of ours and of others beyond the standard library, in the interpreter that has started `gangline ps`
MOST_MODULES = 60

PROBE = """
import sys
before = set(sys.modules)
import http.client, json
stdlib = set(sys.modules)
from gangline.core.client import cli
code = cli._run({args!r})
print(code, *sorted(set(sys.modules) - before), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "args",
    [["--url", "http://127.0.0.1:9", "--help"], ["explain", "GL-1101"], *([word, "--help"] for word in ("ps", "nodes", "queues", "logs"))],
)
def test_daily_commands_load_little(args: list[str]) -> None:
    ran = subprocess.run([sys.executable, "-c", PROBE.format(args=args)], capture_output=True, text=True, timeout=60, check=True)
    code, *loaded = ran.stderr.split()
    assert code == "0"
    roots = {name.partition(".")[0] for name in loaded} | set(loaded)
    assert HEAVY & roots == set()
    ours = [name for name in loaded if name.partition(".")[0] in ("gangline", "click", "core")]
    assert len(ours) <= MOST_MODULES, ours
