"""PoolConnector: what vLLM loads. Turns vLLM's calls into those of the two sides; decides nothing.

vLLM makes one for its scheduler, which owns the pool, and one for each worker, which copies. Contract: vLLM 0.32's
KVConnectorBase_V1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from poolweave.integrations.vllm.config import ConnectorConfig
from poolweave.integrations.vllm.engine_facts import base_identity, cache_layers, page_facts
from poolweave.integrations.vllm.pool_client import PoolClient
from poolweave.integrations.vllm.populating import populate
from poolweave.integrations.vllm.scheduler_side import SchedulerSide
from poolweave.integrations.vllm.step_plan import StepPlan, StepReport
from poolweave.integrations.vllm.traffic import Traffic, check_role
from poolweave.integrations.vllm.worker_side import WorkerSide
from poolweave.mempool import MemPool, PoolConfig
from poolweave.transfer import TransferConfig


@dataclasses.dataclass
class PlanMetadata(KVConnectorMetadata):
    """A StepPlan on its way to the workers."""

    plan: StepPlan


@dataclasses.dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """A StepReport on its way back."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.aggregate(other.report))


class PoolConnector(KVConnectorBase_V1, SupportsHMA):  # so that hybrid groups come here, to be refused by name
    """vLLM's KV in a MemPool: beyond its own cache, beyond its life (`pool`), and between engines (`peers`).

    `kv_connector_extra_config` is a ConnectorConfig. Raises ModelUnsupported for engines whose KV it cannot keep,
    ConfigError for settings.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = ConnectorConfig.of(transfer.kv_connector_extra_config)
        self._facts = page_facts(vllm_config, kv_cache_config)
        self._layout = self._facts.layout()
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self._failed_pages: set[int] = set()
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_side = self._build_scheduler_side(
                check_role(transfer.kv_role, self._config.peers, self._config.pool)
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """KV that was lost is computed anew: nothing waits for its delivery."""
        return False

    # --- worker ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        layers = cache_layers(kv_caches, self._kv_cache_config, self._facts)
        self.worker_side = WorkerSide(layers, self._config.threads)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, PlanMetadata)
        self._worker.begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before the forward pass begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Saves are whole when save_kv_layer returns."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_pages()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker.finish()
        return None if report is None else ReportMetadata(report)

    # --- scheduler ------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.lookup(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return PlanMetadata(self._scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if meta is not None:
            self._scheduler.settle(meta.report)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request)

    def reset_cache(self) -> bool:
        self._scheduler.forget()
        return True

    def shutdown(self) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.close()
            self.scheduler_side = None

    # --- private --------------------------------------------------------------------------------------------

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler_side is not None, "vLLM calls this on its scheduler's connector"
        return self.scheduler_side

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker_side is not None, "vLLM registers its caches first"
        return self.worker_side

    def _build_scheduler_side(self, role: str) -> SchedulerSide:
        config = self._config
        pool = MemPool(
            self._layout, instance=config.name, hbm=config.size,
            config=PoolConfig(max_hbm=config.size, transfer=TransferConfig(listen=config.listen)),
        )  # fmt: skip
        try:
            if config.populate:
                populate(pool)
            keeper = None if config.pool is None else PoolClient(config.pool, pool, config.wait_s)
            traffic = Traffic(pool, role, config.peers, keeper, config.wait_s)
            base = base_identity(self._vllm_config, self._layout, config.model_id)
            return SchedulerSide(pool, base, traffic)
        except BaseException:
            pool.close()
            raise
