"""One instance as an operating-system process: `python -m poolweave.serving.instance`.

Its main thread takes control messages; an engine thread computes (JobRunner); the pool's transfer engine has its own.
It ends on SIGTERM, and with its parent when that started it with a lifeline. Started by hand it reads a TOML file:

    python -m poolweave.serving.instance --config prefill.toml
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import secrets
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from poolweave.errors import RequestRefused
from poolweave.index.events import PublisherConfig
from poolweave.mempool import MemPool, PoolConfig
from poolweave.serving.granularity import HandOverPolicy
from poolweave.serving.instance_config import InstanceConfig
from poolweave.serving.instance_membership import InstanceMembership
from poolweave.serving.job_runner import JobRunner
from poolweave.serving.messages import (
    Cancel,
    Complete,
    Connect,
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
from poolweave.serving.rpc_server import Caller, RpcServer
from poolweave.serving.service import run_process
from poolweave.serving.tasks import CompleteTask, DecodeTask, PrefillTask, Workplace, tag_of
from poolweave.transfer import TransferConfig
from poolweave.types import Role, Tier

if TYPE_CHECKING:
    from poolweave.serving.engine import LoadedModel

logger = logging.getLogger(__name__)

_COMPUTES = {Prefill: Role.PREFILL, Decode: Role.DECODE, Complete: Role.COLOCATED}


class Instance:
    """Model, pool, engine and control server of one process. Binds first: a taken port is known before torch loads.

    Raises AddressInUse, ConfigError, ModelNotFound and what else loading a model raises; then nothing is left open.
    """

    def __init__(self, config: InstanceConfig) -> None:
        self._config = config
        self._broken = False
        self._server = RpcServer(config.listen, secrets.randbits(63) | 1, name=config.name)
        try:
            from poolweave.serving.engine import TorchEngine, load_model

            self._model = load_model(config.model, config.dtype, config.device)
            self._pool = _pool(config, self._model)
            try:
                engine = TorchEngine(self._model, self._pool, config.engine)
                self._runner = JobRunner(engine, on_broken=self._give_up)
            except BaseException:
                self._pool.close()
                raise
        except BaseException:
            self._server.close()
            raise
        self._membership: InstanceMembership | None = None
        self._workplace = Workplace(
            self._pool, self._model.identity, config.lease_s, HandOverPolicy(self._pool.layout, config.granularity)
        )
        self._handlers: dict[type[Request], Callable[[Caller, Any], None]] = {
            Hello: lambda caller, request: caller.reply(self._welcome()),
            Connect: self._connect,
            Disconnect: self._disconnect,
            Prefill: self._prefill,
            Decode: self._decode,
            Complete: self._complete,
            Cancel: self._cancel,
            Discard: self._discard,
            Stats: self._stats,
        }

    @property
    def address(self) -> str:
        """Where it takes control messages."""
        return self._server.address

    def serve(self) -> int:
        """Run until `stop`; -> the process's exit code."""
        logger.info("%s serves at %s", self._config.name, self.address)
        if self._config.registry is not None:
            self._membership = InstanceMembership(
                self._config, self._pool, (self.address, *self._pool.addresses.values())
            )
        self._server.serve(self._handle, on_gone=self._runner.cancel_client)
        return 1 if self._broken else 0

    def stop(self) -> None:
        """Let `serve` return; safe in a signal handler."""
        self._server.stop()

    def close(self) -> None:
        """Leave the deployment, fail what runs, free the pool. Idempotent."""
        if self._membership is not None:
            self._membership.close()
        self._runner.stop()
        self._pool.close()
        self._runner.join()
        self._server.close()

    def _handle(self, caller: Caller, request: Request) -> None:
        self._handlers[type(request)](caller, request)

    def _give_up(self) -> None:
        self._broken = True
        self.stop()

    def _welcome(self) -> Welcome:
        layout, events = self._pool.layout, self._pool.events
        return Welcome(
            instance=self._config.name,
            role=self._config.role.value,
            pid=os.getpid(),
            identity=self._model.identity,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            pool_blocks=self._pool.stats().tiers[Tier.HBM].total,
            max_positions=self._model.max_positions,
            addresses=self._pool.addresses,
            events=None if events is None else events.endpoint,
            replay=None if events is None else events.replay_endpoint,
        )

    def _connect(self, caller: Caller, request: Connect) -> None:
        self._pool.connect(request.peer, request.address)
        caller.reply(Done())

    def _disconnect(self, caller: Caller, request: Disconnect) -> None:
        self._pool.disconnect(request.peer)
        caller.reply(Done())

    def _prefill(self, caller: Caller, request: Prefill) -> None:
        self._check_role(request)
        self._runner.submit(PrefillTask(self._workplace, caller, request.job, request.decode))

    def _decode(self, caller: Caller, request: Decode) -> None:
        self._check_role(request)
        self._runner.submit(DecodeTask(self._workplace, caller, request.job, request.first, request.prefill))

    def _complete(self, caller: Caller, request: Complete) -> None:
        self._check_role(request)
        self._runner.submit(CompleteTask(self._workplace, caller, request.job))

    def _cancel(self, caller: Caller, request: Cancel) -> None:
        self._runner.cancel(request.request)
        caller.reply(Done())

    def _discard(self, caller: Caller, request: Discard) -> None:
        self._pool.discard(tag_of(request.request))
        caller.reply(Done())

    def _stats(self, caller: Caller, request: Stats) -> None:
        stats = self._pool.stats()
        tiers = {str(tier.name).lower(): msgspec.to_builtins(figures) for tier, figures in stats.tiers.items()}
        transfer = None if stats.transfer is None else msgspec.to_builtins(stats.transfer)
        pool = {**tiers, "indexed": stats.indexed, "events": dict(stats.events), "transfer": transfer}
        caller.reply(Counters(pool=pool, jobs=self._runner.num_tasks))

    def _check_role(self, request: Request) -> None:
        needed = _COMPUTES[type(request)]
        if self._config.role is not needed:
            raise RequestRefused(
                f"instance {self._config.name} has the role {self._config.role.value}, the request needs {needed.value}"
            )


def _pool(config: InstanceConfig, model: LoadedModel) -> MemPool:
    transfer = TransferConfig(listen=("shm", "tcp"), lease_s=config.lease_s)
    events = (
        None if config.registry is None else PublisherConfig(endpoint=_beside(config), replay_endpoint=_beside(config))
    )
    settings = PoolConfig(transfer=transfer, events=events)
    sizes = {"hbm": config.hbm, "dram": config.dram}
    layout = dataclasses.replace(model.layout, order=config.kv_order)
    return MemPool(layout, instance=config.name, device=config.device, config=settings, **sizes)


def _beside(config: InstanceConfig) -> str:
    """A free port where the control messages are taken: who reaches one reaches the other."""
    host = config.listen.partition("://")[2].rpartition(":")[0]
    return f"tcp://{host}:0" if config.listen.startswith("tcp://") else "tcp://127.0.0.1:0"


def main(arguments: list[str] | None = None) -> int:
    """The process; -> its exit code."""
    return run_process(InstanceConfig, Instance, "poolweave.serving.instance", arguments)


if __name__ == "__main__":
    code = main()
    gc.collect()  # views and ranges first, the native module after them
    sys.exit(code)
