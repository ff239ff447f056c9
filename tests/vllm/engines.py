"""Real vLLM engines as child processes of a test, and the models they run."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 32  # vLLM's on a CPU
START_S, CALL_S = 600.0, 300.0  # generous: a loaded machine is no fault
FOR_EVER = 1e5  # seconds: an engine's wait for KV on its way ends by what happens, never by time
_RUNNER = Path(__file__).with_name("engine_process.py")


def vllm_python() -> str | None:
    """The Python that has vLLM and poolweave: what `make test-vllm` says."""
    return os.environ.get("POOLWEAVE_VLLM_PYTHON")


def engine_arguments(
    model: str | Path, *, pool: dict[str, Any] | None = None, role: str = "kv_both", **more: Any
) -> dict[str, Any]:
    """LLM's, as values of JSON."""
    arguments = {
        "model": str(model), "dtype": "float32", "max_model_len": 2048, "block_size": BLOCK, "enforce_eager": True,
        "max_num_batched_tokens": 256, "max_num_seqs": 16, **more,
    }  # fmt: skip
    if pool is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "PoolConnector", "kv_connector_module_path": "poolweave.integrations.vllm",
            "kv_role": role, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": pool,
        }  # fmt: skip
    return arguments


class EngineProcess:
    """Starts at once; the first call waits for it. Takes what engine_arguments() takes."""

    def __init__(self, model: str | Path, **more: Any) -> None:
        arguments = engine_arguments(model, **more)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._folder = tempfile.TemporaryDirectory(prefix="poolweave-vllm-")  # what vLLM leaves behind goes with it
        self._process = subprocess.Popen(
            [vllm_python() or "", str(_RUNNER), json.dumps(arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, env=engine_environment(self._folder.name), cwd=self._folder.name,
        )  # fmt: skip
        self._line = b""
        self._ready = False

    def ready(self) -> EngineProcess:
        if not self._ready:
            self._answer(START_S)
            self._ready = True
        return self

    def call(self, name: str, **arguments: Any) -> Any:
        self.send(name, **arguments)
        return self.answer()

    def send(self, name: str, **arguments: Any) -> None:
        """Like call(), without waiting for what comes: answer() does."""
        self.ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        return self._answer(CALL_S)["answer"]

    def generate(self, *prompts: dict[str, Any]) -> list[dict[str, Any]]:
        return list(self.call("generate", prompts=list(prompts))["answers"])

    def kill(self) -> None:
        """SIGKILL, and reap it."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Let it end in order; by force when it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()

    def log(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline, fd = time.monotonic() + timeout_s, self._process.stdout.fileno()
        while b"\n" not in self._line:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"the engine says nothing for {timeout_s} s; its log ends:\n{self.log()[-4000:]}")
            part = os.read(fd, 1 << 20)
            if not part:
                raise AssertionError(f"the engine died; its log ends:\n{self.log()[-4000:]}")
            self._line += part
        line, self._line = self._line.split(b"\n", 1)
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise EngineRefused(told["error"])
        return told


class EngineRefused(Exception):
    """The engine did not start, and says why."""


def engine_environment(folder: str | Path) -> dict[str, str]:
    """`folder`: where its sockets and scratch files lie."""
    return {
        **os.environ, "PYTHONPATH": os.environ.get("POOLWEAVE_VLLM_SITE", ""),
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_RPC_BASE_PATH": str(folder), "TMPDIR": str(folder),
        "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0",
    }  # fmt: skip


def ask(ids: list[int], **more: Any) -> dict[str, Any]:
    """A prompt for generate()."""
    return {"ids": ids, **more}


def prompts(seed: int) -> Iterator[list[int]]:
    """Random prompts of the tiny models' vocabulary, 40 to 400 tokens."""
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(3, 1000, int(rng.integers(40, 400))).tolist()


class CacheOracle:
    """What a cache that never forgets has of a prompt: whole blocks, one token left to compute."""

    def __init__(self) -> None:
        self._seen: set[tuple[Any, ...]] = set()

    def cached(self, ids: list[int], who: Any = None) -> int:
        blocks = 0
        while (blocks + 1) * BLOCK < len(ids) and (who, *ids[: (blocks + 1) * BLOCK]) in self._seen:
            blocks += 1
        return blocks * BLOCK

    def learn(self, ids: list[int], answer: list[int], who: Any = None) -> None:
        """The last token of an answer was never computed."""
        told = [*ids, *answer[:-1]]
        self._seen.update((who, *told[:end]) for end in range(BLOCK, len(told) + 1, BLOCK))
