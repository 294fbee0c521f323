"""`kvstrata inspect`: what a cache directory holds."""

import json
import time
from typing import Any

import typer

from kvstrata.cli.directory import ConfigOption, JsonOption, PathArgument, cache_directory, patiently

DIGITS = 12  # of a namespace: enough to name it


def inspect(path: PathArgument = None, config: ConfigOption = None, json_output: JsonOption = False) -> None:
    """Show what a cache directory holds: namespaces, shelves, health.

    Reads tables only, beside whoever uses the directory; `kvstrata verify` reads the pages.
    """
    from kvstrata.survey import survey

    folder = cache_directory(path, config)
    found = patiently(lambda: survey(folder))
    if json_output:
        typer.echo(json.dumps(found))
    else:
        _show(found, time.time())


def _show(found: dict[str, Any], now: float) -> None:
    from kvstrata.cli.tables import console, table
    from kvstrata.units import ago, counted, readable

    out = console()
    pages = sum(space["pages"] for space in found["namespaces"])
    out.print(f"{found['path']}: {counted(pages, 'page')}, {readable(found['allocated'])}; {readable(found['free'])} free")

    spaces = table("namespace", "model", "dtype", "tokens", "pages", "size", "last use", "uses")
    for space in found["namespaces"]:
        spaces.add_row(
            space["namespace"][:DIGITS],
            _model(space),
            space["dtype"] or "?",
            str(space["page_size"] or "?"),
            f"{space['pages']:,}",
            readable(space["bytes"]),
            ago(now - space["last_use"]) if space["last_use"] else "-",
            f"{space['uses']:,}",
        )
    out.print(spaces)

    shelves = table("shelf", "owner", "segments", "pages", "slots", "size")
    for shelf in found["shelves"]:
        segments = shelf["segments"]
        shelves.add_row(
            shelf["id"],
            "lives" if shelf["alive"] else "none",
            f"{len(segments):,}",
            *(f"{sum(segment[name] for segment in segments):,}" for name in ("pages", "slots")),
            readable(sum(segment["allocated"] for segment in segments)),
        )
    out.print(shelves)
    for problem in found["problems"]:
        out.print(f"! {problem}", style="yellow")
    if not found["problems"]:
        out.print("files and tables are sound; the pages were not read (that is what kvstrata verify does)", style="green")


def _model(space: dict[str, Any]) -> str:
    """A namespace of an adapter or a tenant has no description of its own."""
    name = space["model"] or ("(no name)" if space["dtype"] else "(not described)")
    return name + (" +adapter" if space["adapter"] else "") + (" of a tenant" if space["tenant"] else "")
