"""What a cache directory holds, told by its tables and by its descriptions of namespaces. Reads only, beside whoever uses it."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstrata._core import survey as look
from kvstrata.units import counted

__all__ = ["describe", "description", "survey"]

DESCRIPTION_BYTES = 64 * 1024  # a description that is longer is not one
TEXT = 120  # characters of a text that are believed
FIELDS = {"model": str, "dtype": str, "layout": str, "part": str, "adapter": str, "layers": int, "bytes_per_token": int}


def survey(path: str | Path) -> dict[str, Any]:
    """Sizes in bytes, times in seconds since 1970. Raises RuntimeError, one sentence, for a directory that cannot be read.

    "allocated", "free": taken by the directory, as its cap counts it, and free on its file system.
    "namespaces": most recently used first, each with "namespace" (64 hex digits), "page_size" (tokens), "pages", "bytes", "uses",
    "oldest_use" and "last_use", and what its description says, None where there is none: "model", "dtype", "layout", ...
    "shelves": each with "id", "alive" (a process owns it), "error", and "segments": "name", "state", "slots", "pages", ...
    "unknown": files that are not ours, each with "path" and "allocated".
    "problems": what is wrong, one sentence each. The pages themselves are not read: that is what `kvstrata verify` does.
    """
    found: dict[str, Any] = look(str(path))
    used = found["namespaces"]
    nothing = {"page_size": None, "pages": 0, "bytes": 0, "uses": 0, "oldest_use": None, "last_use": None}
    names = sorted({*used, *found.pop("descriptions")})
    spaces = [{"namespace": name, **used.get(name, nothing), **describe(path, name)} for name in names]
    found["namespaces"] = sorted(spaces, key=lambda space: -(space["last_use"] or 0))
    found["problems"] = list(_problems(found))
    return found


def describe(path: str | Path, namespace: str) -> dict[str, Any]:
    """What namespaces/<namespace>.json says, as far as it can be believed: short printable texts, numbers of possible size."""
    content = description(Path(path) / "namespaces" / f"{namespace}.json")
    said: dict[str, Any] = {name: _believed(content.get(name), kind) for name, kind in FIELDS.items()}
    said["tenant"] = content.get("tenant") is True
    return said


def description(path: Path) -> dict[str, Any]:
    """What the file of a namespace says, {} where it is none. Nothing in it is believed, and no link or pipe is followed."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return {}
        text = os.read(file, DESCRIPTION_BYTES + 1)
        content = json.loads(text) if len(text) <= DESCRIPTION_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(file)
    return content if isinstance(content, dict) else {}


def _believed(value: Any, kind: type) -> Any:
    if kind is str and isinstance(value, str):
        return "".join(letter if letter.isprintable() else "?" for letter in value[:TEXT])
    if kind is int and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    return None


def _problems(found: dict[str, Any]) -> Iterator[str]:
    for shelf in found["shelves"]:
        place = f"shelves/{shelf['id']}"
        if shelf["error"]:
            yield f"{place} cannot be listed: {shelf['error']}"
        for segment in shelf["segments"]:
            yield from _segment_problems(segment, f"{place}/{segment['name']}", shelf["alive"])
    for file in found["unknown"]:
        yield f"{file['path']} is not ours: left alone, and counted"


def _segment_problems(segment: dict[str, Any], file: str, alive: bool) -> Iterator[str]:
    if segment["error"]:
        yield f"{file} cannot be read: {segment['error']}"
    elif segment["state"] == "unknown":
        version = f" version {segment['version']}" if segment["version"] else ""
        yield f"{file} is of another format{version}: left alone, and counted"
    elif segment["state"] == "foreign":
        yield f"{file} is no segment, or its header block is lost"
    elif segment["state"] == "damaged" and not alive:  # a living owner may just be making it
        yield f"{file} has no sound header block: its slots will tell at the next start"
    if segment["damaged_records"]:
        yield f"{file} has {counted(segment['damaged_records'], 'damaged record')}: the slots will tell at the next start"
    if segment["cut_pages"]:
        yield f"{file} was cut short: {counted(segment['cut_pages'], 'page')} lost"
