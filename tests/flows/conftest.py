"""Clusters of real processes on small models, one a model and transport for the whole run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ref_transformers import save_random_model

from poolweave.serving.cluster import LocalCluster
from poolweave.serving.instance.config import ClusterConfig, InstanceConfig, Transport
from poolweave.types import Role

LEASE_S = 3.0
# How a model's instances hand KV over and keep it; the others' choose by themselves.
HAND_OVER = {"qwen3moe": ("by-layer", "layered"), "mixtral": ("by-request", "aggregated")}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a model lies: a random one made once, or SmolLM2 unpacked from its wheel."""

    @cache
    def folder(kind: str) -> Path:
        if kind != "smollm2":
            return save_random_model(kind, tmp_path_factory.mktemp(kind))
        from poolweave.serving.engine.smollm2 import smollm2_directory

        return smollm2_directory()

    return folder


@pytest.fixture(scope="session")
def settings(model_folder: Callable[[str], Path]) -> Callable[..., ClusterConfig]:
    """One instance a role, small pools, a short lease."""
    numbers = itertools.count()

    def make(kind: str, *roles: Role, transport: Transport = "shm", hbm: str = "24MiB") -> ClusterConfig:
        granularity, kv_order = HAND_OVER.get(kind, ("auto", "aggregated"))
        template = InstanceConfig(
            name="x", role=Role.PREFILL, model=str(model_folder(kind)), hbm=hbm, lease_s=LEASE_S,
            granularity=granularity, kv_order=kv_order,
        )  # fmt: skip
        number = next(numbers)  # names are the whole machine's
        instances = tuple(
            replace(template, name=f"{role.value}-{os.getpid()}-{number}", role=role) for role in roles or tuple(Role)
        )
        return ClusterConfig(instances=instances, transport=transport, start_timeout_s=600)

    return make


@pytest.fixture(scope="session")
def clusters(settings: Callable[..., ClusterConfig]) -> Iterator[Callable[..., LocalCluster]]:
    """The running cluster of a model; the one before it is stopped, so that no more than one takes memory."""
    running: dict[tuple[str, Transport], LocalCluster] = {}

    def get(kind: str, transport: Transport = "shm") -> LocalCluster:
        if (kind, transport) not in running:
            stop()
            hbm = "256MiB" if kind == "smollm2" else "24MiB"
            running[kind, transport] = LocalCluster(settings(kind, transport=transport, hbm=hbm))
        return running[kind, transport]

    def stop() -> None:
        while running:
            running.popitem()[1].close()

    yield get
    stop()
