"""Keeps the ranks of one control group away from GPUs that are not theirs: the kernel refuses to open their device files.

An environment variable is a request, this is a wall: a rank that sets `CUDA_VISIBLE_DEVICES` itself still cannot reach another's GPU. It needs
control groups that the agent may make: v1 with its `devices` controller, or v2, where a small BPF program is attached to the group. What is
denied is a list of device files; everything else stays as it is.

Instances of MIG on one GPU share its device file. What tells them apart are further ones, /dev/nvidia-caps/nvidia-capN: who cannot open that of
an instance cannot use it. Their numbers are fixed for each GPU and instance (docs.nvidia.com/datacenter/tesla/mig-user-guide, device nodes and
capabilities).

Small imports: the process that stands beside a rank runs it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import struct

#: /dev/nvidia0 and so on; /dev/nvidiactl and its like have the minors from 254 on
NVIDIA_MAJOR = 195

_BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH = 5, 8
_CGROUP_DEVICE_PROGRAM, _CGROUP_DEVICE_ATTACH, _ALLOW_MULTI = 15, 6, 2
_CHARACTER_DEVICE = 2
#: conditional jumps reach so far; each device takes two instructions
DEVICES_MAX = 4096
#: the driver's name of device files of MIG instances, in /proc/devices
CAPABILITIES = "nvidia-caps"
_CAPABILITY = re.compile(r"^gpu(?P<gpu>[0-9]+)/gi(?P<gi>[0-9]+)/")


def others(minors: dict[int, int], own: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the device files, as (major, minor), of GPUs that a rank does not have. `minors` are those of all GPUs of the node, by index."""
    return tuple((NVIDIA_MAJOR, minor) for index, minor in sorted(minors.items()) if index not in own and minor >= 0)


def instances(mig_minors: str, devices: str, own: dict[int, set[int]]) -> tuple[tuple[int, int], ...]:
    """Return the device files of MIG instances that a rank does not have, on the GPUs of which it has some, and those for changing instances.

    `mig_minors` and `devices` are the texts of /proc/driver/nvidia-caps/mig-minors ("gpu0/gi1/access 12") and /proc/devices; `own` has the
    numbers of its instances by N of the GPU's /dev/nvidiaN. Nothing where the driver has no such files.
    """
    major = next((int(line.split()[0]) for line in devices.splitlines() if line.split()[1:] == [CAPABILITIES]), -1)
    if major < 0 or not own:
        return ()
    denied = []
    for line in mig_minors.splitlines():
        what, _, minor = line.partition(" ")
        match = _CAPABILITY.match(what)
        closed = what in ("config", "monitor") if match is None else int(match["gi"]) not in own.get(int(match["gpu"]), {int(match["gi"])})
        if closed and minor.isdecimal():
            denied.append((major, int(minor)))
    return tuple(denied)


def deny(group: str, devices: tuple[tuple[int, int], ...]) -> None:
    """Deny character devices to all processes that are or will be in a control group, given by its directory, of v1 or v2.

    Raises OSError.
    """
    if os.path.exists(f"{group}/devices.deny"):
        for major, minor in devices:
            with open(f"{group}/devices.deny", "w", encoding="ascii") as file:
                file.write(f"c {major}:{minor} rwm")
    elif devices:  # the kernel takes no program with code that cannot be reached
        _attach(group, _program(devices))


def refusal() -> str:
    """Return why this process cannot deny devices in groups of v2, "" when it can."""
    try:
        os.close(_load(_program(((NVIDIA_MAJOR, 0),))))
    except OSError as e:
        return e.strerror or str(e)
    return ""


def _program(devices: tuple[tuple[int, int], ...]) -> bytes:
    """Return the BPF program that answers 0 for these devices and 1 for others. Its input: (kind and access, major, minor), 32 bits each."""
    if len(devices) > DEVICES_MAX:
        raise OSError(errno.E2BIG, f"more than {DEVICES_MAX} devices")
    code = [
        _op(0x61, 2, 1, 0), _op(0x61, 3, 1, 4), _op(0x61, 4, 1, 8),  # r2, r3, r4 = kind, major, minor
        _op(0x57, 2, 0, 0, 0xFFFF),  # the kind is in the lower half
        _op(0x55, 2, 0, 2 * len(devices), _CHARACTER_DEVICE),  # another kind: allowed
    ]  # fmt: skip
    for at, (major, minor) in enumerate(devices):
        # Another major: on to the next device. This minor: denied, behind the two instructions that allow.
        code += [_op(0x55, 3, 0, 1, major), _op(0x15, 4, 0, 2 * (len(devices) - at - 1) + 2, minor)]
    code += [_op(0xB7, 0, 0, 0, 1), _op(0x95), _op(0xB7, 0, 0, 0, 0), _op(0x95)]
    return b"".join(code)


def _op(code: int, to: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("<BBhi", code, to | source << 4, offset, value)


def _load(program: bytes) -> int:
    """Return a descriptor of the program in the kernel."""
    code, licence = ctypes.create_string_buffer(program, len(program)), ctypes.create_string_buffer(b"Apache-2.0")
    load = struct.pack(
        "<IIQQIIQII", _CGROUP_DEVICE_PROGRAM, len(program) // 8, ctypes.addressof(code), ctypes.addressof(licence), 0, 0, 0, 0, 0
    )
    return _bpf(_PROG_LOAD, load, "load a program that keeps devices apart")


def _attach(group: str, program: bytes) -> None:
    loaded = _load(program)
    try:
        directory = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _bpf(_PROG_ATTACH, struct.pack("<IIII", directory, loaded, _CGROUP_DEVICE_ATTACH, _ALLOW_MULTI), f"attach it to {group}")
        finally:
            os.close(directory)
    finally:
        os.close(loaded)


def _bpf(command: int, attributes: bytes, what: str) -> int:
    number = _BPF_SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"cannot {what}: not known on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = libc.syscall(ctypes.c_long(number), ctypes.c_int(command), buffer, ctypes.c_uint(len(attributes)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot {what}: {os.strerror(code)}")
    return int(result)
