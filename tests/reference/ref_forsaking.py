"""A process that stops one it started and prints whom; for a test of what is left when it is killed."""

from __future__ import annotations

import signal
import subprocess
import sys

if __name__ == "__main__":
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other.send_signal(signal.SIGSTOP)
    sys.stdout.write(f"{other.pid}\n")
    sys.stdout.flush()
    signal.pause()
