"""Quotas by tenant from settings to blocks: who is charged for what served requests take (C37)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from poolweave.config import from_mapping, load
from poolweave.errors import ConfigError
from poolweave.serving.deployment import DeploymentConfig
from poolweave.serving.instance.config import ClusterConfig, InstanceConfig
from poolweave.serving.tenant_quota import TenantQuota, owner_of, salt_of
from poolweave.types import Role

BLOCK = 16
KEYS = [{"name": "a", "key": "sk-a", "isolated": True}, {"name": "shared", "key": "sk-s"}]


def deployment(*quotas: dict[str, Any]) -> DeploymentConfig:
    instances = [{"name": "one", "role": "colocated", "quotas": list(quotas)}]
    return from_mapping({"door": {"keys": KEYS}, "instances": instances}, DeploymentConfig)


def test_salts_separate_tenants_and_their_clients_salts() -> None:
    salts = [salt_of(owner, salt) for owner in ("", "a", "b") for salt in (None, "", "b")]
    assert salts[0] == b""
    assert len(set(salts)) == 7  # a tenant without a salt and with an empty one are the same
    assert salt_of("a") == salt_of("a", None)


def test_quotas_are_read_from_an_instances_file(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text(
        'name = "one"\nrole = "colocated"\n[[quotas]]\ntenant = "a"\nhbm = "1MiB"\n[[quotas]]\ntotal = 4096\n'
    )
    assert load(file, InstanceConfig).quotas == (TenantQuota(tenant="a", hbm="1MiB"), TenantQuota(total=4096))


@pytest.mark.parametrize(
    ("quotas", "says"),
    [
        ([{"tenant": "a"}], "the quota of a bounds nothing; set hbm, dram or total"),
        ([{"tenant": "a", "hbm": "1 brick"}], r"quotas\.hbm"),
        ([{"tenant": "a", "hbm": 1}, {"tenant": "a", "dram": 1}], "two quotas for tenant 'a'; keep one"),
        ([{"hbm": 1}, {"hbm": 2}], "two quotas for each tenant; keep one"),
        ([{"tenant": "shared", "hbm": 1}], r"'shared', which is none of the isolated keys \(a\); set isolated = true"),
    ],
)
def test_quotas_that_cannot_be_are_refused(quotas: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        deployment(*quotas)


@pytest.mark.engine
@pytest.mark.multiproc
@pytest.mark.slow
def test_c37_served_requests_are_charged_to_their_tenant_on_both_instances(tmp_path: Path) -> None:
    """A's history is bounded on the prefill instance and where its KV is sent to; B's stays whole beside it."""
    pytest.importorskip("torch")
    from ref_transformers import greedy, save_random_model

    from poolweave.serving.cluster import LocalCluster
    from poolweave.serving.engine.sequence import SamplingParams

    folder = save_random_model("llama", tmp_path / "llama")
    blocks = 8

    def instance(role: Role, block_bytes: int = 0) -> InstanceConfig:
        quotas = (TenantQuota(tenant="a", total=blocks * block_bytes),) if block_bytes else ()
        name = f"{role.value}-{os.getpid()}-q"
        return InstanceConfig(name=name, role=role, model=str(folder), hbm="4MiB", quotas=quotas)

    with LocalCluster(ClusterConfig(instances=(instance(Role.COLOCATED),))) as made:
        size = (4 << 20) // made.stats(made.members[0].name).pool["hbm"]["total"]
    pair = tuple(instance(role, size) for role in (Role.PREFILL, Role.DECODE))
    greedily = SamplingParams(max_new_tokens=4, temperature=0.0)
    with LocalCluster(ClusterConfig(instances=pair)) as cluster:

        def ask(first: int, key: str, cache_salt: str | None = None) -> int:
            prompt = [(first + n) % 90 + 5 for n in range(3 * BLOCK + 5)]
            record = cluster.generate(prompt, greedily, tenant=owner_of(key, cache_salt), timeout_s=300).result()
            assert list(record.answer) == greedy(folder, tuple(prompt), 4)
            return record.cached_tokens

        def charged() -> list[int]:
            return [cluster.stats(one.name).pool["tenants"]["a"]["blocks"] for one in pair]

        assert charged() == [0, 0]
        assert ask(0, "b") == 0
        for first in range(1, 8):
            assert ask(first, "a") == 0
            assert all(0 < count <= blocks for count in charged())
        assert ask(7, "a") == 3 * BLOCK, "its latest is there"
        assert ask(1, "a") == 0, "its oldest made room for it"
        assert ask(0, "b") == 3 * BLOCK, "B has what it had"
        for first in range(8, 14):
            assert ask(first, "a", f"salt {first}") == 0
            assert all(0 < count <= blocks for count in charged()), "whatever its salts"
        assert ask(0, "b") == 3 * BLOCK
        for one in pair:
            assert cluster.stats(one.name).pool["events"]["over_quota"] > 0
