"""Traces that cannot be read: every fault with its line and column."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from gangline.core.simulate.formats.openb import OpenbNode, OpenbTask, read_nodes, read_tasks
from gangline.core.simulate.reading import BadTrace

TASKS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"


def faults(path: Path, text: bytes | str) -> list[tuple[int | None, int | None, str, str]]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(BadTrace) as caught:
        read_tasks(path)
    return [(p.line, p.column, p.code, p.message) for p in caught.value.problems]


def test_lists_are_read_plain_and_compressed(tmp_path: Path) -> None:
    text = TASKS + "a,6000,12288,1,460,\nb,1,2,8,1000,T4|A10\nc,8000,1,0,,\n"
    expected = [OpenbTask("a", 6000, 12288, 1, 460), OpenbTask("b", 1, 2, 8, 1000, ("A10", "T4")), OpenbTask("c", 8000, 1, 0, 0)]
    (tmp_path / "plain.csv").write_text(text)
    (tmp_path / "packed.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert read_tasks(tmp_path / "plain.csv") == read_tasks(tmp_path / "packed.csv.gz") == expected
    (tmp_path / "nodes.csv").write_text("sn,cpu_milli,memory_mib,gpu,model\r\nn,64000,262144,2,P100\r\nm,32000,262144,0,\r\n")
    assert read_nodes(tmp_path / "nodes.csv") == [OpenbNode("n", 64000, 262144, 2, "P100"), OpenbNode("m", 32000, 262144, 0, "")]


def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    text = TASKS + 'a,6000,x,1,460,\nb,1,2\n"c,1",1,1,1,2000,\n\nd,1,1,2,500,\na,-1,1,0,,\n'
    assert faults(tmp_path / "tasks.csv", text) == [
        (2, 8, "GL-1204", 'Column memory_mib: "x" must be a number.'),
        (3, 1, "GL-1203", "3 cells, where the first line names 6 columns."),
        (4, 13, "GL-1204", 'Column gpu_milli: "2000" must be from 1 to 1,000.'),
        (6, 9, "GL-1204", 'Column gpu_milli: "500" must be 1000 for 2 GPUs: only a single GPU is shared.'),
        (7, 1, "GL-1204", 'Column name: "a" is there twice.'),
        (7, 3, "GL-1204", 'Column cpu_milli: "-1" must be at least 0.'),
    ]


@pytest.mark.parametrize(
    ("content", "line", "code"),
    [
        (b"", 1, "GL-1202"),
        (b"name,name,cpu_milli\n", 1, "GL-1202"),
        (TASKS.encode() + b'a,1,1,1,1000,"T4\n', 2, "GL-1203"),
        (TASKS.encode() + b"a,1,1,1,1000,\xff\n", 1, "GL-1201"),
        (gzip.compress((TASKS + "".join(f"{n},1,1,0,,\n" for n in range(9000))).encode())[:-40], 1, "GL-1201"),
    ],
)
def test_what_is_no_table_is_told(tmp_path: Path, content: bytes, line: int, code: str) -> None:
    found = faults(tmp_path / "tasks.csv", content)
    assert (found[-1][2], found[-1][0] is not None and found[-1][0] >= line) == (code, True)


def test_missing_file_and_missing_columns(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="GL-1201"):
        read_nodes(tmp_path / "none.csv")
    found = faults(tmp_path / "tasks.csv", "name,cpu_milli\n")
    assert [f[3] for f in found] == [
        f'There is no column "{c}"; needed are name, cpu_milli, memory_mib, num_gpu, gpu_milli.' for c in ("memory_mib", "num_gpu", "gpu_milli")
    ]
