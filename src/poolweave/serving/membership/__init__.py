"""Membership's shells: sockets and threads around the state machines of poolweave.scheduler.

`open_registry` gives the deployment's registry: an embedded coordinator process, or etcd.
"""

from poolweave.serving.membership.registry import Registry, open_registry

__all__ = ["Registry", "open_registry"]
