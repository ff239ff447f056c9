"""A calibration: what was measured on one device, as a TOML file that doors and simulations read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from poolweave.config import load, to_mapping, toml_text
from poolweave.errors import ConfigError
from poolweave.scheduler.cost_model import ArchitectureModel, KVLink, Link
from poolweave.scheduler.fitting import ErrorReport
from poolweave.serving.calibration.operators import Operators

BUILT_IN = "smollm2-cpu"  # measured by the command, with the package
_HEAD = """\
# Written by `poolweave calibrate`: seconds, bytes, tokens. [cost] is what [door.routing.cost] takes; a door reads the
# whole file by `calibration` in [door.routing], a simulation by `poolweave simulate --device`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """`cost` is the fit of the whole model, `operators` that of each operator; `links` by transport.

    `errors`: of each fit, on points that it has not seen.
    """

    model: str
    device: str
    dtype: str
    num_threads: int
    block_tokens: int
    kv_bytes_per_token: int
    cost: ArchitectureModel
    operators: Operators
    links: Mapping[str, Link]
    errors: Mapping[str, ErrorReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.links:
            raise ConfigError("a calibration needs at least one of [links.shm] and [links.tcp]", setting="links")

    @property
    def link(self) -> Link:
        """Between instances of one machine: shared memory where it was measured."""
        return self.links.get("shm") or next(iter(self.links.values()))

    @property
    def kv_link(self) -> KVLink:
        """What a token of this model weighs on it."""
        return KVLink(link=self.link, bytes_per_token=self.kv_bytes_per_token)

    def save(self, path: Path) -> None:
        """Raises ConfigError when it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_HEAD + toml_text(to_mapping(self)), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --out", setting="out") from error


def load_calibration(name: str | Path) -> Calibration:
    """The file of that path, or the built-in `"smollm2-cpu"`. Raises ConfigError."""
    return load(Path(__file__).with_name(f"{BUILT_IN}.toml") if str(name) == BUILT_IN else name, Calibration)
