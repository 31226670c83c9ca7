"""The MPS control daemon of this node, which holds ranks that share a GPU to their parts: is it there, and does it answer?

The daemon is the site's to start (`nvidia-cuda-mps-control -d`); the agent is told its pipe directory with --mps-pipe. Limits go to it with
each rank's environment, see environment.py. A rank that started while the daemon does not answer would run without any limit, so it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

CONTROL = "nvidia-cuda-mps-control"
ANSWER_S = 5.0


async def problem(pipe: str, *, answer_s: float = ANSWER_S) -> str:
    """Return why shares cannot be kept apart by the daemon with this pipe directory, "" when they can."""
    if not os.path.isdir(pipe):
        return f"there is no pipe directory {pipe} of an MPS control daemon: start {CONTROL} -d with CUDA_MPS_PIPE_DIRECTORY={pipe}"
    environment = {"PATH": os.environ.get("PATH", os.defpath), "CUDA_MPS_PIPE_DIRECTORY": pipe}
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    try:
        process = await asyncio.create_subprocess_exec(CONTROL, env=environment, **pipes)  # type: ignore[arg-type]
    except OSError as e:
        return f"{CONTROL} cannot be run: {e.strerror}"
    try:
        async with asyncio.timeout(answer_s):
            said, _ = await process.communicate(b"get_server_list\n")
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return f"the MPS control daemon has not answered within {answer_s:g} s"
    if process.returncode != 0 or b"cannot find" in said.lower():
        first = said.decode("utf-8", "replace").strip().partition("\n")[0][:200]
        return f"the MPS control daemon does not answer: {first or f'status {process.returncode}'}"
    return ""
