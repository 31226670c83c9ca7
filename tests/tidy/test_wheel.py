"""The wheel has every module of the tree: setuptools leaves out a package that pyproject.toml does not name, without a word."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"core": "gangline/core", "leader": "gangline/leader", "nodeagent": "gangline/nodeagent", "chaos": "gangline/chaos",
           "benchmarks": "gangline/benchmarks"}  # fmt: skip
KEPT = {".py", ".typed", ".html", ".css", ".js", ".svg", ".json"}


def files_of_the_tree() -> set[str]:
    """What should be installed, by the names it has there: what git knows or would add, so that rubbish does not count.

    core/rank is installed as `gangline.rank` only.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    paths = [Path(name) for name in listed if name and Path(name).suffix in KEPT and (ROOT / name).exists()]
    names = {str(Path(FOLDERS[p.parts[0]], *p.parts[1:])) for p in paths}
    return {name.replace("gangline/core/rank/", "gangline/rank/") for name in names}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel built from a copy of the tree, which building would otherwise leave folders in."""
    copy = tmp_path_factory.mktemp("tree")
    archive = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in archive.split("\0"):
        source = ROOT / name
        if name and source.is_file() and not source.is_symlink():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    out = tmp_path_factory.mktemp("dist")
    # With the setuptools of this environment, so that the test needs no network.
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive_file:
        return set(archive_file.namelist())


def test_the_wheel_is_the_tree(wheel: set[str]) -> None:
    packaged = {name for name in wheel if ".dist-info/" not in name}
    tree = files_of_the_tree()
    assert tree - packaged == set(), "not in the wheel; name the package in pyproject.toml, [tool.setuptools] packages or package-data"
    assert packaged - tree == set(), "in the wheel and not in the tree"


def test_every_package_says_that_it_is_typed(wheel: set[str]) -> None:
    assert {f"{folder}/py.typed" for folder in [*FOLDERS.values(), "gangline/rank"]} <= wheel


def test_the_wheel_has_the_licence_and_the_command(wheel: set[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)
    assert any(name.endswith(".dist-info/entry_points.txt") for name in wheel)


def test_static_tools_see_the_same_tree() -> None:
    for folder in FOLDERS:
        link = ROOT / ".types" / "gangline" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder


def test_every_folder_of_modules_is_a_package() -> None:
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {str(Path(name).parent) for name in files_of_the_tree() if name.endswith(".py")}
    assert {folder.replace("/", ".") for folder in folders} == named


def test_the_rank_library_is_imported_by_the_name_that_is_installed() -> None:
    """`gangline.core.rank` works in an editable installation, and in no other."""
    wrong = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "gangline.core.rank" in path.read_text()]
    assert wrong == []
