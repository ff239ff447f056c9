"""A storm over a deployment: clients that ask without end while processes are killed and stopped at random."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
from ref_instance import until

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
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(4)]

    def blow(self, seconds: float, seed: int, pause_s: tuple[float, float]) -> None:
        """Kill or stop a part at random, again and again; then let everything go on, and stop asking."""
        lot = random.Random(seed)
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + seconds
        stopped: set[int] = set()
        while time.monotonic() < deadline:
            threading.Event().wait(lot.uniform(*pause_s))
            name, pid = lot.choice(sorted(self._deployment.pids.items()) or [("", 0)])
            number = lot.choice((signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT))
            if number is signal.SIGCONT and stopped:
                pid = stopped.pop()
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                self.seen[f"{number.name} {name.partition('-')[0]}"] += 1
                if number is signal.SIGSTOP:
                    stopped.add(pid)
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def heal(self, instances: int) -> None:
        """Wait until everything is there again and nothing runs."""
        with httpx.Client(base_url=self._deployment.url, timeout=60) as client:

            def whole() -> bool:
                with suppress(httpx.HTTPError):
                    found = client.get("/deployment").json()
                    active = sum(one["state"] == "active" for one in found["instances"])
                    idle = not found["in_flight"] and not any(one["kv_usage"] for one in found["instances"])
                    return active == instances and idle
                return False

            until(whole, "the deployment is whole again", 300)

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
