"""The messages out of the pinned package: complete, and refused with a clear message when the package is another one."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from gangline.core.store import etcd_stubs
from gangline.core.store.etcd_stubs import MESSAGES


def test_the_fields_of_a_safe_watch_are_there():
    request = MESSAGES["WatchRequest"](create_request={"key": b"k", "fragment": True, "watch_id": 7})
    # Field numbers of etcd's rpc.proto: create_request 1, key 1, watch_id 7, fragment 8.
    assert request.SerializeToString() == bytes.fromhex("0a070a016b38074001")
    assert MESSAGES["WatchRequest"](progress_request={}).SerializeToString() == bytes.fromhex("1a00")
    assert MESSAGES["WatchResponse"].FromString(bytes.fromhex("3801")).fragment
    status = MESSAGES["StatusResponse"].FromString(bytes.fromhex("42016548095001"))
    assert (list(status.errors), status.dbSizeInUse, status.isLearner) == (["e"], 9, True)


def test_reading_the_files_runs_nothing_of_the_package():
    code = "import sys, gangline.core.store.etcd_stubs, gangline.core.store.memory; print([m for m in ('etcd3', 'grpc') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_another_version_of_the_package_is_refused(tmp_path, monkeypatch):
    copy = tmp_path / "etcdrpc"
    shutil.copytree(etcd_stubs._generated_folder(), copy)
    with (copy / "rpc_pb2.py").open("a") as file:
        file.write("# changed\n")
    monkeypatch.setattr(etcd_stubs, "_generated_folder", lambda: copy)
    with pytest.raises(ImportError, match=r"rpc_pb2.py is not the file of etcd3 0\.12\.0: its sha256 is .* pip install"):
        etcd_stubs._load()
    (copy / "rpc_pb2.py").unlink()
    with pytest.raises(ImportError, match=r"cannot read etcd's descriptors.*pip install"):
        etcd_stubs._load()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"etcd3 0\.12\.0, .* is not installed; run: pip install"):
        etcd_stubs._load()
