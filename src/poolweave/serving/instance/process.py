"""One instance as an operating-system process: `python -m poolweave.serving.instance.process`.

Its main thread takes control messages of its first model, threads those of others; an engine thread computes
(JobRunner); each pool's transfer engine has its own. It ends on SIGTERM, and with its parent when that started it with
a lifeline. Started by hand it reads a TOML file:

    python -m poolweave.serving.instance.process --config prefill.toml
"""

from __future__ import annotations

import logging
import secrets
import threading
from contextlib import ExitStack

from poolweave.serving.control.server import RpcServer
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.instance.job_runner import JobRunner
from poolweave.serving.instance.kinds import make_kind
from poolweave.serving.instance.station import Shared, Station, make_pool
from poolweave.serving.process.service import end_process, run_process

logger = logging.getLogger(__name__)


class Instance:
    """Models, pools, engine and control servers of one process. Binds first: a taken port is known before models load.

    Raises AddressInUse, ConfigError, ModelNotFound and what else loading a model raises; then nothing is left open.
    """

    def __init__(self, config: InstanceConfig) -> None:
        self._config = config
        self._broken = False
        with ExitStack() as undo:
            servers = []
            for place in config.stations:
                servers.append(RpcServer(place.listen, secrets.randbits(63) | 1, name=place.name))
                undo.callback(servers[-1].close)
            self._kind = make_kind(config)
            undo.callback(self._kind.close)
            self._stations = []
            for name, place, server in zip(config.model_names, config.stations, servers, strict=True):
                model = self._kind.models[name]
                pool = make_pool(place, model)
                undo.callback(pool.close)
                self._stations.append(Station(name, place, model, server, pool))
            pools = {name: one.pool for name, one in zip(config.model_names, self._stations, strict=True)}
            self._runner = JobRunner(self._kind.engine(pools), on_broken=self._give_up)
            undo.pop_all()

    @property
    def address(self) -> str:
        """Where its first model takes control messages; its Welcome names those of the others."""
        return self._stations[0].address

    def serve(self) -> int:
        """Run until `stop`; -> the process's exit code."""
        logger.info("%s serves at %s", self._config.name, self.address)
        names = self._config.model_names if self._config.models else ()
        stations = {name: one.address for name, one in zip(names, self._stations, strict=False)}
        shared = Shared(runner=self._runner, counters=self._kind.counters, stations=stations)
        first, *others = self._stations
        threads = [threading.Thread(target=self._serve_beside, args=(one, shared), daemon=True) for one in others]
        for thread in threads:
            thread.start()
        try:
            first.serve(shared)
        finally:
            self.stop()
            for thread in threads:
                thread.join()
        return 1 if self._broken else 0

    def stop(self) -> None:
        """Let `serve` return; from any thread."""
        for one in self._stations:
            one.stop()

    def close(self) -> None:
        """Leave the deployment, fail what runs, free the pools. Idempotent."""
        for one in self._stations:
            one.leave()
        self._runner.stop()
        for one in self._stations:
            one.pool.close()
        self._runner.join()
        self._kind.close()
        for one in self._stations:
            one.close()

    def _serve_beside(self, station: Station, shared: Shared) -> None:
        try:
            station.serve(shared)
        except BaseException:
            logger.exception("a station of %s ended", self._config.name)
            self._give_up()

    def _give_up(self) -> None:
        self._broken = True
        self.stop()


def main(arguments: list[str] | None = None) -> int:
    """The process; -> its exit code."""
    return run_process(
        InstanceConfig, Instance, "poolweave.serving.instance.process", arguments, prepare=_import_engine
    )


def _import_engine() -> None:
    """torch and transformers, which every kind of instance needs sooner or later."""
    from poolweave.serving.engine import TorchEngine, load_model

    logger.debug("imported %s and %s", TorchEngine, load_model)


if __name__ == "__main__":
    end_process(main())
