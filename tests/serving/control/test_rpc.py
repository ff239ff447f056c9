"""The control protocol over real sockets: replies, deadlines, versions, epochs, lost peers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from poolweave.errors import (
    AddressInUse,
    ConfigError,
    DeadlineExceeded,
    OutOfBlocks,
    PeerLost,
    PoolweaveError,
    RequestRefused,
)
from poolweave.index import Identity
from poolweave.serving.control.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Cancel,
    Complete,
    Connect,
    Counters,
    Done,
    Emit,
    ErrorInfo,
    Failure,
    Finished,
    Header,
    Hello,
    Job,
    Reply,
    Request,
    Stats,
    Welcome,
    pack_tokens,
)
from poolweave.serving.control.server import Caller, RpcServer
from poolweave.serving.instance.client import InstanceClient

WELCOME = Welcome(
    instance="p",
    role="prefill",
    pid=1,
    identity=Identity(model="m"),
    block_tokens=16,
    block_bytes=1024,
    pool_blocks=8,
    max_positions=64,
    addresses={"shm": "shm://p"},
)
JOB = Job(request="r", tokens=pack_tokens([1, 2, 3]), flow="colocated", sampling={})


class Host:
    """A server on a thread whose answers a test scripts by request type."""

    def __init__(self) -> None:
        self.answers: dict[type[Request], Callable[[Caller, Request], None]] = {
            Hello: lambda caller, request: caller.reply(WELCOME)
        }
        self.gone: list[bytes] = []
        self.gone_fails = False
        self.server = RpcServer("tcp://127.0.0.1:0", epoch=7, name="p")
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        self.server.serve(lambda caller, request: self.answers[type(request)](caller, request), on_gone=self._gone)

    def _gone(self, client: bytes) -> None:
        self.gone.append(client)
        if self.gone_fails:
            raise ZeroDivisionError("oops")

    def close(self) -> None:
        self.server.stop()
        self.thread.join()
        self.server.close()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture
def client(host: Host) -> Iterator[InstanceClient]:
    client = InstanceClient(host.server.address, peer="p")
    yield client
    client.close()


def test_a_client_is_welcomed_and_learns_the_epoch(client: InstanceClient) -> None:
    assert client.welcome == WELCOME
    assert client.epoch == 7


def test_a_stream_gives_every_reply_in_order_and_ends_with_the_final_one(host: Host, client: InstanceClient) -> None:
    replies: list[Reply] = [Emit([1]), Emit([2, 3]), Finished(finish_reason="length")]

    def answer(caller: Caller, request: Request) -> None:
        for reply in replies:
            caller.reply(reply)

    host.answers[Complete] = answer
    assert list(client.stream(Complete(JOB), timeout_s=10)) == replies


def test_calls_of_many_threads_each_get_their_own_answer(host: Host, client: InstanceClient) -> None:
    def answer(caller: Caller, request: Request) -> None:
        assert isinstance(request, Cancel)
        caller.reply(Counters(pool={"echo": request.request}, jobs=0))

    host.answers[Cancel] = answer
    got: dict[str, str] = {}

    def ask(name: str) -> None:
        for turn in range(50):
            report = client.call(Cancel(f"{name}-{turn}"), Counters)
            got[f"{name}-{turn}"] = report.pool["echo"]

    threads = [threading.Thread(target=ask, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 200
    assert all(asked == answered for asked, answered in got.items())


def test_a_typed_error_crosses_with_its_numbers(host: Host, client: InstanceClient) -> None:
    def answer(caller: Caller, request: Request) -> None:
        raise OutOfBlocks("need 5 blocks, 2 free", needed=5, free=2, evictable=0, pinned=1)

    host.answers[Stats] = answer
    with pytest.raises(OutOfBlocks, match="need 5 blocks") as caught:
        client.call(Stats(), Counters)
    assert (caught.value.needed, caught.value.free, caught.value.pinned) == (5, 2, 1)


def test_a_bug_in_the_handler_fails_that_request_alone(host: Host, client: InstanceClient) -> None:
    def answer(caller: Caller, request: Request) -> None:
        raise ZeroDivisionError("oops")

    host.answers[Stats] = answer
    host.answers[Cancel] = lambda caller, request: caller.reply(Done())
    with pytest.raises(PoolweaveError, match="ZeroDivisionError: oops"):
        client.call(Stats(), Counters)
    assert client.call(Cancel("x"), Done) == Done()


def test_an_answer_of_the_wrong_kind_is_an_error(host: Host, client: InstanceClient) -> None:
    host.answers[Stats] = lambda caller, request: caller.reply(Done())
    with pytest.raises(PoolweaveError, match="answered Stats with Done"):
        client.call(Stats(), Counters)


def test_silence_is_deadline_exceeded_and_the_client_stays_usable(host: Host, client: InstanceClient) -> None:
    seen: list[float | None] = []
    host.answers[Stats] = lambda caller, request: seen.append(caller.deadline)
    host.answers[Cancel] = lambda caller, request: caller.reply(Done())
    with pytest.raises(DeadlineExceeded, match=r"p did not finish Stats within 0.05 s") as caught:
        client.call(Stats(), Counters, timeout_s=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.peer == "p"
    client.call(Cancel("x"), Done)
    assert seen[0] is not None, "the deadline travels to the server"


def test_a_late_reply_is_dropped(host: Host, client: InstanceClient) -> None:
    late: list[Caller] = []
    host.answers[Stats] = lambda caller, request: late.append(caller)

    def answer(caller: Caller, request: Request) -> None:
        late[0].reply(Counters(pool={}, jobs=99))
        caller.reply(Done())

    host.answers[Cancel] = answer
    with pytest.raises(DeadlineExceeded):
        client.call(Stats(), Counters, timeout_s=0.05)
    assert client.call(Cancel("x"), Done) == Done()


def test_a_taken_port_names_the_port_and_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressInUse, match=rf"tcp://127.0.0.1:{port} is taken .* set instances.listen") as caught:
            RpcServer(f"tcp://127.0.0.1:{port}", epoch=1, name="p", setting="instances.listen")
    assert caught.value.setting == "instances.listen"
    assert str(port) in caught.value.address


@pytest.mark.parametrize("address", ["tcp://nowhere", "127.0.0.1:80", "", "smoke://x"])
def test_an_address_that_is_none_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="listen"):
        RpcServer(address, epoch=1, name="p")
    with pytest.raises(ConfigError, match="cannot connect"):
        InstanceClient(address, peer="p")


def test_nobody_listening_is_peer_lost_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(PeerLost, match="nobody listens"):
        InstanceClient(f"tcp://127.0.0.1:{port}", peer="p", timeout_s=30)


def test_a_listener_that_says_nothing_is_deadline_exceeded() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(DeadlineExceeded, match="Hello"):
            InstanceClient(f"tcp://127.0.0.1:{mute.getsockname()[1]}", peer="p", timeout_s=0.2)


def test_closing_the_client_fails_what_is_pending(host: Host, client: InstanceClient) -> None:
    asked = threading.Event()
    host.answers[Stats] = lambda caller, request: asked.set()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            client.call(Stats(), Counters, timeout_s=60)
        except PeerLost as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(10)
    client.close()
    client.close()
    thread.join(10)
    assert len(errors) == 1
    with pytest.raises(PeerLost):
        client.call(Stats(), Counters)


def test_a_request_over_the_bound_is_refused_before_it_is_sent(client: InstanceClient) -> None:
    job = Job(request="r", tokens=b"\0" * (MAX_FRAME_BYTES + 4), flow="colocated", sampling={})
    with pytest.raises(RequestRefused, match="over the limit") as caught:
        list(client.stream(Complete(job), timeout_s=1))
    assert caught.value.limit == MAX_FRAME_BYTES


def _raw(address: str, *frames: bytes) -> list[bytes]:
    """Send `frames` as they are, give the reply's."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 10_000)
    dealer.connect(address)
    try:
        dealer.send_multipart(list(frames))
        return dealer.recv_multipart()
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("header", "body", "kind", "says"),
    [
        (
            Header(PROTOCOL + 1, 7, 1),
            Stats(),
            "RequestRefused",
            f"speaks protocol {PROTOCOL + 1}, this side {PROTOCOL}",
        ),
        (Header(PROTOCOL, 6, 1), Stats(), "PeerLost", "restarted: the request is for epoch 6, this is 7"),
        (Header(PROTOCOL, 7, 1), {"type": "Explode"}, "RequestRefused", "unreadable message"),
        (Header(PROTOCOL, 7, 1), {"type": "Connect", "peer": 3, "address": ""}, "RequestRefused", "unreadable message"),
        ("nonsense", Stats(), "RequestRefused", "unreadable message header"),
    ],
)
def test_what_the_server_cannot_take_is_answered_by_a_typed_failure(
    host: Host, header: object, body: object, kind: str, says: str
) -> None:
    reply = _raw(host.server.address, msgspec.msgpack.encode(header), msgspec.msgpack.encode(body))
    failure = msgspec.msgpack.decode(reply[1], type=Failure)
    assert failure.error.kind == kind
    assert says in failure.error.message


def test_a_message_of_one_frame_is_refused(host: Host) -> None:
    failure = msgspec.msgpack.decode(_raw(host.server.address, b"x")[1], type=Failure)
    assert "2 frames, got 1" in failure.error.message


def test_a_client_that_has_gone_is_reported(host: Host) -> None:
    callers: list[Caller] = []
    host.answers[Stats] = lambda caller, request: callers.append(caller)
    client = InstanceClient(host.server.address, peer="p")
    with pytest.raises(DeadlineExceeded):
        client.call(Stats(), Counters, timeout_s=0.05)
    client.close()
    for _ in range(1000):  # the connection's end reaches the server's socket a moment later
        callers[0].reply(Emit([1]))
        if threading.Event().wait(0.01) or host.gone:
            break
    assert host.gone == [callers[0].client] * len(host.gone)
    assert host.gone


@pytest.mark.multiproc
def test_a_killed_server_fails_pending_and_later_calls_with_peer_lost() -> None:
    code = (
        "from poolweave.serving.control.server import RpcServer\n"
        "from poolweave.serving.control.messages import *\n"
        "import sys\n"
        "server = RpcServer('tcp://127.0.0.1:0', epoch=9, name='p')\n"
        "print(server.address, flush=True)\n"
        "w = Welcome(instance='p', role='prefill', pid=1, identity=Identity(model='m'), block_tokens=16,"
        " block_bytes=1, pool_blocks=1, max_positions=1, addresses={})\n"
        "def handle(caller, request):\n"
        "    if isinstance(request, Hello): caller.reply(w)\n"
        "    else: print('asked', flush=True)\n"
        "server.serve(handle)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    client = InstanceClient(child.stdout.readline().strip(), peer="p")
    try:
        stream = client.stream(Complete(JOB), timeout_s=60)
        results: list[BaseException] = []

        def ask() -> None:
            try:
                next(stream)
            except PoolweaveError as error:
                results.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert child.stdout.readline() == "asked\n"
        os.kill(child.pid, signal.SIGKILL)
        thread.join(20)
        assert [type(error) for error in results] == [PeerLost]
        assert client.lost
        with pytest.raises(PeerLost, match="lost instance p: its process ended; start it again"):
            client.call(Connect("a", "b"), Done)
    finally:
        client.close()
        child.kill()
        child.wait()
        child.stdout.close()


def test_an_error_of_a_class_unknown_here_keeps_its_name() -> None:
    error = ErrorInfo(kind="FromTheFuture", message="new").error()
    assert type(error) is PoolweaveError
    assert "FromTheFuture: new" in str(error)


def test_an_error_named_like_something_else_in_the_module_is_not_built() -> None:
    assert type(ErrorInfo(kind="Sequence", message="x").error()) is PoolweaveError


@pytest.mark.parametrize("gone_fails", [False, True])
def test_a_client_that_goes_is_noticed_without_a_reply_to_it(host: Host, gone_fails: bool) -> None:
    """The others stay, whatever fails over it: only who has gone is reported."""
    host.gone_fails = gone_fails
    stays = InstanceClient(host.server.address, peer="p")
    goes = InstanceClient(host.server.address, peer="p")
    goes.close()
    deadline = time.monotonic() + 60
    while not host.gone:
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)
    host.answers[Stats] = lambda caller, request: caller.reply(Counters(pool={}, jobs=3))
    assert stays.call(Stats(), Counters).jobs == 3
    assert len(host.gone) == 1
    stays.close()
