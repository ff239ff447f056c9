"""An instance as a member of a deployment: it is enrolled, and its pool knows the members of the other phase."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from poolweave.errors import PoolweaveError
from poolweave.mempool import MemPool
from poolweave.scheduler.configuration import Difference
from poolweave.scheduler.enrolment import Enrolment
from poolweave.serving.instance.config import InstanceConfig
from poolweave.serving.membership import open_registry
from poolweave.serving.membership.follower import Follower
from poolweave.serving.membership.participant import Participant
from poolweave.types import Role

logger = logging.getLogger(__name__)


class InstanceMembership:
    """Runs from construction to `close`. What a member that is gone had asked for is freed with its disconnection.

    `addresses`: where control messages are taken, then those of the pool. Raises ConfigError.
    """

    def __init__(self, config: InstanceConfig, pool: MemPool, addresses: Sequence[str]) -> None:
        assert config.registry is not None
        self._config = config
        self._pool = pool
        enrolment = Enrolment(
            config.name, config.role, lambda: secrets.randbits(63) | 1, tuple(addresses), config.membership
        )
        self._registry = open_registry(config.registry, config.membership)
        self._follower = Follower(open_registry(config.registry, config.membership), self._changed)
        self._participant = Participant(enrolment, self._registry)

    def close(self) -> None:
        """Leave. Idempotent."""
        self._participant.close()
        self._registry.close()
        self._follower.close()

    def _changed(self, difference: Difference) -> None:
        """Runs in the follower's thread."""
        for member in difference.gone:
            self._pool.disconnect(member.name)
        for member in difference.joined:
            if {member.role, self._config.role} != {Role.PREFILL, Role.DECODE}:
                continue
            try:
                self._pool.connect(member.name, member.addresses[1:])
            except PoolweaveError as error:
                logger.warning("%s cannot reach the pool of %s: %s", self._config.name, member.name, error)
