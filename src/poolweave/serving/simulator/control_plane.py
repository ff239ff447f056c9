"""Membership and its messages in a simulation: the real state machines, a lossy network, pauses and deaths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Protocol

from poolweave.scheduler.configuration import Departure, Roster
from poolweave.scheduler.enrolment import Enrolment
from poolweave.scheduler.global_scheduler import GlobalScheduler
from poolweave.scheduler.membership import Membership
from poolweave.scheduler.membership_messages import Announce, Effect, Gone, Heartbeat, Join
from poolweave.serving.simulator.agenda import Agenda
from poolweave.serving.simulator.config import SimulationConfig


class Lives(Protocol):
    """What the control plane does to the simulated instances."""

    def begin_life(self, name: str) -> None: ...
    def end_life(self, name: str) -> None: ...
    def lost(self, request_ids: Iterable[str]) -> None:
        """These requests ended with the instance they were on."""


class ControlPlane:
    """Lets instances join, beat, die silently and come back, and the scheduler follow the membership."""

    def __init__(self, config: SimulationConfig, agenda: Agenda, scheduler: GlobalScheduler, lives: Lives) -> None:
        self._config = config
        self._faults = config.faults
        self._groups = config.names
        self._agenda = agenda
        self._scheduler = scheduler
        self._lives = lives
        self._draw = random.Random(config.seed + 1)
        self._epochs = count(1)
        self._membership = Membership(config.membership, coordinator=1)
        self._roster = Roster()
        self._enrolments: dict[str, Enrolment] = {}
        self._paused_until = 0.0
        self._inbox: list[Join | Heartbeat] = []
        self.expired = 0

    def begin(self) -> None:
        """All instances join before anything else happens."""
        announced: list[Effect] = []
        for name in self._groups:
            for effect in self._membership.join(self._enrol(name), self._agenda.now):
                if isinstance(effect, Announce):
                    announced = [effect]  # only the last one tells of all
                else:
                    self._follow((effect,))
        self._follow(tuple(announced))
        heartbeat_s = self._config.membership.heartbeat_s
        for i, name in enumerate(self._groups):  # spread over the interval
            self._agenda.at(heartbeat_s * i / len(self._groups), self._beat, name, self._enrolments[name])
        self._agenda.at(heartbeat_s, self._tick)
        for time_s, name in self._faults.deaths:
            self._agenda.at(time_s, self._kill, name)
        for time_s, seconds in self._faults.coordinator_pauses:
            self._agenda.at(time_s, self._pause, seconds)

    def send(self, act: Callable[..., None], *args: Any) -> None:
        """Let a message arrive: late, or never, as the faults say."""
        if self._faults.message_loss and self._draw.random() < self._faults.message_loss:
            return
        if self._faults.message_delay_s:
            self._agenda.after(self._draw.uniform(0, self._faults.message_delay_s), act, *args)
        else:
            act(*args)

    def _enrol(self, name: str) -> Join:
        """Begin a life; returns its first message."""
        self._lives.begin_life(name)
        role = self._groups[name].role
        enrolment = Enrolment(name, role, lambda: next(self._epochs), (), self._config.membership)
        self._enrolments[name] = enrolment
        joining = enrolment.due(self._agenda.now)
        assert isinstance(joining, Join)
        return joining

    def _beat(self, name: str, enrolment: Enrolment) -> None:
        if self._enrolments.get(name) is not enrolment:
            return
        message = enrolment.due(self._agenda.now)
        if message is not None:
            self.send(self._receive, message)
        self._agenda.at(enrolment.next_s or self._agenda.now, self._beat, name, enrolment)

    def _receive(self, message: Join | Heartbeat) -> None:
        if self._agenda.now < self._paused_until:
            self._inbox.append(message)
            return
        now = self._agenda.now
        if isinstance(message, Join):
            self._follow(self._membership.join(message, now))
        else:
            self._follow(self._membership.heartbeat(message, now))

    def _tick(self) -> None:
        if self._agenda.now >= self._paused_until:
            self._inbox, held = [], self._inbox
            for message in held:
                self._receive(message)
            self._follow(self._membership.tick(self._agenda.now))
        self._agenda.after(self._config.membership.heartbeat_s, self._tick)

    def _follow(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Announce):
                difference = self._roster.apply(effect.configuration)
                lost = self._scheduler.update(difference)
                for member in difference.joined:
                    group = self._groups[member.name]
                    self._scheduler.describe(
                        member.name,
                        slowness=group.slowness,
                        kv_tokens=group.kv_tokens,
                        cache_tokens=group.cache_tokens,
                    )
                self._lives.lost(lost)
            elif isinstance(effect, Gone):
                self.expired += effect.why is Departure.EXPIRED
            else:
                enrolment = self._enrolments.get(effect.name)
                if enrolment is not None:
                    enrolment.answered(effect, self._agenda.now)

    def _kill(self, name: str) -> None:
        if self._enrolments.pop(name, None) is None:
            return
        self._lives.end_life(name)
        if self._faults.restart_s is not None:
            self._agenda.after(self._faults.restart_s, self._restart, name)

    def _restart(self, name: str) -> None:
        self._receive(self._enrol(name))
        self._beat(name, self._enrolments[name])

    def _pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, self._agenda.now + seconds)
