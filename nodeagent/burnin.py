"""The test that a withdrawn node or GPU has to pass: `python -m gangline.nodeagent.burnin`, run as a rank by a job of the scheduler itself.

It computes what is known beforehand and compares: products of integer matrices, whose every sum is exact in 32-bit floats, so that hardware
which is well gives one result, to the bit, in any order of summation; and patterns of memory, written and read back. On GPUs with torch
where the node has torch with CUDA and the rank has GPUs, and always on the CPU. Ends with 0, or with 1 and a line for each thing that was
wrong, or 2 when a GPU cannot be tested at all.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

#: order of the matrices on the CPU and on GPUs
CPU_ORDER = 96
CUDA_ORDER = 2048
#: sha256 of the products, as little-endian 64-bit integers, row by row: made once by `golden`, with Python's integers
GOLDEN = {
    CPU_ORDER: "170ec22555fcdea4dc3700cbbed4491a495399fb1291cff44b2a43e4676d9e73",
    CUDA_ORDER: "ce741fba47b0fe3c59c9d744f9977fc847d5ffd5643dc05404a91cffc61c27fb",
}
CPU_ROUNDS = 5
CUDA_ROUNDS = 50
CPU_MEMORY_BYTES = 64 << 20
#: part of the free memory of a GPU that is written and read back
CUDA_MEMORY_SHARE = 0.8
_PATTERNS = (0x00, 0xFF, 0x55, 0xAA)


def left(i: int, j: int) -> int:
    """Return an element of the left matrix, -8 to 8: exact in every float format down to bfloat16 and TF32."""
    return (i * 7 + j * 3) % 17 - 8


def right(i: int, j: int) -> int:
    """Return an element of the right matrix."""
    return (i * 5 + j * 11) % 17 - 8


def product(order: int) -> list[list[int]]:
    """Return the product, by Python's integers. Both matrices repeat with 17, so 17 rows and columns say it all."""
    rows = [[left(i, j) for j in range(order)] for i in range(min(order, 17))]
    columns = [[right(i, j) for i in range(order)] for j in range(min(order, 17))]
    small = [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in rows]
    return [[small[i % 17][j % 17] for j in range(order)] for i in range(order)]


def golden(order: int) -> str:
    """Return the digest of the product."""
    digest = hashlib.sha256()
    for row in product(order):
        digest.update(b"".join(value.to_bytes(8, "little", signed=True) for value in row))
    return digest.hexdigest()


def check_cpu(rounds: int = CPU_ROUNDS, memory_bytes: int = CPU_MEMORY_BYTES) -> Iterator[str]:
    """Yield what is wrong with this machine's processor and memory."""
    order = CPU_ORDER
    rows = [[left(i, j) for j in range(order)] for i in range(order)]
    columns = [[right(i, j) for i in range(order)] for j in range(order)]
    for number in range(rounds):
        digest = hashlib.sha256()
        for row in rows:
            digest.update(b"".join(sum(map(int.__mul__, row, column)).to_bytes(8, "little", signed=True) for column in columns))
        if digest.hexdigest() != GOLDEN[order]:
            yield f"cpu: product {number} of order {order} has digest {digest.hexdigest()[:16]}, not {GOLDEN[order][:16]}"
    for pattern in _PATTERNS:
        block = bytearray([pattern]) * memory_bytes
        if block.count(pattern) != memory_bytes:
            yield f"cpu: {memory_bytes - block.count(pattern)} bytes of memory did not keep the pattern {pattern:#04x}"
        del block


def check_cuda(torch: Any, device: int, rounds: int = CUDA_ROUNDS) -> Iterator[str]:
    """Yield what is wrong with one GPU, by its index among those that this rank has."""
    name, order = f"cuda:{device}", CUDA_ORDER
    torch.backends.cuda.matmul.allow_tf32 = True
    at = torch.arange(order, device=name, dtype=torch.int64)
    a = ((at[:, None] * 7 + at[None, :] * 3) % 17 - 8).to(torch.float32)
    b = ((at[:, None] * 5 + at[None, :] * 11) % 17 - 8).to(torch.float32)
    first = a @ b
    digest = hashlib.sha256(first.to(torch.int64).cpu().numpy().tobytes()).hexdigest()
    if digest != GOLDEN[order]:
        yield f"{name}: the product of order {order} has digest {digest[:16]}, not {GOLDEN[order][:16]}"
    for number in range(rounds):
        # Compared on the device: only a difference is worth the way to the host.
        wrong = int((a @ b != first).sum().item())
        if wrong:
            yield f"{name}: product {number} differs from the first in {wrong} elements"
    free, _ = torch.cuda.mem_get_info(device)
    size = int(free * CUDA_MEMORY_SHARE) // len(_PATTERNS)
    for pattern in _PATTERNS:
        block = torch.full((size,), pattern, device=name, dtype=torch.uint8)
        wrong = int((block != pattern).sum(dtype=torch.int64).item())
        if wrong:
            yield f"{name}: {wrong} bytes of memory did not keep the pattern {pattern:#04x}"
        del block
    torch.cuda.empty_cache()


def check_peers(torch: Any, devices: int) -> Iterator[str]:
    """Yield what is wrong with the links between the GPUs of this rank: a block goes round, and has to come back as it was."""
    if devices < 2:
        return
    block = torch.arange(1 << 24, device="cuda:0", dtype=torch.int32)
    moved = block
    for device in [*range(1, devices), 0]:
        moved = moved.to(f"cuda:{device}")
    wrong = int((moved != block).sum().item())
    if wrong:
        yield f"links: {wrong} of {block.numel()} numbers came back wrong over {devices} GPUs"


def problems(gpus: int) -> Iterator[str]:
    """Yield what is wrong. `gpus` is how many the rank has."""
    yield from check_cpu()
    if not gpus:
        return
    try:
        torch: Any = import_module("torch")
    except ImportError:
        _say("no torch on this node: its GPUs are not computed on")
        return
    if not torch.cuda.is_available():
        _say("torch has no CUDA on this node: its GPUs are not computed on")
        return
    for device in range(torch.cuda.device_count()):
        yield from check_cuda(torch, device)
    yield from check_peers(torch, torch.cuda.device_count())


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run all tests."""
    began = time.monotonic()
    gpus = len([g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g])
    wrong = 0
    try:
        for problem in problems(gpus):
            wrong += 1
            _say(problem)
    except RuntimeError as e:  # what torch raises for every error of CUDA
        _say(f"a GPU cannot be tested: {e}")
        return 2
    _say(f"{wrong or 'no'} problem{'' if wrong == 1 else 's'} in {time.monotonic() - began:.1f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
