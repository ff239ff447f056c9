"""The instances behind the door: a link to each member, and a scheduler that knows which of them can be used."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from poolweave.errors import ConfigError, PeerLost, PoolweaveError
from poolweave.scheduler.configuration import Difference, Member
from poolweave.scheduler.global_scheduler import GlobalScheduler
from poolweave.serving.control.messages import Welcome
from poolweave.serving.door.kv_events import Listener
from poolweave.serving.door.link import InstanceLink
from poolweave.types import Role

logger = logging.getLogger(__name__)

_GREET_S = 5.0
_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class Linked:
    """An instance that answers."""

    link: InstanceLink
    welcome: Welcome


class Links:
    """Follows the membership on the event loop. A member is routable from its welcome on until its connection ends;
    while the registry still names it, it is called again and again. Members that serve another model than `model` (a
    name where the deployment has several) are others' to use."""

    def __init__(self, scheduler: GlobalScheduler, listener: Listener, model: str = "") -> None:
        self._name = model
        self._foreign: set[str] = set()
        self._scheduler = scheduler
        self._listener = listener
        self._members: dict[str, Member] = {}
        self._linked: dict[str, Linked] = {}
        self._calling: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self.model: Welcome | None = None  # what the last one to come said of the model; it is the same in all

    def follow(self, difference: Difference) -> None:
        """Take over what a configuration changed. Requests on who is gone fail with PeerLost."""
        for member in difference.gone:
            self._drop(member.name)
        for member in difference.joined:
            self._members[member.name] = member
            self._calling[member.name] = asyncio.create_task(self._call(member))
        for member in difference.changed:
            if member.name in self._foreign:
                continue
            self._members[member.name] = member
            if member.name in self._linked:
                self._scheduler.update(Difference(changed=(member,)))
        self._notify()

    def get(self, name: str) -> Linked:
        """A routable instance. Raises PeerLost for one that went since it was chosen."""
        linked = self._linked.get(name)
        if linked is None:
            raise PeerLost(f"{name} is gone since it was chosen; try another instance", peer=name)
        linked.link.require()
        return linked

    @property
    def linked(self) -> tuple[Linked, ...]:
        """Who can be used now."""
        return tuple(self._linked.values())

    @property
    def members(self) -> tuple[Member, ...]:
        """Whom the registry names."""
        return tuple(self._members.values())

    @property
    def ready(self) -> bool:
        """Whether a request can be served from its prompt to its answer."""
        roles = {Role(linked.welcome.role) for linked in self._linked.values()}
        return Role.COLOCATED in roles or {Role.PREFILL, Role.DECODE} <= roles

    async def change(self, timeout_s: float) -> None:
        """Wait until somebody came or went, or for `timeout_s`."""
        changed = self._changed
        try:
            await asyncio.wait_for(changed.wait(), timeout_s)
        except asyncio.TimeoutError:
            return

    def close(self) -> None:
        """Hang up on everybody. Idempotent."""
        for name in tuple(self._members):
            self._drop(name)

    async def _call(self, member: Member) -> None:
        """Until it answers: a member may be slow, or dead and not yet known to be."""
        while True:
            try:
                link = InstanceLink(member.name, member.addresses[0], self._lost)
            except (PoolweaveError, IndexError) as error:
                logger.error("%s cannot be called: %s", member.name, error)
                return
            try:
                self._take_in(link, await link.greet(_GREET_S))
                return
            except asyncio.CancelledError:
                link.close()
                raise
            except ConfigError as error:  # as it would be the next time
                logger.error("%s cannot be used: %s", member.name, error)
                link.close()
                return
            except PoolweaveError as error:
                logger.info("%s does not answer yet: %s", member.name, error)
            except Exception:
                logger.exception("%s could not be taken in; it is called again", member.name)
                self._forget(member.name)
            link.close()
            await asyncio.sleep(_RETRY_S)

    def _take_in(self, link: InstanceLink, welcome: Welcome) -> None:
        (self._accept if welcome.model == self._name else self._leave_alone)(link, welcome)
        self._calling.pop(link.name, None)

    def _accept(self, link: InstanceLink, welcome: Welcome) -> None:
        self._scheduler.update(Difference(joined=(self._members[link.name],)))
        room = welcome.pool_blocks * welcome.block_tokens
        self._scheduler.describe(link.name, kv_tokens=room, cache_tokens=room)
        self._listener.connect(link.name, welcome)
        self._linked[link.name] = Linked(link, welcome)
        self.model = welcome
        logger.info("%s (%s) can be used", link.name, welcome.role)
        self._notify()

    def _leave_alone(self, link: InstanceLink, welcome: Welcome) -> None:
        """It serves another model."""
        link.close()
        self._foreign.add(link.name)
        self._members.pop(link.name, None)

    def _lost(self, link: InstanceLink) -> None:
        """Its connection ended: it died, or was stopped for long. Its trees are forgotten at once."""
        linked = self._linked.get(link.name)
        if linked is None or linked.link is not link:
            return
        logger.warning("lost %s", link.name)
        del self._linked[link.name]
        self._forget(link.name)
        member = self._members.get(link.name)
        if member is not None:
            self._calling[link.name] = asyncio.create_task(self._call(member))
        self._notify()

    def _drop(self, name: str) -> None:
        self._members.pop(name, None)
        self._foreign.discard(name)
        calling = self._calling.pop(name, None)
        if calling is not None:
            calling.cancel()
        linked = self._linked.pop(name, None)
        if linked is not None:
            linked.link.close()
            self._forget(name)

    def _forget(self, name: str) -> None:
        """It holds nothing that could be used."""
        self._listener.disconnect(name)
        self._scheduler.remove(name)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
