"""One model at one instance: its pool, the server that takes its requests, and its membership."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from poolweave.errors import RequestRefused
from poolweave.index.events import PublisherConfig
from poolweave.mempool import MemPool, PoolConfig, Quota, Quotas
from poolweave.serving.control.messages import (
    Cancel,
    Complete,
    Connect,
    Copy,
    Counters,
    Decode,
    Discard,
    Disconnect,
    Done,
    Hello,
    Prefill,
    Request,
    Stats,
    Welcome,
)
from poolweave.serving.control.server import Caller, RpcServer
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.instance.decode_task import DecodeTask
from poolweave.serving.instance.granularity import HandOverPolicy
from poolweave.serving.instance.job_runner import JobRunner
from poolweave.serving.instance.kinds import Served
from poolweave.serving.instance.membership import InstanceMembership
from poolweave.serving.instance.prefix_copy import copy_prefix
from poolweave.serving.instance.tasks import CompleteTask, PrefillTask, Workplace, tag_of
from poolweave.serving.tenant_quota import TenantQuota, owner_of, salt_of
from poolweave.transfer import TransferConfig
from poolweave.types import Role, Tier

_COMPUTES = {Prefill: Role.PREFILL, Decode: Role.DECODE, Complete: Role.COLOCATED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the stations of a process share: who computes, its figures, and each one's address by model."""

    runner: JobRunner
    counters: Callable[[], dict[str, Any]]
    stations: Mapping[str, str]


class Station:
    """Takes the requests of one model and has them computed. Owns pool and server from construction on."""

    def __init__(self, name: str, config: InstanceConfig, model: Served, server: RpcServer, pool: MemPool) -> None:
        """`name`: the model's; `config`: of this station alone."""
        self.pool = pool
        self._name = name
        self._config = config
        self._model = model
        self._server = server
        self._membership: InstanceMembership | None = None
        self._tenants = {  # held, so that their figures are there from the start
            one.tenant: pool.namespace(owner_of(one.tenant).identity(model.identity))
            for one in config.quotas
            if one.tenant
        }
        policy = HandOverPolicy(pool.layout, config.granularity)
        self._workplace = Workplace(pool, model.identity, config.lease_s, policy, name)
        self._handlers: dict[type[Request], Callable[[Caller, Any], None]] = {
            Hello: lambda caller, request: caller.reply(self._welcome()),
            Connect: self._connect,
            Disconnect: self._disconnect,
            Prefill: self._prefill,
            Decode: self._decode,
            Complete: self._complete,
            Cancel: self._cancel,
            Discard: self._discard,
            Copy: self._copy,
            Stats: self._stats,
        }

    @property
    def address(self) -> str:
        """Where it takes control messages."""
        return self._server.address

    def serve(self, shared: Shared) -> None:
        """Run until `stop`, in the one thread that may."""
        self._shared = shared
        if self._config.registry is not None:
            self._membership = InstanceMembership(
                self._config, self.pool, (self.address, *self.pool.addresses.values())
            )
        self._server.serve(
            lambda caller, request: self._handlers[type(request)](caller, request), on_gone=shared.runner.cancel_client
        )

    def stop(self) -> None:
        """Let `serve` return; from any thread."""
        self._server.stop()

    def leave(self) -> None:
        """Be no member any more. Idempotent."""
        if self._membership is not None:
            self._membership.close()

    def close(self) -> None:
        """Hang up. The pool is the instance's to close. Idempotent."""
        self._server.close()

    def _welcome(self) -> Welcome:
        layout, events = self.pool.layout, self.pool.events
        return Welcome(
            instance=self._config.name,
            role=self._config.role.value,
            pid=os.getpid(),
            identity=self._model.identity,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            pool_blocks=self.pool.stats().tiers[Tier.HBM].total,
            max_positions=self._model.max_positions,
            addresses=self.pool.addresses,
            events=None if events is None else events.endpoint,
            replay=None if events is None else events.replay_endpoint,
            model=self._name,
            stations=dict(self._shared.stations),
        )

    def _connect(self, caller: Caller, request: Connect) -> None:
        self.pool.connect(request.peer, request.address)
        caller.reply(Done())

    def _disconnect(self, caller: Caller, request: Disconnect) -> None:
        self.pool.disconnect(request.peer)
        caller.reply(Done())

    def _prefill(self, caller: Caller, request: Prefill) -> None:
        self._check_role(request)
        self._shared.runner.submit(PrefillTask(self._workplace, caller, request.job, request.decode))

    def _decode(self, caller: Caller, request: Decode) -> None:
        self._check_role(request)
        self._shared.runner.submit(DecodeTask(self._workplace, caller, request))

    def _complete(self, caller: Caller, request: Complete) -> None:
        self._check_role(request)
        self._shared.runner.submit(CompleteTask(self._workplace, caller, request.job))

    def _cancel(self, caller: Caller, request: Cancel) -> None:
        self._shared.runner.cancel(request.request)
        caller.reply(Done())

    def _discard(self, caller: Caller, request: Discard) -> None:
        self.pool.discard(tag_of(request.request))
        caller.reply(Done())

    def _copy(self, caller: Caller, request: Copy) -> None:
        ns = self.pool.namespace(request.owner.identity(self._model.identity))
        copy_prefix(self.pool, ns, caller, request)

    def _stats(self, caller: Caller, request: Stats) -> None:
        stats = self.pool.stats()
        tiers = {str(tier.name).lower(): msgspec.to_builtins(figures) for tier, figures in stats.tiers.items()}
        transfer = None if stats.transfer is None else msgspec.to_builtins(stats.transfer)
        tenants = {name: msgspec.to_builtins(stats.tenants[ns]) for name, ns in self._tenants.items()}
        pool = {
            **tiers,
            "tenants": tenants,
            "indexed": stats.indexed,
            "events": dict(stats.events),
            "transfer": transfer,
        }
        shared, recomputed = self._shared, self._workplace.recomputes.count
        caller.reply(Counters(pool, shared.runner.num_tasks, shared.counters(), recomputed))

    def _check_role(self, request: Request) -> None:
        needed = _COMPUTES[type(request)]
        if self._config.role is not needed:
            raise RequestRefused(
                f"instance {self._config.name} has the role {self._config.role.value}, the request needs {needed.value}"
            )


def make_pool(config: InstanceConfig, model: Served) -> MemPool:
    """A station's pool, which peers reach by both transports."""
    transfer = TransferConfig(listen=("shm", _beside(config)), lease_s=config.lease_s)
    events = (
        None if config.registry is None else PublisherConfig(endpoint=_beside(config), replay_endpoint=_beside(config))
    )
    settings = PoolConfig(transfer=transfer, events=events, quotas=_pool_quotas(config.quotas))
    sizes = {"hbm": config.hbm, "dram": config.dram}
    layout = dataclasses.replace(model.layout, order=config.kv_order)
    return MemPool(layout, instance=config.name, device=config.device, config=settings, **sizes)


def _pool_quotas(quotas: Sequence[TenantQuota]) -> Quotas | None:
    """As a pool takes them, by salt; None for none."""
    caps = {one.tenant: Quota(hbm=one.hbm, dram=one.dram, total=one.total) for one in quotas}
    each = caps.pop("", None)
    return Quotas(named={salt_of(name): cap for name, cap in caps.items()}, each=each) if quotas else None


def _beside(config: InstanceConfig) -> str:
    """A free port where the control messages are taken: who reaches one reaches the other."""
    host = config.listen.partition("://")[2].rpartition(":")[0]
    return f"tcp://{host}:0" if config.listen.startswith("tcp://") else "tcp://127.0.0.1:0"
