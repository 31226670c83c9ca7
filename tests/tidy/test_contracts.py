"""The import contracts of pyproject.toml hold, and they would notice when they did not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "leader", "nodeagent", "chaos", "benchmarks")


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_only_one_module_touches_the_etcd_package() -> None:
    """It finds the package's files without importing it, so an import is wrong anywhere."""
    importers = []
    for path in (p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
            if any(name and name.split(".")[0] == "etcd3" for name in names):
                importers.append(str(path.relative_to(ROOT)))
    assert importers == []
