"""The stand-in has the structs of the installed pynvml, field by field, and all functions that the agent calls."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

from gangline.nodeagent import nvml as reader
from gangline.nodeagent.nvml import nvml

_OTHER_NAMES = {"nvmlProcessInfo_t": "c_nvmlProcessInfo_v3_t", "nvmlPciInfo_t": "nvmlPciInfo_t"}
#: not called on this library: what drivers before 535 have instead, and versions that pynvml takes only when it is asked for them
_NEVER = {
    "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetGpuInstanceProfileInfo",
    "nvmlGpuInstanceGetComputeInstanceProfileInfo",
}  # fmt: skip


def test_structs_are_those_of_pynvml(stub: Any, stub_module: Any) -> None:
    library = ctypes.CDLL(str(stub.library))
    library.stub_layout_name.restype = ctypes.c_char_p
    library.stub_layout_value.restype = ctypes.c_size_t
    compared, at = 0, 0
    while (name := library.stub_layout_name(at)) is not None:
        struct, _, field = name.decode().partition(".")
        theirs = getattr(stub_module, struct, None) or getattr(nvml, _OTHER_NAMES.get(struct, f"c_{struct}"))
        expected = getattr(theirs, field).offset if field else ctypes.sizeof(theirs)
        assert library.stub_layout_value(at) == expected, name
        compared, at = compared + 1, at + 1
    assert compared > 40


def test_everything_that_the_agent_calls_is_there(stub: Any) -> None:
    """By the symbol that pynvml really looks up: nvmlDeviceGetCount is nvmlDeviceGetCount_v2, and so on."""
    library = ctypes.CDLL(str(stub.library))
    folder = Path(reader.__file__).parent
    called = {m for name in ("nvml.py", "nvmlmig.py") for m in re.findall(r"nvml\.(nvml[A-Z]\w+)", (folder / name).read_text())}
    functions = {name for name in called if callable(getattr(nvml, name, None)) and not isinstance(getattr(nvml, name), type)}
    assert len(functions) > 40
    source = Path(nvml.__file__).read_text()
    wanted: set[str] = set()
    for name in functions:
        wanted |= _symbols(source, name)
    assert {w for w in wanted if not hasattr(library, w)} == _NEVER


def _symbols(source: str, function: str) -> set[str]:
    body = re.search(rf"\ndef {function}\(.*?(?=\n(?:def|class|@|[A-Za-z]))", source, re.S)
    assert body is not None, function
    found = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', body[0]))
    return found or set().union(*(_symbols(source, other) for other in re.findall(r"return (nvml\w+)\(", body[0])))
