"""Where each prompt is computed: prompt trees, cost model and loads behind one call. Source: MemServe §6.

    scheduler = GlobalScheduler(model)
    scheduler.add("prefill-0", Role.PREFILL)
    scheduler.add("decode-0", Role.DECODE)
    route = scheduler.route(tokens)              # -> Route(prefill="prefill-0", decode="decode-0", ...)
    scheduler.prefilled(route.request_id)        # its first token was seen
    scheduler.finished(route.request_id, tokens_with_answer)

Pure: no I/O, the clock is passed in, randomness comes from the seed. One thread or event loop owns it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from poolweave.errors import NoInstance, RequestRefused
from poolweave.scheduler.configuration import Difference, State
from poolweave.scheduler.cost_model import CostModel
from poolweave.scheduler.decode_choice import DecodeChoice
from poolweave.scheduler.fleet import Fleet, InstanceLoad
from poolweave.scheduler.flights import Flight, Flights
from poolweave.scheduler.holdings import Holdings
from poolweave.scheduler.policies import POLICIES, RoutingPolicy
from poolweave.scheduler.prefill_choice import Chosen, PrefillChoice
from poolweave.scheduler.prompt_tree import Source
from poolweave.scheduler.routes import Prompt, Route, SchedulerConfig
from poolweave.scheduler.slots import SlotArray, Slots
from poolweave.types import Role, TokenIds, UInt64Array

_PREFILL_ROLES = (Role.PREFILL, Role.COLOCATED)
_DECODE_ROLES = (Role.DECODE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start, and the loads now."""

    routed: int
    in_flight: int
    prompt_tokens: int
    cached_tokens: int  # believed to be held where they were routed
    fetches: int
    replications: int
    instances: tuple[InstanceLoad, ...]

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class _Counts:
    routed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    fetches: int = 0
    replications: int = 0

    def add(self, num_tokens: int, chosen: Chosen) -> None:
        self.routed += 1
        self.prompt_tokens += num_tokens
        self.cached_tokens += chosen.cached_tokens
        self.fetches += chosen.fetch is not None
        self.replications += chosen.replicate is not None


class GlobalScheduler:
    """Routes prompts to instances. `policy` replaces the configuration's by an object of your own.

    `holdings` takes KV events, inventories and replications; `fleet` shows the loads.
    """

    def __init__(
        self,
        model: CostModel,
        config: SchedulerConfig | None = None,
        *,
        policy: RoutingPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config = config or SchedulerConfig()
        self._model = model
        self._clock = clock
        self.fleet = Fleet(Slots())
        self.holdings = Holdings(self.fleet, config, clock)
        lot = random.Random(config.seed)
        self._prefill = PrefillChoice(model, config, policy or POLICIES[config.policy](lot), self.fleet)
        self._decode = DecodeChoice(model=model, lot=lot, kv_link=config.kv_link)
        self._flights = Flights(self.fleet)
        self._ids = count(1)
        self._counts = _Counts()

    def add(self, name: str, role: Role) -> None:
        """A new, empty instance, as fast as the model says. Raises ConfigError for a known name."""
        if role is Role.DECODE:
            self._model.decode_step_s(1, 1)  # raises now where the model cannot judge decode instances
        self.fleet.add(name, role)
        self.holdings.limit(name, None)

    def describe(
        self, name: str, *, slowness: float = 1.0, kv_tokens: int | None = None, cache_tokens: int | None = None
    ) -> None:
        """What is known of an instance: a factor on the model's times, room for KV that it decodes with, room for
        historical KV. Raises UnknownPeer."""
        self.fleet.describe(name, slowness=slowness, kv_capacity_tokens=kv_tokens)
        self.holdings.limit(name, cache_tokens)

    def remove(self, name: str) -> tuple[str, ...]:
        """The instance is gone: what it held is forgotten. Idempotent: of a name that is not known, or no longer,
        nothing is left to forget, so whoever hears of a death last may tell it again.

        Returns the requests that were on it; they are no longer in flight here: route each again, or fail it.
        """
        slot = self.fleet.slots.get(name)
        if slot is None:
            return ()
        lost = self._flights.lose(slot)
        self.holdings.forget(name)
        self.fleet.remove(name)
        return lost

    def accept(self, name: str, accepts: bool) -> None:
        """Whether new prompts go to this instance: not while it drains or is suspect. Raises UnknownPeer."""
        self.fleet.accept(name, accepts)

    def update(self, difference: Difference) -> tuple[str, ...]:
        """Follow the membership. Returns the requests that were on instances that are gone."""
        lost: list[str] = []
        for member in difference.gone:
            lost += self.remove(member.name)
        for member in difference.joined:
            self.add(member.name, member.role)
        for member in (*difference.joined, *difference.changed):
            self.accept(member.name, member.state is State.ACTIVE)
        return tuple(lost)

    def report(self, name: str, queued_s: float) -> None:
        """An instance's own account of its queue, with what other schedulers sent it. Raises UnknownPeer."""
        self.fleet.report(name, queued_s)

    def route(
        self,
        tokens: TokenIds,
        *,
        ns: int = 0,
        session: str | None = None,
        request_id: str | None = None,
        output_tokens: int | None = None,
    ) -> Route:
        """Choose the instances for a prompt and count it as theirs until it is finished, or failed.

        Raises NoInstance when none accepts work, RequestRefused for an empty prompt or an id that is in flight.
        """
        return self.place(
            Prompt(
                keys=self.holdings.keys(tokens, ns),
                num_tokens=len(tokens),
                session=session,
                request_id=request_id,
                output_tokens=output_tokens,
            )
        )

    def place(self, prompt: Prompt) -> Route:
        """`route` for a prompt whose block keys are known."""
        if prompt.num_tokens < 1:
            raise RequestRefused("the prompt is empty; it needs at least one token", needed=1)
        slots = self._accepting(_PREFILL_ROLES)
        table = self.fleet.candidates(slots)
        self.holdings.score(self._reusable(prompt), table, _PREFILL_ROLES)
        chosen = self._prefill.choose(prompt, slots, table, self._clock())
        decode, decode_cached = None, 0
        if self.fleet.role(chosen.slot) is Role.PREFILL:
            decode, decode_cached = self._choose_decode(prompt)
        request_id = prompt.request_id or f"r{next(self._ids)}"
        flight = Flight(prompt=prompt, prefill=chosen.slot, decode=decode, queue_s=chosen.own_s / self._model.stages)
        self._flights.begin(request_id, flight)
        self.holdings.insert(prompt.keys, chosen.slot, Source.ROUTE)
        self._counts.add(prompt.num_tokens, chosen)
        names = self.fleet.slots
        return Route(
            request_id=request_id,
            prefill=names.name(chosen.slot),
            decode=None if decode is None else names.name(decode),
            cached_tokens=chosen.cached_tokens,
            decode_cached_tokens=decode_cached,
            queued_s=chosen.queued_s,
            own_s=chosen.own_s,
            fetch=chosen.fetch,
            replicate=chosen.replicate,
        )

    def prefilled(self, request_id: str) -> None:
        """The first token was seen: the prompt's KV is there. Unknown or ended requests: nothing."""
        flight = self._flights.prefilled(request_id)
        if flight is not None and flight.prefill is not None:
            self.holdings.insert(flight.prompt.keys, flight.prefill, Source.RESPONSE)

    def finished(self, request_id: str, tokens: TokenIds | None = None, ns: int = 0) -> None:
        """The answer is complete. `tokens`: prompt and answer as far as its KV was kept. Idempotent: an id
        that is not in flight, because it ended or its instance was removed first, changes nothing."""
        self.finished_keys(request_id, None if tokens is None else self.holdings.keys(tokens, ns))

    def finished_keys(self, request_id: str, keys: UInt64Array | None = None) -> None:
        """`finished` for block keys that are known."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        if not flight.prefilled:
            self.prefilled(request_id)
        self._flights.end(request_id)
        kept = flight.prompt.keys if keys is None else keys
        if flight.decode is not None:
            self.holdings.insert(kept, flight.decode, Source.RESPONSE)
        keeps_answer = flight.decode is None or self.config.returns_answers
        if keeps_answer and flight.prefill is not None and len(kept) > len(flight.prompt.keys):
            self.holdings.insert(kept, flight.prefill, Source.RESPONSE)

    def failed(self, request_id: str) -> None:
        """The request ends without an answer: its load is gone, nothing is learned. Idempotent, as `finished`."""
        self._flights.end(request_id)

    def stats(self) -> SchedulerStats:
        """A frozen snapshot."""
        return SchedulerStats(
            routed=self._counts.routed,
            in_flight=len(self._flights),
            prompt_tokens=self._counts.prompt_tokens,
            cached_tokens=self._counts.cached_tokens,
            fetches=self._counts.fetches,
            replications=self._counts.replications,
            instances=self.fleet.loads(),
        )

    def check(self) -> None:
        """Assert all invariants."""
        self.fleet.check()
        self._flights.check()
        self.holdings.check()

    def _reusable(self, prompt: Prompt) -> UInt64Array:
        """Keys of the blocks that may be reused: at least one token is computed."""
        return prompt.keys[: (prompt.num_tokens - 1) // self.config.block_tokens]

    def _accepting(self, roles: tuple[Role, ...]) -> SlotArray:
        slots = self.fleet.of(*roles)
        if not len(slots):
            role = roles[0].value
            raise NoInstance(
                f"none of {len(self.fleet.slots)} known instances with role {role} accepts work now; start one",
                role=role,
                known=len(self.fleet.slots),
            )
        return slots

    def _choose_decode(self, prompt: Prompt) -> tuple[int, int]:
        """Slot, and the tokens that it is believed to hold."""
        slots = self._accepting(_DECODE_ROLES)
        cached = self.holdings.held_tokens(self._reusable(prompt), slots, _DECODE_ROLES)
        output = self.config.expected_output_tokens if prompt.output_tokens is None else prompt.output_tokens
        at = self._decode.choose(prompt.num_tokens, output, cached, self.fleet, slots)
        return slots.item(at), cached.item(at)
