"""KV events: what instances hold, told and heard in the wire format of vLLM and SGLang."""

from poolweave.index.events.batch_stream import TargetStream
from poolweave.index.events.event_index import EventIndex, SourceStatus
from poolweave.index.events.feed import EventFeed, FeedState
from poolweave.index.events.publisher import KVEventPublisher, PublisherConfig
from poolweave.index.events.recorded_index import RecordedIndex
from poolweave.index.events.recorder import EventRecorder
from poolweave.index.events.subscriber import KVEventSubscriber

__all__ = [
    "EventFeed",
    "EventIndex",
    "EventRecorder",
    "FeedState",
    "KVEventPublisher",
    "KVEventSubscriber",
    "PublisherConfig",
    "RecordedIndex",
    "SourceStatus",
    "TargetStream",
]
