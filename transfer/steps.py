"""One step of a growing offer: which windows of which blocks it moves, and the pull itself."""

from __future__ import annotations

import time

import numpy as np

from poolweave.transfer.assembly import Feed, stretch_of
from poolweave.transfer.messages import Progress, Ready
from poolweave.transfer.pulls import SLICE_BYTES, pull_slice, require_lent, verify
from poolweave.transfer.resharding import Route
from poolweave.transfer.transport import Home, PullSlice


def step_bytes(home: Home, feed: Feed, ready: Ready) -> int:
    """What a step moves; nothing of blocks that were here already."""
    part = _part(feed, ready)
    first = max(ready.first_block, feed.assembly.num_held + feed.assembly.num_handed)
    return part.block_bytes * max(0, ready.end_block - first) if part is not None else 0


def pull_step(home: Home, feed: Feed, ready: Ready) -> None:
    """Move a stretch into place and check it. Any thread. Raises TransferFailed, PeerLost."""
    began = time.perf_counter()
    part, placement = _part(feed, ready), feed.assembly.placement
    first = max(ready.first_block, feed.assembly.num_held + feed.assembly.num_handed)
    if part is not None and placement is not None and (first < ready.end_block or placement.handed):
        _pull_blocks(home, feed, ready, part, first)
    feed.pull_s += time.perf_counter() - began
    feed.pulled.add(stretch_of(ready))
    if not feed.coverage.complete:
        total = feed.offer.num_blocks
        feed.session.tell(Progress(feed.offer.offer, int(feed.pulled.share * total), total))


def _part(feed: Feed, ready: Ready) -> Route | None:
    route = feed.session.route
    return route.within(range(ready.first_layer, ready.end_layer)) if route is not None else None


def _pull_blocks(home: Home, feed: Feed, ready: Ready, part: Route, first: int) -> None:
    placement, abort = feed.assembly.placement, feed.assembly.abort
    assert placement is not None
    assert abort is not None
    held, count = feed.assembly.num_held, max(0, ready.end_block - first)
    whole = part == feed.session.route and part.is_whole
    at_source, at_target = ((), ()) if whole else ((window,) for window in part.windows)
    hashes = np.empty(count, np.uint64) if ready.checksums else None
    step = max(1, SLICE_BYTES // part.block_bytes)
    if placement.handed:
        require_lent(feed.session, feed.offer, abort)
    for begin in range(0, count, step):
        end = min(count, begin + step)
        rows = slice(first - held + begin, first - held + end)
        target = home.memory.extents(placement.tiers[rows], placement.slots[rows], at_target)
        pull_slice(
            feed.session,
            PullSlice(
                offer=feed.offer, first=first + begin, target=target,
                hashes=hashes[begin:end] if hashes is not None else None, abort=abort,
                timeout_s=feed.deadline - time.monotonic(), step=ready.step, step_first=ready.first_block,
                windows=at_source,
            ),
        )  # fmt: skip
        feed.calls += target.num_coalesced
        feed.nbytes += target.nbytes
    if hashes is not None:
        wanted = np.frombuffer(ready.checksums, np.uint64)[first - ready.first_block :]
        verify(feed.session.peer, first, hashes, wanted)
