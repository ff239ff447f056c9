"""A signal ends a process whatever its main thread does."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading

import pytest

from poolweave.serving.process.signals import ended_by

_BLOCKED = """
import os, signal, sys, threading
from poolweave.serving.process.signals import ended_by

number, stopped, open_thread = signal.Signals(int(sys.argv[1])), threading.Event(), threading.Event()
threading.Thread(target=open_thread.wait, daemon=True).start()  # takes the signal: nothing wakes the main one
with ended_by(number, stop=stopped.set):
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    stopped.wait()
os.kill(os.getpid(), number)  # ignored from here on
signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
sys.exit(7)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_process_whose_main_thread_is_in_a_call_that_nothing_interrupts(
    number: signal.Signals,
) -> None:
    with subprocess.Popen([sys.executable, "-c", _BLOCKED, str(int(number))], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(60) == 7


def test_the_wakeup_descriptor_and_the_thread_are_given_back() -> None:
    threads = threading.active_count()
    handler = signal.getsignal(signal.SIGUSR2)
    try:
        with ended_by(signal.SIGUSR2, stop=lambda: None):
            assert threading.active_count() == threads + 1
        assert threading.active_count() == threads
        assert signal.set_wakeup_fd(-1) == -1
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, handler)


def test_a_signal_of_someone_else_stops_nothing() -> None:
    heard: list[str] = []
    handler = signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append("theirs"))
    try:
        with ended_by(signal.SIGUSR2, stop=lambda: heard.append("ours")):
            signal.raise_signal(signal.SIGUSR1)
        assert heard == ["theirs"]
    finally:
        signal.signal(signal.SIGUSR1, handler)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_signal_is_heard_although_an_event_loop_took_the_wakeup_descriptor() -> None:
    handler, heard = signal.getsignal(signal.SIGUSR2), threading.Event()
    theirs, other = socket.socketpair()
    theirs.setblocking(False)
    with theirs, other:
        try:
            with ended_by(signal.SIGUSR2, stop=heard.set):
                signal.set_wakeup_fd(theirs.fileno())
                signal.raise_signal(signal.SIGUSR2)
                assert heard.wait(60)
        finally:
            signal.signal(signal.SIGUSR2, handler)
