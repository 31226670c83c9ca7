"""What scheduler and agent say to each other about a command in a rank: who may, and how the output is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.core.model import execwire as wire

KEY, NOW = b"k" * 32, 1_000_000


def test_a_signature_is_for_one_command_one_rank_and_now() -> None:
    header = wire.sign(KEY, "n1", "j", 3, b"body", "nonce", NOW + 60_000)
    assert wire.allowed(KEY, "n1", "j", 3, b"body", header, NOW) == ("nonce", NOW + 60_000)
    for key, node, job, rank, body, now in (
        (b"x" * 32, "n1", "j", 3, b"body", NOW), (KEY, "n2", "j", 3, b"body", NOW), (KEY, "n1", "i", 3, b"body", NOW),
        (KEY, "n1", "j", 4, b"body", NOW), (KEY, "n1", "j", 3, b"bodz", NOW), (KEY, "n1", "j", 3, b"body", NOW + 60_000),
        (KEY, "n1", "j", 3, b"body", NOW - 60_001),
    ):  # fmt: skip
        assert wire.allowed(key, node, job, rank, body, header, now) is None


@given(st.text(max_size=40))
def test_other_headers_are_no_signatures(header: str) -> None:
    assert wire.allowed(KEY, "n1", "j", 3, b"", header, NOW) is None


@given(st.lists(st.tuples(st.sampled_from([wire.OUT, wire.ERR, wire.EXIT]), st.binary(max_size=20)), max_size=6), st.integers(1, 9))
def test_frames_come_whole_however_they_are_cut(sent: list[tuple[bytes, bytes]], size: int) -> None:
    data = b"".join(wire.frame(*one) for one in sent)
    frames, found = wire.Frames(), []
    for at in range(0, len(data), size):
        found += frames.take(data[at : at + size])
    assert found == sent


def test_frames_that_are_none() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        wire.Frames().take(b"GET / HTTP/1.1")
    with pytest.raises(ValueError, match="at least 32"):
        wire.good_key(b"short\n")
    assert wire.good_key(b"k" * 32 + b"\n") == KEY
