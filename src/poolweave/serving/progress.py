"""The progress bar of a measurement: on stderr, gone when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A bar that leaves nothing: neither on a terminal when it is over, nor in a file that takes stderr."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def measuring(first: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` steps; the callable tells what was just measured."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with progress_bar(*columns) as progress:
        task = progress.add_task(first, total=total)
        yield lambda what: progress.update(task, advance=1, description=what)
