"""What the demo shows: while it runs, which tier each page of the text comes from; at the end, the table."""

from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvstrata.demo.spec import TIERS

# Told apart without colours too: logs and READMEs have none.
SHADES = {"gpu": "█", "cpu": "▓", "disk": "▒", "computed": "░"}
STYLES = {"gpu": "green", "cpu": "yellow", "disk": "dodger_blue1", "computed": "bright_black"}
CELLS = 16  # of a strip, at most: small pages share a cell
INDENT = 10


@dataclass
class Strip:
    """One request as it is seen: the pages of its shared part, and the answer so far. Without pages it is a line of text."""

    case: str
    pages: int
    said: str
    done: dict[str, int] = field(default_factory=dict)  # origin -> pages so far
    answer: str = ""

    def render(self) -> RenderableType:
        if not self.pages:
            return Text(f" {self.said}", "dim")
        cells = min(self.pages, CELLS)
        line = Text(f" {self.case:<{INDENT - 1}}", style="bold", no_wrap=True, overflow="ellipsis")
        drawn = 0
        for origin, pages in self.done.items():
            width = min(round(pages * cells / self.pages), cells - drawn)
            line.append(SHADES[origin] * width, STYLES[origin])
            drawn += width
        line.append("·" * (cells - drawn), "bright_black")
        line.append(f"  {self.said}", "not bold dim")
        if not self.answer:
            return line
        return Group(line, Padding(Text(" ".join(self.answer.split()), "italic"), (0, 0, 0, INDENT)))


class View:
    """The live part of the demo. On a terminal lines change in place; elsewhere each is printed when it is complete."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.strips: list[Strip] = []
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal and not console.quiet else None

    def __enter__(self) -> "View":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def settings(self, model: str, lines: list[str]) -> None:
        """What the demo runs with, before anything runs."""
        text = Text("\n".join([model, *(f"  {line}" for line in lines), ""]), "dim")
        self.console.print(text, soft_wrap=True)

    def say(self, sentence: str) -> None:
        """A line between the requests."""
        self.strips.append(Strip("", 0, sentence))
        self.end()

    def begin(self, case: str, pages: int, said: str) -> None:
        """The next request starts."""
        self.strips.append(Strip(case, pages, said))
        self._draw()

    def update(self, *, done: dict[str, int], answer: str = "") -> None:
        """The running request has come so far. `done`: pages of the shared part by origin."""
        self.strips[-1].done, self.strips[-1].answer = done, answer
        self._draw()

    def end(self) -> None:
        """The running request is complete."""
        if self._live:
            self._draw()
        else:
            self.console.print(self.strips[-1].render())

    def result(self, report: dict[str, Any], same: dict[str, bool], *, proven: bool) -> None:
        """The table, when everything has run. proven: nothing went another way than it must."""
        if not self._live:
            self.console.print(legend())
        self.console.print(table(report, same))
        if proven:
            self.console.print(
                "Every answer equals that of a run with the cache off, and the event log of\n"
                "the cache shows every page of the text coming from the tier its case names.",
                style="dim",
                highlight=False,
            )

    def _draw(self) -> None:
        if self._live:
            self._live.update(Group(*(strip.render() for strip in self.strips), legend()))


def legend() -> RenderableType:
    """What the shades mean."""
    line = Text("\n" + " " * INDENT)
    for origin, style in STYLES.items():
        line.append(f"{SHADES[origin]} ", style).append(f"{origin}   ", "dim")
    return line


def table(report: dict[str, Any], same: dict[str, bool]) -> Table:
    """The rows of the report. same: case -> whether its text equals that of a run with the cache off."""
    title = f"{report['prompt_tokens']:,} prompt tokens, {report['shared_tokens']:,} of them shared, {report['page_size']} per page"
    result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", collapse_padding=True)
    result.add_column("case", no_wrap=True)
    for name in ("TTFT s", "CPU s", "computed", *TIERS, "faster", "same text"):
        result.add_column(name, justify="right", no_wrap=True)
    for row in report["rows"]:
        case = row["case"]
        result.add_row(
            Text(case, STYLES["disk" if case == "restart" else "computed" if case == "cold" else case]),
            f"{row['ttft_s']:.3f}",
            f"{row['cpu_s']:.3f}",
            f"{row['computed_tokens']:,}",
            *(f"{row['reused_tokens'][tier]:,}" for tier in TIERS),
            f"{row['speedup']:.1f}x",
            "yes" if same[case] else "NO",
        )
    return result
