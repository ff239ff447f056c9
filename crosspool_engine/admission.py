"""Requests that wait for room: bounded, by deadline, in turn among models. Pure: the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from poolweave.crosspool_engine.request import DecodeRequest
from poolweave.errors import Overloaded


class Admission:
    """A first-come queue a model; `admit` takes one of each model in turn while there is room. Not thread-safe."""

    def __init__(self, max_waiting: int, deadline_s: float) -> None:
        self._max_waiting = max_waiting
        self._deadline_s = deadline_s
        self._queues: dict[str, deque[tuple[DecodeRequest, float]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def count(self, model: str) -> int:
        """Requests of one model that wait."""
        return len(self._queues.get(model, ()))

    def holds(self, request_id: str) -> bool:
        return any(entry[0].request_id == request_id for queue in self._queues.values() for entry in queue)

    def add(self, request: DecodeRequest, now: float) -> None:
        """Queue a request. Raises Overloaded when the queue is full; then nothing is kept."""
        if len(self) >= self._max_waiting:
            raise Overloaded(
                f"{len(self)} requests wait already, max_waiting is {self._max_waiting}: try again later",
                waiting=len(self), limit=self._max_waiting,
            )  # fmt: skip
        self._queues.setdefault(request.model, deque()).append((request, now + self._deadline_s))

    def remove(self, request_id: str) -> DecodeRequest | None:
        """Take a waiting request out, or None when it does not wait here."""
        for queue in self._queues.values():
            for entry in queue:
                if entry[0].request_id == request_id:
                    queue.remove(entry)
                    return entry[0]
        return None

    def expire(self, now: float) -> list[DecodeRequest]:
        """Take out requests whose deadline has passed."""
        late = [entry for queue in self._queues.values() for entry in queue if entry[1] <= now]
        for entry in late:
            self._queues[entry[0].model].remove(entry)
        return [request for request, _ in late]

    def drain(self, model: str) -> list[DecodeRequest]:
        """Take out all requests of one model."""
        return [request for request, _ in self._queues.pop(model, ())]

    def admit(self, enter: Callable[[DecodeRequest], bool]) -> None:
        """Offer each model's first request to `enter`, round and round, until every model's is refused or none waits.

        Within a model nobody overtakes; a model whose request does not fit holds up no other.
        """
        open_models = [model for model, queue in self._queues.items() if queue]
        while open_models:
            for model in list(open_models):
                queue = self._queues[model]
                if not queue or not enter(queue[0][0]):
                    open_models.remove(model)
                    continue
                queue.popleft()
        self._queues = {model: queue for model, queue in self._queues.items() if queue}
