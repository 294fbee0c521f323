"""`kvstrata verify`: reads and proves everything in a cache directory."""

import json
from collections.abc import Iterator
from threading import Event
from typing import Annotated, Any

import typer

from kvstrata.cli.directory import ConfigOption, JsonOption, PathArgument, cache_directory, patiently

TOLD = 20  # lines about what is bad
COUNTS = ("sound", "corrupt", "torn", "unreadable", "damaged_records", "changed", "dropped", "recovered", "left")
DIGITS = 12  # of a page key


def verify(
    path: PathArgument = None,
    config: ConfigOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop bad pages and rebuild lost records, where no process owns the shelf.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Read every page of a cache directory and prove it: header, key, content, checksums. Exit code 1 when damage is left.

    Works beside whoever uses the directory. What cannot be read is kept: it may be readable another time.
    """
    from kvstrata._core import verify as prove
    from kvstrata.cli.tables import bar
    from kvstrata.units import readable

    folder = cache_directory(path, config)
    stop = Event()
    with bar("reading", readable, stop, quiet=json_output) as progress:
        found = patiently(lambda: prove(str(folder), repair=repair, progress=progress), stop)
    report = _report(str(folder), found, repair)
    if json_output:
        typer.echo(json.dumps(report))
    else:
        _show(report)
    if report["left"]:
        raise typer.Exit(1)


def _report(path: str, found: dict[str, Any], repair: bool) -> dict[str, Any]:
    """What the core found, with sums: of each shelf, and of all. "left": bad pages, records and files that are still there."""
    for shelf in found["shelves"]:
        shelf |= {name: sum(segment[name] for segment in shelf["segments"]) for name in COUNTS}
        shelf["left"] += shelf["error"] is not None
    totals = {name: sum(shelf[name] for shelf in found["shelves"]) for name in COUNTS}
    return {"path": path, "repair": repair, **found, **totals}


def _show(report: dict[str, Any]) -> None:
    from kvstrata.cli.tables import console, table
    from kvstrata.units import counted, readable

    out = console()
    shelves = table("shelf", "owner", "sound", "corrupt", "torn", "unreadable", "lost records")
    for shelf in report["shelves"]:
        counts = [f"{shelf[name]:,}" for name in ("sound", "corrupt", "torn", "unreadable", "damaged_records")]
        shelves.add_row(shelf["id"], "lives" if shelf["alive"] else "none", *counts)
    out.print(shelves)
    for line in list(_trouble(report))[:TOLD]:
        out.print(f"! {line}", style="yellow")
    if report["cancelled"]:
        out.print("stopped before the end")
    sound = f"{counted(report['sound'], 'page')} sound ({readable(report['bytes'])} read)"
    if report["repair"]:
        sound += f"; {counted(report['dropped'], 'bad page')} dropped, {report['recovered']:,} found again"
    left = " left" if report["repair"] else ""
    if not report["left"]:
        out.print(f"{sound}; no damage{left}", style="green")
        return
    out.print(f"{sound}; damage{left} in {counted(report['left'], 'place')}", style="red")
    if any(shelf["alive"] and shelf["left"] for shelf in report["shelves"]):
        out.print("what is bad in the shelf of a running process is left to it: it drops such a page when it comes upon it")
    if not report["repair"]:
        out.print("kvstrata verify --repair drops what is bad; such pages are computed again when they are wanted")


def _trouble(report: dict[str, Any]) -> Iterator[str]:
    for shelf in report["shelves"]:
        if shelf["error"]:
            yield f"shelves/{shelf['id']}: {shelf['error']}"
        for segment in shelf["segments"]:
            file = f"shelves/{shelf['id']}/{segment['name']}"
            if segment["error"]:
                yield f"{file}: {segment['error']}"
            elif segment["removed"]:
                yield f"{file}: held nothing, removed"
            elif segment["has_slots"]:
                yield f"{file}: its header block was lost{', and made again' if segment['rebuilt'] else ''}"
            elif segment["state"] in ("unknown", "foreign"):
                yield f"{file}: not ours, or of another format; left alone"
            for page in segment["bad"]:
                yield f"{file} slot {page['slot']}: {page['error'] or page['what']}, page {page['key'][:DIGITS]}"
