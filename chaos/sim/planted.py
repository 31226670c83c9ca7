"""Known mistakes, to see that the simulation finds them. Each replaces a named function for the time of one run, in this process: production
code has no switch for them, and nothing but the simulation imports this module (tests/tidy checks that)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import msgspec


class Bug(msgspec.Struct, frozen=True):
    """One mistake: `make` makes it, and undoes it at the end of its block."""

    text: str
    make: Callable[[], AbstractContextManager[None]]


PLANTED: dict[str, Bug] = {}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Make a mistake for the time of the block; none for an empty name. Raises KeyError for one that is not known."""
    if not name:
        yield
        return
    with PLANTED[name].make():
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for the time of the block."""
    there = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, there)
