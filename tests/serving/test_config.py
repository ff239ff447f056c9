"""The config loader: what is wrong in a file is named, and what to write instead (case C35)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from poolweave.config import from_mapping, load, to_mapping
from poolweave.errors import ConfigError


@dataclass(frozen=True)
class Engine:
    step_tokens: int = 512
    ratio: float = 0.5


@dataclass(frozen=True)
class Member:
    name: str
    engine: Engine = field(default_factory=Engine)
    weight: int = 1

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ConfigError("weight must not be negative", setting="weight", value=self.weight)


@dataclass(frozen=True)
class Cluster:
    members: tuple[Member, ...] = ()
    transport: str = "shm"
    engine: Engine | None = None


def write(folder: Path, text: str) -> Path:
    file = folder / "cluster.toml"
    file.write_text(text)
    return file


def test_a_file_becomes_nested_dataclasses(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'transport = "tcp"\n[engine]\nratio = 1\n'
        '[[members]]\nname = "p"\nengine = {step_tokens = 64}\n[[members]]\nname = "d"\nweight = 3\n',
    )
    assert load(file, Cluster) == Cluster(
        members=(Member("p", Engine(step_tokens=64)), Member("d", weight=3)), transport="tcp", engine=Engine(ratio=1.0)
    )


def test_to_mapping_is_taken_back() -> None:
    cluster = Cluster(members=(Member("p"),), engine=Engine(ratio=0.25))
    assert from_mapping(to_mapping(cluster), Cluster) == cluster


@pytest.mark.parametrize(
    ("text", "setting", "says"),
    [
        ('transprot = "tcp"', "transprot", "unknown key 'transprot'; did you mean 'transport'?"),
        ("xyzzy = 1", "xyzzy", "unknown key 'xyzzy'; known keys are engine, members, transport"),
        ("[engine]\nstep_token = 5", "engine.step_token", "did you mean 'step_tokens'?"),
        ('[[members]]\nname = "p"\n[[members]]\nname = "d"\nwieght = 2', "members[1].wieght", "did you mean 'weight'?"),
        ('[[members]]\nname = "p"\nengine = {ratios = 1.0}', "members[0].engine.ratios", "did you mean 'ratio'?"),
        ("transport = 3", "transport", "transport must be text, not a whole number"),
        ("[[members]]\nweight = 1", "members[0]", "members[0] lacks name"),
        ('[[members]]\nname = "p"\nweight = -4', "weight", "weight must not be negative"),
        ("engine = 3", "engine", "engine must be a section, not a whole number"),
        ("members = {}", "members", "members must be a list, not a section"),
        ("[engine]\nratio = true", "engine.ratio", "engine.ratio must be a number, not true or false"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, setting: str, says: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(file, Cluster)
    assert str(file) in str(caught.value)
    assert says in str(caught.value)
    assert caught.value.setting == setting


def test_the_value_of_an_unknown_key_is_kept() -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping({"engine": {"setp_tokens": 7}}, Cluster)
    assert caught.value.value == 7


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"a = ", "is not valid TOML"), (b"\xff\xfe", "it is not UTF-8 text"), (None, "No such file or directory")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "cluster.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(file, Cluster)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
