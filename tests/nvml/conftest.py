"""Backends of the device suite: the stand-in, and real GPUs where there are some (GANGLINE_TEST_GPUS=real demands them, stub skips them)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gangline.core.telemetry import Log, structured_logging
from gangline.nodeagent.nvmlgpus import NvmlGpus


def _load_stub() -> Any:
    spec = importlib.util.spec_from_file_location("nvml_stub_state", Path(__file__).with_name("stub.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def real_gpus() -> bool:
    """Whether this machine has a driver that initialises and names a GPU."""
    if os.environ.get("GANGLINE_TEST_GPUS") == "stub":
        return False
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    count = ctypes.c_uint()
    return library.nvmlInit_v2() == 0 and library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value > 0


@pytest.fixture(scope="session")
def stub_module() -> Any:
    return _load_stub()


@pytest.fixture
def stub(stub_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in with no GPU yet, found by every process that is started from now on."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc, which builds the stand-in, is not installed")
    made = stub_module.Stub(tmp_path / "nvml")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture(params=["stub", "real"])
def any_gpus(request: pytest.FixtureRequest) -> Any:
    """The stand-in with eight H100, or None for the GPUs of this machine."""
    if request.param == "real":
        if not real_gpus():
            if os.environ.get("GANGLINE_TEST_GPUS") == "real":
                pytest.fail("GANGLINE_TEST_GPUS=real, and there is no GPU here")
            pytest.skip("there is no real GPU on this machine")
        return None
    stub = request.getfixturevalue("stub")
    for i in range(8):
        stub.add(numa=i // 4, switch=i // 2)
    return stub


@pytest.fixture
def log() -> Log:
    return structured_logging("error")


@pytest.fixture
def events() -> list[Any]:
    return []


@pytest.fixture
async def gpus(events: list[Any], log: Log) -> AsyncIterator[NvmlGpus]:
    """A backend that asks whichever library its process finds."""
    backend = NvmlGpus(events.append, log, interval_s=0.1, samples_s=5.0, backoff_s=0.1)
    yield backend
    backend.close()
