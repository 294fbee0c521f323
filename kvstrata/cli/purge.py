"""`kvstrata purge`: drops pages from a cache directory, and what is left of them in its files."""

import json
import sys
import time
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.directory import ConfigOption, JsonOption, PathArgument, cache_directory, patiently, read_tokens
from kvstrata.cli.refusal import Refused

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

HEX = set("0123456789abcdef")


def purge(
    path: PathArgument = None,
    config: ConfigOption = None,
    everything: Annotated[bool, typer.Option("--all", help="All pages.")] = False,
    namespace: Annotated[
        str | None, typer.Option(help="The pages of one namespace: its first hex digits, as `kvstrata inspect` shows them.")
    ] = None,
    older_than: Annotated[str | None, typer.Option(help="The pages not used for so long: 90s, 30min, 12h, 7d, 2w.")] = None,
    to_size: Annotated[
        str | None, typer.Option(help="Whole segments, the least recently used first, until the directory takes this: 10GB.")
    ] = None,
    prefix: Annotated[
        Path | None,
        typer.Option(help="The pages of all prompts that begin with the token ids in this file (JSON, or numbers between spaces)."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Drop pages from a cache directory, and overwrite the prompt tokens that its files hold of them.

    Processes that use the directory are asked to drop theirs, and waited for. Exit code 1 when something that was to go is still
    there.
    """
    from kvstrata._core import purge as drop
    from kvstrata.cli.tables import bar

    folder = cache_directory(path, config)
    order, what = _order(folder, everything, namespace, older_than, to_size, prefix)
    if not yes:
        if json_output or not sys.stdin.isatty():
            raise Refused(f"this would drop {what} from {folder}: say --yes if that is meant")
        typer.confirm(f"Drop {what} from {folder}?", abort=True, err=True)
    stop = Event()
    with bar("purging", lambda slots: f"{slots:,} slots", stop, quiet=json_output) as progress:
        report = patiently(lambda: drop(str(folder), progress=progress, **order), stop)
    report["done"] = _done(report, order.get("to_bytes"))
    report = {"path": str(folder), "dropped": what, **report}
    if json_output:
        typer.echo(json.dumps(report))
    else:
        _show(report)
    if not report["done"]:
        raise typer.Exit(1)


def _order(
    folder: Path, everything: bool, namespace: str | None, older_than: str | None, to_size: str | None, prefix: Path | None
) -> tuple[dict[str, Any], str]:
    """(what the core is told, the same for people)."""
    from kvstrata.units import gigabytes, in_bytes, readable, seconds

    chosen = everything + sum(option is not None for option in (namespace, older_than, to_size, prefix))
    if chosen != 1 and not (chosen == 2 and namespace is not None and prefix is not None):
        raise Refused(
            "say what to drop: one of --all, --namespace, --older-than, --to-size and --prefix (or --prefix in a --namespace)"
        )
    if prefix is not None:
        tokens = read_tokens(prefix, "--prefix")
        keys = _page_keys(folder, tokens, None if namespace is None else _whole(folder, namespace.lower()))
        return {"prefixes": keys}, f"all pages of prompts that begin with the {len(tokens):,} tokens in {prefix}"
    if namespace is not None:
        name = _whole(folder, namespace.lower())
        return {"spaces": [bytes.fromhex(name)]}, f"all pages of namespace {name[:12]}"
    if older_than is not None:
        try:
            age = seconds(older_than)
        except ValueError:
            raise Refused(f"--older-than {older_than} is not an age: use one like 90s, 30min, 12h, 7d or 2w") from None
        return {"before": max(time.time() - age, 0.0)}, f"all pages not used for {older_than}"
    if to_size is not None:
        try:
            size = in_bytes(gigabytes(to_size))
        except ValueError:
            raise Refused(f"--to-size {to_size} is not a size: use one like 10GB, 512MB or 64GiB") from None
        return {"to_bytes": size}, f"the least recently used segments beyond {readable(size)}"
    return {"all": True}, "all pages"


def _page_keys(folder: Path, tokens: "npt.NDArray[np.int32]", namespace: str | None) -> list[bytes]:
    """The key of the last full page of the tokens, in each namespace (or in that one)."""
    from kvstrata.explaining import page_keys
    from kvstrata.survey import survey

    keys = []
    for found in patiently(lambda: survey(folder))["namespaces"]:
        size = found["page_size"]
        if namespace not in (None, found["namespace"]):
            continue
        if len(tokens) < size:
            raise Refused(
                f"--prefix holds {len(tokens)} tokens, and a page of namespace {found['namespace'][:12]} has {size}: give more"
            )
        keys.append(page_keys(bytes.fromhex(found["namespace"]), tokens, size)[-1])
    return keys


def _whole(folder: Path, digits: str) -> str:
    """The one namespace that begins with these hex digits."""
    from kvstrata.survey import survey

    if not digits or not set(digits) <= HEX or len(digits) > 64:
        raise Refused(f"--namespace {digits} is not the beginning of a namespace: `kvstrata inspect` shows them")
    if len(digits) == 64:
        return digits  # pages of it may have been evicted, and still lie in free slots
    names = [space["namespace"] for space in patiently(lambda: survey(folder))["namespaces"]]
    found = [name for name in names if name.startswith(digits)]
    if len(found) == 1:
        return str(found[0])
    many = f"{len(found)} namespaces begin" if found else "no namespace begins"
    raise Refused(f"{many} with {digits}: `kvstrata inspect --json` shows them whole")


def _done(report: dict[str, Any], size: int | None) -> bool:
    """Whether everything that was to go is gone."""
    if report["cancelled"] or report["failures"]:
        return False
    return not (report["used_pages"] or report["unanswered"]) if size is None else bool(report["allocated"] <= size)


def _show(report: dict[str, Any]) -> None:
    from kvstrata.cli.tables import console
    from kvstrata.units import counted, readable

    out = console()
    dropped = f"dropped {counted(report['pages'], 'page')} ({readable(report['bytes'])})"
    if report["leftovers"]:
        dropped += f" and what was left of {counted(report['leftovers'], 'page')} that had gone before"
    out.print(f"{dropped}; removed {counted(report['segments'], 'segment')}: {readable(report['freed'])} given back")
    if report["namespaces"]:
        out.print(f"removed {counted(report['namespaces'], 'description')} of namespaces that no page uses")
    out.print(f"the directory takes {readable(report['allocated'])} now")
    used = f"{counted(report['used_pages'], 'page')} ({readable(report['used_bytes'])})"
    warnings = {
        "used_shelves": f"{used} of running processes stay, since they are in use or nobody answered: purge again",
        "unknown": f"{counted(report['unknown'], 'segment file')} of another format or program: left alone",
        "failures": f"{report['failures']:,} slots or files could not be cleared, the first in {report['error']}",
        "cancelled": "stopped before the end",
    }
    for name, sentence in warnings.items():
        if report[name]:
            out.print(f"! {sentence}", style="yellow")
