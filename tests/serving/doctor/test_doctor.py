"""The doctor: what it says of this machine, and of one where something is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from poolweave.serving.doctor import checkup as doctor
from poolweave.serving.doctor import probes
from poolweave.serving.doctor.checkup import Check, as_json, as_text, examine, exit_code


def test_everything_required_is_there_and_areas_stay_together() -> None:
    checks = examine()
    assert exit_code(checks) == 0, as_text(checks)
    assert {check.name for check in checks} >= {
        "python", "native core", "torch", "transformers", "CUDA", "shm", "tcp", "nixl", "nccl", "huge pages", "memlock",
        "memfd", "vm.max_map_count", "SmolLM2",
    }  # fmt: skip
    areas = [check.area for check in checks]
    assert sorted(areas, key=areas.index) == areas


def test_what_is_not_active_says_why_and_what_to_do() -> None:
    for check in examine():
        assert check.detail
        assert check.status == "active" or check.fix, check


def test_a_missing_package_is_missing_only_where_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    checks = {check.name: check for check in examine()}
    assert checks["msgspec"] == Check("base", "msgspec", "missing", "not installed", "pip install 'poolweave'")
    assert checks["torch"] == Check("engine", "torch", "off", "not installed", "pip install 'poolweave[engine]'")
    assert exit_code(list(checks.values())) == 1
    assert "missing: numpy, pyzmq, msgspec" in as_text(list(checks.values()))


def test_a_native_core_that_does_not_load_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "poolweave.mempool._native", None)
    finding = probes.native_core()
    assert not finding.active
    assert "does not load" in finding.detail
    assert "reinstall" in finding.fix


def test_no_memfd_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "not implemented" in probes.memfd().detail
    assert not probes.shm().active


def test_memlock_unlimited_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert probes.memlock().active


def test_probes_leave_no_descriptor_open() -> None:
    examine()
    before = set(os.listdir("/proc/self/fd"))
    examine()
    assert set(os.listdir("/proc/self/fd")) <= before  # fewer: what an earlier test left was collected meanwhile


def test_json_is_for_programs() -> None:
    shown = json.loads(as_json([Check("base", "numpy", "missing", "not installed", "pip install")]))
    assert shown == {
        "ok": False,
        "checks": [
            {"area": "base", "name": "numpy", "status": "missing", "detail": "not installed", "fix": "pip install"}
        ],
    }


@pytest.mark.multiproc
def test_it_runs_as_a_module_with_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """Extras are hidden by modules that refuse to be imported; the doctor must not need them."""
    for name in ("typer", "rich", "torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('hidden')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "poolweave.serving.doctor.checkup", "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["ok"]


def test_main_prints_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    assert "all that is required is there" in capsys.readouterr().out
