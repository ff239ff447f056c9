"""One engine of a prefill/decode pair in a process of its own, that can be made to die at any of its steps.

`python ref_vllm_peer.py '<House's arguments>'`, then a JSON line a request: prompt, max_tokens, params and die_at, the
call of its scheduler's side before which it SIGKILLs itself. Each request gets two lines: what its answer says of its
KV, as soon as it is said, and how it went.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from vllm_house import House

CALLS = ("lookup", "allocated", "plan", "settle", "finished")


class PeerEngine:
    """The parent's handle."""

    def __init__(self, **house: Any) -> None:
        command = [sys.executable, __file__, json.dumps(house)]
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
        )
        assert self._read() is not None

    def ask(self, prompt: list[int], **more: Any) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """-> what was said of its KV, and how it went; None for what it died before."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, **more}) + "\n")
        self._process.stdin.flush()
        told = self._read()
        return (None, None) if told is None else (told["params"], self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer


class Mortal:
    """Counts the calls of a house's scheduler side, dies at one of them, and tells what `finished` says."""

    def __init__(self, house: House) -> None:
        self.calls, self.die_at = 0, -1
        for name in CALLS:
            setattr(house.scheduler, name, self._counted(name, getattr(house.scheduler, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = call(*arguments)
            if name == "finished":
                say(params=answer)
            return answer

        return counting


def say(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    house = House(**json.loads(sys.argv[1]))
    mortal = Mortal(house)
    say()
    for line in sys.stdin:
        asked = json.loads(line)
        mortal.calls, mortal.die_at = 0, asked.get("die_at", -1)
        done = house.run(asked["prompt"], asked.get("max_tokens", 1), kv_transfer_params=asked.get("params"))
        say(cached=done.cached, output=done.output, calls=mortal.calls)


if __name__ == "__main__":
    main()
