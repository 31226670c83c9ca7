"""What scheduler, agent and command line say to each other about a command that is run beside a rank (`gangline exec`). Pure.

**The right to it.** Whoever may run commands on a node owns it, and an agent's port can be reached by jobs. So an agent obeys only what a
scheduler has signed with a key that both have in a file (`--exec-key-file`), by HMAC-SHA256 over the node, the job, the rank, the body, a nonce
and a moment after which it is not good any more.

**The output** is a row of frames: one byte of kind, four bytes of length (big endian), the content.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

AUTHORIZATION: Final = "Gangline-Exec"
#: a signature is for now: clocks may differ by as much
GOOD_FOR_MS: Final = 60_000
SHORTEST_KEY: Final = 32
MAX_BODY: Final = 128 * 1024

#: kinds of frames: what the command prints, its exit code in decimal, why it could not be run
OUT, ERR, EXIT, FAILED = b"o", b"e", b"x", b"!"
HEAD_BYTES: Final = 5
MAX_FRAME: Final = 1 << 20


def sign(key: bytes, node: str, job: str, rank: int, body: bytes, nonce: str, until_ms: int) -> str:
    """Return the value of the header that allows a command. `nonce` has no space in it."""
    return f"{until_ms} {nonce} {_mac(key, node, job, rank, body, nonce, until_ms)}"


def allowed(key: bytes, node: str, job: str, rank: int, body: bytes, header: str, now_ms: int) -> tuple[str, int] | None:
    """Return the nonce of a header that allows this command now, and until when it does; None when it does not.

    The caller sees to it that a nonce is good once.
    """
    parts = header.split(" ")
    if len(parts) != 3 or not parts[0].isascii() or not parts[0].isdecimal() or len(parts[0]) > 15:
        return None
    until_ms = int(parts[0])
    good = hmac.compare_digest(parts[2].encode(), _mac(key, node, job, rank, body, parts[1], until_ms).encode())
    return (parts[1], until_ms) if good and now_ms < until_ms <= now_ms + 2 * GOOD_FOR_MS else None


def _mac(key: bytes, node: str, job: str, rank: int, body: bytes, nonce: str, until_ms: int) -> str:
    text = "\n".join((node, job, str(rank), hashlib.sha256(body).hexdigest(), nonce, str(until_ms)))
    return hmac.new(key, text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def good_key(text: bytes) -> bytes:
    """Return the key that a file has. Raises ValueError for one that is too short."""
    key = text.strip()
    if len(key) < SHORTEST_KEY:
        raise ValueError(f"a key has at least {SHORTEST_KEY} characters, this has {len(key)}; make one: openssl rand -hex 32")
    return key


def frame(kind: bytes, content: bytes) -> bytes:
    """Return a frame."""
    return kind + len(content).to_bytes(4, "big") + content


class Frames:
    """Takes bytes as they come, and gives the whole frames."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Return the frames that are whole now, as (kind, content). Raises ValueError for one that is too large."""
        data = self._rest + data
        found = []
        while len(data) >= HEAD_BYTES:
            size = int.from_bytes(data[1:HEAD_BYTES], "big")
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes")
            if len(data) < HEAD_BYTES + size:
                break
            found.append((data[:1], data[HEAD_BYTES : HEAD_BYTES + size]))
            data = data[HEAD_BYTES + size :]
        self._rest = data
        return found
