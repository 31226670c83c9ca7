"""Where a process that hangs stands: its stacks in a file, and the top of them in one line.

By `py-spy dump` where that is installed (Python frames of all threads), else what the kernel tells of each thread: its state, the system call
and the function of the kernel in which it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

#: time for all of it: the gang waits for that
TIMEOUT_S = 5.0
_THREADS = 64
_FILE_BYTES = 1 << 20
_WORDS = 500


async def collect(pid: int, file: Path) -> str:
    """Write the stacks of a process and of its descendants to a file, and return in words where it stands. Raises OSError for the file."""
    pids = await asyncio.to_thread(lambda: list(_family(pid))[:8])
    texts: list[str] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TIMEOUT_S):
            for each in pids:
                texts.append(await _stacks(each))
    if not texts:
        return ""
    await asyncio.to_thread(_write, file, "\n\n".join(texts))
    return f"it stood in {top(texts)} (all stacks: {file.name})"[:_WORDS]


def top(texts: list[str]) -> str:
    """Return the innermost frames of what was found, of the last process that has any: that is the one that does the work."""
    for text in reversed(texts):
        frames = re.findall(r"^\s{4}(\S.*)$", text, re.MULTILINE)
        if frames:
            return " < ".join(" ".join(frame.split()) for frame in frames[:3])
    return " ".join(texts[-1].splitlines()[-1].split()) if texts[-1].strip() else "nothing that could be read"


async def _stacks(pid: int) -> str:
    spy = shutil.which("py-spy")
    if spy:
        process = await asyncio.create_subprocess_exec(
            spy, "dump", "--nonblocking", "--pid", str(pid), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode == 0 and out:
            return out.decode("utf-8", "replace")
    return await asyncio.to_thread(_by_kernel, pid)


def _by_kernel(pid: int) -> str:
    lines = [f"process {pid}: {_read(f'/proc/{pid}/cmdline').replace(chr(0), ' ').strip()[:200]}"]
    with contextlib.suppress(OSError):
        for thread in sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:_THREADS]:
            at = f"/proc/{pid}/task/{thread}"
            state = re.search(r"^State:\s*(.*)$", _read(f"{at}/status"), re.MULTILINE)
            name, waits = _read(f"{at}/comm").strip(), _read(f"{at}/wchan").strip("\0\n ")
            call = _read(f"{at}/syscall").split(" ")[0].strip()
            lines.append(f"  thread {thread} ({name}): {state[1] if state else 'gone'}")
            lines.append(f"    {f'waits in {waits}' if waits not in ('', '0') else 'runs'}{f', system call {call}' if call.isdigit() else ''}")
            lines += [f"    {frame}" for frame in _read(f"{at}/stack").splitlines()[:20]]
    return "\n".join(lines)


def _family(pid: int) -> Iterator[int]:
    yield pid
    for thread in _read(f"/proc/{pid}/task/{pid}/children").split():
        yield from _family(int(thread))


def _read(path: str) -> str:
    try:
        with open(path, "rb") as f:
            return f.read(16_384).decode("utf-8", "replace")
    except OSError:
        return ""


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    with os.fdopen(fd, "wb") as f:
        f.write(text.encode()[:_FILE_BYTES])
