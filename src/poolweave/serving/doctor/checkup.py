"""`poolweave doctor`: what is active on this machine and what is not, why, and the fix for each. Changes nothing.

Needs only the standard library, so that it can tell what is missing: `python -m poolweave.serving.doctor.checkup` works
without any extra. Probes look, or try the real thing for a moment; none imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from poolweave.serving.doctor import probes
from poolweave.serving.doctor.probes import Finding

Status = Literal["active", "off", "missing"]


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's list. `missing`: something required is not there; `off`: something optional is not."""

    area: str
    name: str
    status: Status
    detail: str
    fix: str = ""


_REQUIRED: Sequence[tuple[str, str, Callable[[], Finding]]] = (
    ("base", "python", probes.python),
    ("base", "platform", probes.platform),
    ("base", "native core", probes.native_core),
    ("base", "numpy", lambda: probes.package("numpy", "poolweave")),
    ("base", "pyzmq", lambda: probes.package("pyzmq", "poolweave")),
    ("base", "msgspec", lambda: probes.package("msgspec", "poolweave")),
    ("base", "sortedcontainers", lambda: probes.package("sortedcontainers", "poolweave")),
    ("base", "xxhash", lambda: probes.package("xxhash", "poolweave")),
    ("memory", "memfd", probes.memfd),
)
_OPTIONAL: Sequence[tuple[str, str, Callable[[], Finding]]] = (
    ("engine", "torch", lambda: probes.package("torch", "poolweave[engine]")),
    ("engine", "transformers", lambda: probes.package("transformers", "poolweave[engine]")),
    ("engine", "safetensors", lambda: probes.package("safetensors", "poolweave[engine]")),
    ("engine", "CUDA", probes.cuda),
    ("engine", "processors", probes.processors),
    ("serve", "fastapi", lambda: probes.package("fastapi", "poolweave[serve]")),
    ("serve", "uvicorn", lambda: probes.package("uvicorn", "poolweave[serve]")),
    ("serve", "etcd3gw", lambda: probes.package("etcd3gw", "poolweave[etcd]")),
    ("demo", "typer", lambda: probes.package("typer", "poolweave[serve]")),
    ("demo", "rich", lambda: probes.package("rich", "poolweave[serve]")),
    ("demo", "matplotlib", lambda: probes.package("matplotlib", "poolweave[demo]")),
    ("demo", "gguf", lambda: probes.package("gguf", "poolweave[demo]")),
    ("demo", "SmolLM2", probes.smollm2),
    ("transport", "shm", probes.shm),
    ("transport", "tcp", probes.tcp),
    ("transport", "nixl", probes.nixl),
    ("transport", "nccl", probes.nccl),
    ("memory", "free memory", probes.free_memory),
    ("memory", "huge pages", probes.huge_pages),
    ("memory", "memlock", probes.memlock),
    ("memory", "vm.max_map_count", probes.max_map_count),
    ("memory", "open files", probes.open_files),
)


def examine() -> list[Check]:
    """Every check, in the order of areas as they are shown."""
    checks = [_check(*row, absent="missing") for row in _REQUIRED]
    checks += [_check(*row, absent="off") for row in _OPTIONAL]
    areas = list(dict.fromkeys(check.area for check in checks))
    return sorted(checks, key=lambda check: areas.index(check.area))


def exit_code(checks: Sequence[Check]) -> int:
    """0 unless something required is missing."""
    return int(any(check.status == "missing" for check in checks))


def as_text(checks: Sequence[Check]) -> str:
    """The list as a person reads it: one line a check, the fix under what is not active."""
    width = max(len(check.name) for check in checks)
    lines = []
    area = ""
    for check in checks:
        if check.area != area:
            area = check.area
            lines.append(f"\n{area}")
        lines.append(f"  {_MARKS[check.status]} {check.name:<{width}}  {check.detail}")
        if check.fix:
            lines.append(f"    {'':<{width}}  fix: {check.fix}")
    missing = [check.name for check in checks if check.status == "missing"]
    lines.append(f"\nmissing: {', '.join(missing)}" if missing else "\nall that is required is there")
    return "\n".join(lines).lstrip("\n")


def as_json(checks: Sequence[Check]) -> str:
    """The list for programs: an object with `ok` and `checks`."""
    return json.dumps(
        {"ok": not exit_code(checks), "checks": [dataclasses.asdict(check) for check in checks]}, indent=2
    )


_MARKS: dict[Status, str] = {"active": "✔", "off": "–", "missing": "✘"}


def _check(area: str, name: str, probe: Callable[[], Finding], *, absent: Status) -> Check:
    finding = probe()
    return Check(area, name, "active" if finding.active else absent, finding.detail, finding.fix)


def main(arguments: list[str] | None = None) -> int:
    """The command; -> its exit code."""
    parser = argparse.ArgumentParser(prog="poolweave doctor", description="What is active here, what is not, and why.")
    parser.add_argument("--json", action="store_true", help="for programs")
    checks = examine()
    text = as_json(checks) if parser.parse_args(arguments).json else as_text(checks)
    sys.stdout.write(text + "\n")
    return exit_code(checks)


if __name__ == "__main__":
    sys.exit(main())
