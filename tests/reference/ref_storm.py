"""A storm over a deployment: clients that ask without end while processes are killed and stopped at random."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import psutil
from ref_waiting import until
from ref_whole import Whole

from poolweave.serving.deployment import Deployment

CLEAR = {429, 499, 503, 504}  # statuses that tell a client what to do


class Storm:
    """Clients on threads. Every answer is held against `right(prompt, length)`; a stream that was cut off against its
    beginning."""

    def __init__(
        self, deployment: Deployment, model: str, right: Callable[[int, int], str], prompts: list[Any]
    ) -> None:
        self._deployment = deployment
        self._model = model
        self._right = right
        self._prompts = prompts
        self._ending = threading.Event()
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._whole = Whole(deployment)
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(4)]

    def blow(self, seconds: float, seed: int, pause_s: tuple[float, float]) -> None:
        """Kill, stop or let go on a process at random, again and again: of parts, of their workers, of spares. Those
        that stand at the end stand on. `heal` comes next."""
        lot = random.Random(seed)
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + seconds
        while (pause := lot.uniform(*pause_s)) < deadline - time.monotonic():
            threading.Event().wait(pause)
            number = lot.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT))
            victims = self._victims(stopped=number is signal.SIGCONT)
            if not victims:
                continue
            name, process = lot.choice(victims)
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                self.seen[f"{number.name} {name.partition('-')[0]}"] += 1
        self._ending.wait(max(0.0, deadline - time.monotonic()))

    def ask(self, seconds: float) -> None:
        """Requests only. `heal` comes next."""
        self.blow(seconds, 0, (seconds, seconds))

    def _victims(self, stopped: bool) -> list[tuple[str, psutil.Process]]:
        """Every process of the deployment that stands, or that does not."""
        deployment = self._deployment
        spares = () if deployment.spares is None else deployment.spares.pids
        pids = [*sorted(deployment.pids.items()), *(("spare", pid) for pid in spares)]
        parts: list[tuple[str, psutil.Process]] = []
        for name, pid in pids:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                each = [(name, process), *(("worker", child) for child in process.children())]
                parts += [(name, one) for name, one in each if (one.status() == psutil.STATUS_STOPPED) is stopped]
        return parts

    def heal(self) -> float:
        """Wait until everything is there again, while requests still come, and then until nothing runs.

        -> seconds until it was whole"""
        begun = time.monotonic()
        until(lambda: not self._victims(stopped=True) and self._whole.again(), "the deployment is whole again", 300)
        healed_s = time.monotonic() - begun
        self._ending.set()
        for thread in self._threads:
            thread.join()
        with httpx.Client(base_url=self._deployment.url, timeout=60) as client:

            def idle() -> bool:
                with suppress(httpx.HTTPError):
                    found = client.get("/deployment").json()
                    return not found["in_flight"] and not any(one["kv_usage"] for one in found["instances"])
                return False

            until(idle, "nobody is inside and no block is held", 120)
        return healed_s

    def _ask(self, number: int) -> None:
        lot = random.Random(number)
        with httpx.Client(timeout=120) as client:
            while not self._ending.is_set():
                which, length = lot.randrange(len(self._prompts)), lot.choice((1, 5, 20))
                try:
                    self._one(client, which, length, stream=lot.random() < 0.5)
                except httpx.HTTPError as error:
                    self.seen[type(error).__name__] += 1
                    self._ending.wait(0.05)

    def _one(self, client: httpx.Client, which: int, length: int, stream: bool) -> None:
        body = {"model": self._model, "prompt": self._prompts[which], "max_tokens": length, "temperature": 0}
        answer = client.post(f"{self._deployment.url}/v1/completions", json={**body, "stream": stream})
        if answer.status_code != 200:
            self.seen[str(answer.status_code)] += 1
            if answer.status_code not in CLEAR or "error" not in answer.json():
                self.wrong.append(f"{answer.status_code}: {answer.text}")
            self._ending.wait(0.05)
            return
        right = self._right(which, length)
        if not stream:
            text, ended = answer.json()["choices"][0]["text"], True
        else:
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            text = "".join(event["choices"][0]["text"] for event in events if "error" not in event)
            ended = answer.text.endswith("data: [DONE]\n\n") and not any("error" in event for event in events)
        self.seen["answered" if ended else "cut off"] += 1
        if text != right if ended else not right.startswith(text):
            self.wrong.append(f"prompt {which}, {length} tokens: {text!r} is not {right!r}")
