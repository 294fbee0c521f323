"""Why a prompt hits as far as it does: its pages, where the way ends, and what other namespaces on disk differ in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata._core import page_key, present
from kvstrata.survey import survey

__all__ = ["explained", "nearest_namespaces", "page_keys", "pages_on_disk"]

# Of a namespace's description: what makes pages equal, and what it is called.
FIELDS = ("weights", "config", "dtype", "page_size", "layout", "part", "planes", "adapter", "tenant", "version")
TIERS = ("gpu", "cpu", "disk")


def explained(
    tokens: npt.NDArray[np.int32], page_size: int, leave: int, found: tuple[list[tuple[str, str, str]], npt.NDArray[np.int32], int]
) -> dict[str, Any]:
    """What PrefixCache.explain returns, without "namespaces", from what the core found."""
    places, closest, same = found
    pages = [{tier: place for tier, place in zip(TIERS, page, strict=True) if place} for page in places]
    usable = next((at for at, page in enumerate(pages) if set(page.values()) == {"left alone"}), len(pages))
    most = max(len(tokens) - leave, 0) // page_size
    reached = len(pages) * page_size
    differs = None
    if same < len(closest) and reached + same < len(tokens):
        differs = {"position": reached + same, "asked": int(tokens[reached + same]), "cached": int(closest[same])}
    return {
        "tokens": len(tokens),
        "page_size": page_size,
        "hit": min(usable, most) * page_size,
        "pages": pages,
        "differs": differs,
        "because": _because(len(tokens), page_size, pages, usable, most, differs, len(closest) - same if len(closest) else None),
    }


def _because(
    tokens: int, size: int, pages: list[dict[str, str]], usable: int, most: int, differs: dict[str, int] | None, unlike: int | None
) -> str:
    if tokens < size:
        return f"the prompt has {tokens} tokens, and only full pages of {size} are kept"
    if usable >= most:
        return "every full page that may be reused is cached: at least one token is always computed, and only full pages are kept"
    if usable < len(pages):
        return f"page {usable} could not be read from disk just now, and is left alone for a while"
    if differs is not None:
        asked, cached = differs["asked"], differs["cached"]
        where = f"token {differs['position']} is {asked}, and {cached} in the closest prompt that is cached"
        return f"{where}: another prefix from there on"
    if unlike == 0:
        return f"the tokens of page {len(pages)} are cached, and the media that they stand for are others"
    if unlike is not None:
        return f"the prompt ends inside page {len(pages)}"
    return f"nothing that continues the first {len(pages)} pages is cached: it was never computed, or evicted, or not published"


def page_keys(space: bytes, tokens: npt.NDArray[np.int32], page_size: int) -> list[bytes]:
    """The keys of all full pages of a prompt without media."""
    keys, key = [], space
    for start in range(0, len(tokens) - page_size + 1, page_size):
        key = page_key(space, key, tokens[start : start + page_size])
        keys.append(key)
    return keys


def pages_on_disk(path: str | Path, tokens: npt.NDArray[np.int32]) -> list[dict[str, Any]]:
    """For each namespace of a directory, the most pages first: "pages", the first so many of the prompt that are on disk, of "of",
    and what kvstrata.survey tells of the namespace. Raises RuntimeError."""
    spaces = [space for space in survey(path)["namespaces"] if space["page_size"]]
    chains = {space["namespace"]: page_keys(bytes.fromhex(space["namespace"]), tokens, space["page_size"]) for space in spaces}
    there = present(str(path), [key for chain in chains.values() for key in chain])
    answers = []
    for space in spaces:
        chain = chains[space["namespace"]]
        first = next((at for at, key in enumerate(chain) if key not in there), len(chain))
        answers.append({**space, "pages_of_prompt": first, "of": len(chain)})
    return sorted(answers, key=lambda answer: -answer["pages_of_prompt"] * (answer["page_size"] or 0))


def nearest_namespaces(path: str | Path, ours: str, most: int = 3) -> list[dict[str, Any]]:
    """Described namespaces of the directory, the most alike first: "namespace", "model", and "differs": the fields of the identity
    that are not as in `ours`, each with [ours, theirs]. `ours`: a description, as Identity.describe gives it."""
    mine = json.loads(ours)
    found: list[dict[str, Any]] = []
    for file in sorted(Path(path).glob("namespaces/*.json")):
        try:
            theirs = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if not isinstance(theirs, dict) or theirs.get("namespace") in (None, mine["namespace"]):
            continue
        differs = {name: [mine.get(name), theirs.get(name)] for name in FIELDS if mine.get(name) != theirs.get(name)}
        found.append({"namespace": str(theirs["namespace"]), "model": theirs.get("model"), "differs": differs})
    return sorted(found, key=lambda one: len(one["differs"]))[:most]
