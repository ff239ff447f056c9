"""One real vLLM engine in a process, driven by JSON lines. Run by the tests with the Python that has vLLM.

`engine_process.py <json of LLM's arguments>`: answers come on the original stdout, all else that is printed on stderr.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

import msgspec
from strike import Strike

from poolweave.errors import PoolweaveError


class Engine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        self.adapters = arguments.pop("adapters", {})
        for name, kind in (("kv_transfer_config", KVTransferConfig), ("kv_events_config", KVEventsConfig)):
            if name in arguments:
                arguments[name] = kind(**arguments[name])
        self.llm = LLM(**arguments)
        self._strike: Strike | None = None

    @property
    def side(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler_side

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_side

    def generate(self, prompts: list[dict[str, Any]]) -> dict[str, Any]:
        """Of each prompt: tokens, cached tokens, what the answer says of its KV; and the seconds for all."""
        loras = [self._lora(prompt.get("lora")) for prompt in prompts]
        started = time.perf_counter()
        outputs = self.llm.generate(
            [_input(prompt) for prompt in prompts], [self._sampling(prompt) for prompt in prompts], use_tqdm=False,
            lora_request=loras if any(loras) else None,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        return {"answers": [_answer(output) for output in outputs], "seconds": seconds}

    def reset(self) -> bool:
        return bool(self.llm.reset_prefix_cache())

    def forget(self) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def figures(self) -> dict[str, Any]:
        """The pool proven and counted; `active` blocks are held by anyone but the index."""
        pool, side = self.side.pool, self.side
        pool.check()
        stats = pool.stats()
        (tier,) = stats.tiers.values()
        return {"indexed": stats.indexed, "active": tier.active, "leased": tier.leased, "tracks": len(side._tracks),
                "steps": len(side._steps), "counters": dict(side.counters), "traffic": dict(side._traffic.counters),
                "free": self._free_pages()}  # fmt: skip

    def fail_load(self, position: int) -> None:
        """The next load cannot read its block number `position`, whatever is tried."""
        worker = self.worker
        copy, load = worker._copy, worker.load
        bad: list[int] = []

        def copy_unless_bad(sources: Any, targets: Any, froms: Any, tos: Any) -> None:
            if bad and bad[0] in froms.tolist():
                raise PoolweaveError("this block cannot be read")
            copy(sources, targets, froms, tos)

        def load_badly() -> None:
            loads = worker._plan.loads
            if len(loads):
                bad.append(int(loads.rows[position]))
                worker.load = load
            load()
            if bad:
                bad.clear()
                worker._copy = copy

        worker._copy, worker.load = copy_unless_bad, load_badly

    def whereabouts(self) -> dict[str, Any]:
        """What a pool elsewhere must know to send KV here: this one's layout, addresses and identity."""
        pool = self.side.pool
        layout = msgspec.json.encode(pool.layout).decode()
        digest = pool.digest(pool.namespace(self.side.base))
        return {"layout": layout, "instance": pool.instance, "addresses": pool.addresses, "identity": digest.hex(),
                "epoch": f"{pool.epoch:x}"}  # fmt: skip

    def drop(self, ids: list[int]) -> None:
        """Neither vLLM nor the engine's own pool has KV of this prompt any more."""
        self.llm.reset_prefix_cache()
        self.side.pool.delete(ids, self.side.pool.namespace(self.side.base))

    def attached(self) -> bool:
        return self.side._traffic._keeper.peer is not None

    def strike(self, pid: int, step: str) -> None:
        self._strike = Strike(self, pid, step)

    def struck(self) -> bool:
        strike, self._strike = self._strike, None
        return strike is not None and strike.over()

    def abort_many(self, seed: int, count: int) -> int:
        """Random requests of shared prefixes, `count` of them aborted at random steps; -> how many ended."""
        from vllm import SamplingParams

        rng, engine = random.Random(seed), self.llm.llm_engine
        prefix = [rng.randrange(3, 1000) for _ in range(400)]
        live: list[str] = []
        aborted = ended = number = 0
        while aborted < count:
            if len(live) < 8:
                ids = prefix[: rng.randrange(20, 400)] + [rng.randrange(3, 1000) for _ in range(rng.randrange(30))]
                name, number = f"fuzz-{seed}-{number}", number + 1
                prompt = (
                    {"prompt_token_ids": ids, "cache_salt": "s"} if rng.random() < 0.2 else {"prompt_token_ids": ids}
                )
                engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=rng.randrange(1, 40)))
                live.append(name)
            if rng.random() < 0.7 and live:
                engine.abort_request([live.pop(rng.randrange(len(live)))])
                aborted += 1
            if rng.random() < 0.05:
                engine.reset_prefix_cache()
            for output in engine.step():
                if output.finished and output.request_id in live:
                    live.remove(output.request_id)
                    ended += 1
        engine.abort_request(live)
        while engine.has_unfinished_requests():
            engine.step()
        engine.step()
        return ended

    def storm(self, prompts: list[dict[str, Any]], seed: int, share: float) -> list[dict[str, Any] | None]:
        """All prompts at once, up to `share` of them aborted at random steps: None instead of their answers."""
        rng, engine = random.Random(seed), self.llm.llm_engine
        names = [f"storm-{seed}-{number}" for number in range(len(prompts))]
        doomed = rng.sample(names, round(share * len(names)))
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, _input(prompt), self._sampling(prompt))
        ended: dict[str, dict[str, Any] | None] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    ended.setdefault(output.request_id, _answer(output))
            doomed = [name for name in doomed if name not in ended]
            if doomed and rng.random() < 0.6:
                engine.abort_request([doomed[-1]])
                ended[doomed[-1]] = None
        engine.step()
        return [ended[name] for name in names]

    def _free_pages(self) -> int:
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _sampling(self, prompt: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": prompt["params"]} if prompt.get("params") else None
        return SamplingParams(temperature=0, max_tokens=prompt.get("max_tokens", 8), ignore_eos=True, extra_args=extra)

    def _lora(self, name: str | None) -> Any:
        if name is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(name, list(self.adapters).index(name) + 1, self.adapters[name])


def _input(prompt: dict[str, Any]) -> dict[str, Any]:
    salted = {"cache_salt": prompt["salt"]} if prompt.get("salt") is not None else {}
    return {"prompt_token_ids": prompt["ids"], **salted}


def _answer(output: Any) -> dict[str, Any]:
    tokens = list(output.outputs[0].token_ids)
    return {"tokens": tokens, "cached": output.num_cached_tokens, "params": output.kv_transfer_params}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        engine = Engine(json.loads(sys.argv[1]))
    except Exception as error:  # the test wants to read it
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        raise
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answers.write(json.dumps({"answer": getattr(engine, name)(**arguments)}) + "\n")
    engine.llm.llm_engine.engine_core.engine_core.scheduler.shutdown()
    os._exit(0)  # torch takes seconds to be taken down in order


if __name__ == "__main__":
    main()
