"""The few system calls that Python 3.11 does not offer, through ctypes. Small imports: a bare interpreter runs it."""

from __future__ import annotations

import ctypes
import os
import time

_LIBC = ctypes.CDLL(None, use_errno=True)
#: looked up once, before any fork: each look-up afterwards would copy pages
_PRCTL = _LIBC.prctl
_PRCTL.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
#: the same with a text as its argument; looking it up by item makes another object
_PRCTL_TEXT = _LIBC["prctl"]
_PRCTL_TEXT.argtypes = [ctypes.c_int, ctypes.c_char_p]
_TIMERFD_CREATE = _LIBC.timerfd_create
_TIMERFD_SETTIME = _LIBC.timerfd_settime

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1


def boottime() -> float:
    """Return seconds since boot, the time during which the host was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def become_subreaper() -> None:
    """Make orphaned descendants our children instead of those of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    """Let no set-user-id program raise the privileges of this process and its children."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent(signum: int) -> None:
    """Get `signum` when the parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def set_name(name: str) -> None:
    """Set the name that ps shows, 15 bytes of it."""
    _PRCTL_TEXT(_PR_SET_NAME, name.encode()[:15])


def _prctl(option: int, value: int) -> None:
    if _PRCTL(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


_TIMERFD_SETTIME.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Itimerspec), ctypes.c_void_p]


class BootTimer:
    """A file descriptor that becomes readable at a moment of the boottime clock; at once when the host wakes up after that moment."""

    def __init__(self) -> None:
        self.fd = int(_TIMERFD_CREATE(time.CLOCK_BOOTTIME, _TFD_NONBLOCK | _TFD_CLOEXEC))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def arm(self, at: float) -> None:
        """Fire at `at`, which may have passed; forget an earlier firing."""
        at = max(at, 1e-9)
        value = _Timespec(int(at), min(999_999_999, int(at % 1 * 1e9)))
        if _TIMERFD_SETTIME(self.fd, _TFD_TIMER_ABSTIME, _Itimerspec(_Timespec(0, 0), value), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Forget it."""
        os.close(self.fd)
