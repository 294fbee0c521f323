"""How commands print: tables, progress. Nothing is taken for markup, since it comes from files."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

WIDTH = 132  # off a terminal
TEXTS = ("namespace", "model", "dtype", "shelf", "owner")  # columns that are not numbers


def console(*, stderr: bool = False) -> Console:
    wide = None if Console(stderr=stderr).is_terminal else max(WIDTH, shutil.get_terminal_size().columns)
    return Console(stderr=stderr, width=wide, markup=False, highlight=False, emoji=False)


def table(*columns: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="left" if column in TEXTS else "right")
    return made


@contextmanager
def bar(what: str, unit: Callable[[int], str], stop: Event, *, quiet: bool) -> Iterator[Callable[[int, int], bool]]:
    """A progress bar on stderr, where that is a terminal: report(done, total) returns False once `stop` is set."""
    out = console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn())
    with Progress(*columns, console=out, disable=quiet or not out.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None, told="")

        def report(done: int, total: int) -> bool:
            progress.update(task, completed=done, total=total, told=f"{unit(done)} of {unit(total)}")
            return not stop.is_set()

        yield report
