"""Starting and ending instances: every way a start can fail, and that no process outlives its cluster."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from ref_waiting import until

pytest.importorskip("torch")

from ref_transformers import save_random_model

from poolweave.errors import AddressInUse, ConfigError, DeadlineExceeded, InstanceDied, ModelNotFound
from poolweave.mempool import MemPool
from poolweave.serving.cluster import LocalCluster
from poolweave.serving.instance.config import ClusterConfig, InstanceConfig
from poolweave.serving.process.child import Child, instance_program
from poolweave.transfer import KVLayout
from poolweave.types import Role

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def config(folder: Path) -> InstanceConfig:
    return InstanceConfig(name="alone", role=Role.COLOCATED, model=str(folder), hbm="4MiB")


@pytest.fixture(autouse=True)
def no_child_is_left() -> object:
    before = set(psutil.Process().children())  # multiprocessing's resource tracker, once any test has spawned
    yield
    assert set(psutil.Process().children()) <= before


def test_an_unknown_model_path_is_shown_with_what_to_give(config: InstanceConfig) -> None:
    wrong = replace(config, model="/nowhere/model")
    with pytest.raises(ModelNotFound, match=r"model '/nowhere/model' is no directory; give a local") as caught:
        LocalCluster(ClusterConfig(instances=(wrong,)))
    assert caught.value.path == "/nowhere/model"


def test_a_taken_control_port_names_the_port_and_the_setting(config: InstanceConfig) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=rf"{port} is taken .* set listen") as caught:
            LocalCluster(ClusterConfig(instances=(replace(config, listen=f"tcp://127.0.0.1:{port}"),)))
    assert caught.value.setting == "listen"


def test_a_name_that_a_live_pool_owns_is_refused(config: InstanceConfig) -> None:
    with (
        MemPool(KVLayout(num_layers=1, kv_heads=1, head_dim=8), instance="alone", hbm="1MiB"),
        pytest.raises(AddressInUse, match="alone"),
    ):
        LocalCluster(ClusterConfig(instances=(config,)))


def test_a_pool_too_small_for_a_block_is_a_config_error(config: InstanceConfig) -> None:
    with pytest.raises(ConfigError, match="hbm"):
        LocalCluster(ClusterConfig(instances=(replace(config, hbm=10),)))


def test_one_instance_that_fails_stops_all_that_started(config: InstanceConfig) -> None:
    pair = (replace(config, name="p", role=Role.PREFILL), replace(config, name="d", role=Role.DECODE, model="/nowhere"))
    with pytest.raises(ModelNotFound):
        LocalCluster(ClusterConfig(instances=pair))


def test_an_instance_that_dies_without_a_word_is_shown_with_its_last_words(
    config: InstanceConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nprint('no luck today', flush=True)\nos._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InstanceDied, match=r"(?s)alone ended .* exit code 7.*no luck today") as caught:
        LocalCluster(ClusterConfig(instances=(config,)))
    assert caught.value.exit_code == 7


def test_an_instance_that_is_not_ready_in_time_is_ended(config: InstanceConfig) -> None:
    with pytest.raises(DeadlineExceeded, match=r"alone was not ready after 0.01 s; raise start_timeout_s"):
        LocalCluster(ClusterConfig(instances=(config,), start_timeout_s=0.01))


def test_sigterm_ends_an_instance_cleanly(config: InstanceConfig) -> None:
    child = Child(instance_program(config))
    try:
        child.wait_ready(60)
        os.kill(child.pid, signal.SIGTERM)
        until(lambda: not child.alive, "it ends")
        assert child.exit_code == 0, child.last_words()
        assert child.last_words() == "(nothing)"
    finally:
        child.close()


_PARENT = """
import sys
from poolweave.serving.cluster import LocalCluster
from poolweave.serving.instance.config import ClusterConfig, InstanceConfig
from poolweave.types import Role
instances = tuple(
    InstanceConfig(name=f"orphan-{role}", role=role, model=sys.argv[1], hbm="4MiB") for role in ("prefill", "decode")
)
cluster = LocalCluster(ClusterConfig(instances=instances))
print(*[member.child.pid for member in cluster.members], flush=True)
sys.stdin.read()
"""


def test_instances_end_with_a_killed_parent(folder: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the orphans end")


def test_an_instance_started_by_hand_reads_toml_and_prints_its_address(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text(f'name = "by-hand"\nrole = "prefill"\nmodel = "{folder}"\nhbm = "4MiB"\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "poolweave.serving.instance.process", "--config", str(file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("tcp://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_an_instance_with_a_misspelt_setting_says_so_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('name = "p"\nrole = "prefill"\nhmb = "4MiB"\n')
    result = subprocess.run(
        [sys.executable, "-m", "poolweave.serving.instance.process", "--config", str(file)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr == f"ConfigError: {file}: unknown key 'hmb'; did you mean 'hbm'?\n"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": ""}, "instance name ''"),
        ({"name": "a/b"}, "instance name 'a/b'"),
        ({"hbm": "many"}, "hbm='many' is no size"),
        ({"lease_s": 0.0}, "lease_s must be positive"),
    ],
)
def test_settings_out_of_range_are_config_errors(config: InstanceConfig, changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(config, **changes)


def test_a_cluster_that_cannot_work_is_refused(config: InstanceConfig) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        ClusterConfig(instances=())
    with pytest.raises(ConfigError, match="two instances are named 'alone'"):
        ClusterConfig(instances=(config, config))
    with pytest.raises(ConfigError, match="need each other"):
        ClusterConfig(instances=(replace(config, role=Role.DECODE),))
    with pytest.raises(ConfigError, match="'carrier pigeon' is neither"):
        ClusterConfig(instances=(config,), transport="carrier pigeon")  # type: ignore[arg-type]
