"""What does the HTTP door cost, with an instance behind it that answers at once?

The door runs on one core, the mock instance and the load on another. Added TTFT: streamed chat over HTTP against the
same prompt by the control protocol straight from the same process, taken in turn. Goals: <= 3 ms, >= 500 requests/s,
>= 10,000 streamed tokens/s, 1,000 idle streams < 200 MiB (the door's whole memory).
`python benchmarks/bench_door.py [--smoke]`; one JSON line a question. Needs two cores and the serve extra.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "reference"))

import psutil
from ref_instance import FIRST, FakeInstance
from ref_words import save_words

from poolweave.serving.control.messages import Complete, Emit, Finished, Job, pack_tokens
from poolweave.serving.door.config import DoorConfig
from poolweave.serving.door.link import InstanceLink
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.membership.coordinator import CoordinatorConfig
from poolweave.serving.process.child import Child, Program
from poolweave.serving.process.service import run_process
from poolweave.types import Role

SMOKE = "--smoke" in sys.argv
REQUESTS = 40 if SMOKE else 2000
STREAMS, TOKENS = (8, 32) if SMOKE else (32, 500)
IDLE = 50 if SMOKE else 1000
NEVER = 3000  # an answer of so many tokens stops after its first
TALK = [{"role": "user", "content": "Tell me about the tides, please, and why there are two of them a day."}]


class MockInstance(FakeInstance):
    """Answers before its caller can blink, but for streams that are to stand still."""

    def _complete(self, caller: Any, request: Complete, cancelled: Any) -> None:
        count = request.job.sampling.max_new_tokens
        for _ in range(1 if count == NEVER else count):
            caller.reply(Emit([FIRST]))
        if count != NEVER:
            self.running.pop(request.job.request, None)
            caller.reply(Finished(finish_reason="length"))


class Client:
    """One keep-alive HTTP connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=64 << 20)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writer.close()

    async def ask(self, **fields: Any) -> None:
        body = json.dumps({"model": "echo", "messages": TALK, **fields}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        self._writer.write(head.encode() + b"\r\nContent-Type: application/json\r\n\r\n" + body)
        status = await self._reader.readline()
        assert b" 200 " in status, status
        self._head = await self._reader.readuntil(b"\r\n\r\n")

    async def whole(self, **fields: Any) -> None:
        await self.ask(**fields)
        length = next(line for line in self._head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await self._reader.readexactly(int(length.split(b":")[1]))

    async def first(self, **fields: Any) -> None:
        """Until the first text of a stream."""
        await self.ask(stream=True, **fields)
        await self._reader.readuntil(b'"content":"')

    async def rest(self) -> int:
        """To the end of a stream; -> its pieces of text."""
        text = await self._reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        return text.count(b'"delta":{"content"')


async def added_ttft(port: int, mock: str) -> dict[str, Any]:
    link = InstanceLink("mock", mock, lambda link: None)
    await link.greet(10)
    direct, http = [], []
    tokens = pack_tokens(list(range(40, 140)))
    loop = asyncio.get_running_loop()
    async with Client(port) as client:
        for number in range(REQUESTS // 4):
            start = time.perf_counter()
            await client.first(max_tokens=4)
            http.append(time.perf_counter() - start)
            await client.rest()
            job = Job(request=f"d{number}", tokens=tokens, flow="colocated", sampling=SamplingParams(max_new_tokens=4))
            start = time.perf_counter()
            async for reply in link.stream(Complete(job), loop.time() + 60):
                if isinstance(reply, Emit) and len(direct) == number:
                    direct.append(time.perf_counter() - start)
    link.close()
    added = 1000 * (statistics.median(http) - statistics.median(direct))
    return {"metric": "added TTFT p50", "value": round(added, 3), "unit": "ms", "limit": 3.0}


async def request_rate(port: int) -> dict[str, Any]:
    async def some(count: int) -> None:
        async with Client(port) as client:
            for _ in range(count):
                await client.whole(max_tokens=1)

    start = time.perf_counter()
    await asyncio.gather(*(some(REQUESTS // 20) for _ in range(20)))
    rate = REQUESTS // 20 * 20 / (time.perf_counter() - start)
    return {"metric": "requests", "value": round(rate, 1), "unit": "1/s", "goal": 500}


async def token_rate(port: int) -> dict[str, Any]:
    async def stream() -> None:
        async with Client(port) as client:
            await client.first(max_tokens=TOKENS)
            await client.rest()

    start = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(STREAMS)))
    rate = STREAMS * TOKENS / (time.perf_counter() - start)
    return {"metric": "streamed tokens", "value": round(rate), "unit": "1/s", "goal": 10_000}


async def idle_memory(port: int, pid: int) -> dict[str, Any]:
    clients = [Client(port) for _ in range(IDLE)]
    for client in clients:
        await client.__aenter__()
        await client.first(max_tokens=NEVER)
    memory = psutil.Process(pid).memory_info().rss / 2**20
    for client in clients:
        await client.__aexit__()
    return {"metric": "door's memory", "streams": IDLE, "value": round(memory, 1), "unit": "MiB", "limit": 200}


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Child(Program("coordinator", "poolweave.serving.membership.coordinator", CoordinatorConfig()))
        children = [coordinator]
        try:
            registry = coordinator.wait_ready(60)
            config = InstanceConfig(name="mock", role=Role.COLOCATED, registry=registry)
            os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), sys.path[0]))
            children.append(Child(Program("mock", "bench_door", config)))
            mock = children[1].wait_ready(60)
            words = str(save_words(Path(folder) / "echo"))
            door = DoorConfig(registry=registry, model=words, listen="127.0.0.1:0", max_in_flight=10_000)
            children.append(Child(Program("door", "poolweave.serving.door.server", door)))
            port = int(children[2].wait_ready(60).rpartition(":")[2])
            for child, core in ((children[1], cores[-1]), (children[2], cores[0])):
                psutil.Process(child.pid).cpu_affinity([core])
            os.sched_setaffinity(0, {cores[-1]})
            asyncio.run(measure(port, mock, children[2].pid))
        finally:
            for child in reversed(children):
                child.close()


async def measure(port: int, mock: str, pid: int) -> None:
    while True:
        try:
            async with Client(port) as client:
                await client.whole(max_tokens=1)
            break
        except AssertionError:  # 503: the mock has not been linked yet
            await asyncio.sleep(0.1)
    for point in (
        await added_ttft(port, mock), await request_rate(port), await token_rate(port), await idle_memory(port, pid)
    ):  # fmt: skip
        print(json.dumps(point), flush=True)


if __name__ == "__main__":
    if "--lifeline" in sys.argv:
        sys.exit(run_process(InstanceConfig, MockInstance, "mock"))
    main()
