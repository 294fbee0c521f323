"""A progress bar for the steps of making a model."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from kvstrata import models


@contextmanager
def progress_bar(console: Console) -> Iterator[models.Progress]:
    """What is handed to `smollm2_path`. Shows nothing until there is something to do; off a terminal, a line per step."""
    bar = Progress(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console)
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            for earlier in tasks.values():
                bar.update(earlier, total=1, completed=1)
            tasks[what] = bar.add_task(f"{what} {models.NAME}", total=None)
            if console.is_terminal:
                bar.start()
            else:
                console.print(f"{what} {models.NAME}", highlight=False)
        bar.update(tasks[what], completed=done if total else None, total=total or None)

    try:
        yield report
        for task in tasks.values():
            bar.update(task, total=1, completed=1)
    finally:
        if tasks and console.is_terminal:
            bar.stop()
