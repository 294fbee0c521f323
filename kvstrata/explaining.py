"""Why a prompt hits as far as it does: its pages, where the way ends, and what other namespaces on disk differ in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstrata._core import page_key, pages_after, present
from kvstrata.machine import within
from kvstrata.survey import description, survey

__all__ = ["explained", "look_on_disk", "nearest_namespaces", "page_keys", "pages_on_disk"]

# Of a namespace's description: what makes pages equal, and what it is called.
FIELDS = ("weights", "config", "dtype", "page_size", "layout", "part", "planes", "adapter", "tenant", "version")
TIERS = ("gpu", "cpu", "disk")
ANSWER_S = 5.0  # that the file system is given by a process that serves
MOST_CONTINUATIONS = 4096  # pages on disk whose tokens are compared


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
        return _parted(differs)
    if unlike == 0:
        return f"the tokens of page {len(pages)} are cached, and the media that they stand for are others"
    if unlike is not None:
        return f"the prompt ends inside page {len(pages)}"
    return f"nothing that continues the first {len(pages)} pages is cached: it was never computed, or evicted, or not published"


def _parted(differs: dict[str, int]) -> str:
    where = f"token {differs['position']} is {differs['asked']}, and {differs['cached']} in the closest prompt that is cached"
    return f"{where}: another prefix from there on"


def look_on_disk(told: dict[str, Any], path: str, space: bytes, tokens: npt.NDArray[np.int32], leave: int) -> None:
    """Adds where the closest prompt on disk goes on otherwise, where `told`, of explained(), knows of none in memory."""
    pages, size = len(told["pages"]), told["page_size"]
    if told["differs"] is not None or pages * size >= len(tokens):
        return
    key = page_keys(space, tokens[: pages * size], size)[-1] if pages else space
    try:
        following = within(ANSWER_S, lambda: pages_after(path, [key], MOST_CONTINUATIONS))
    except (RuntimeError, TimeoutError):  # the directory cannot be read now
        return
    differs = _parting(tokens, pages * size, [page for _, page in following])
    told["differs"] = differs
    if differs is not None and told["hit"] == pages * size and pages < (len(tokens) - leave) // size:
        told["because"] = _parted(differs)


def page_keys(space: bytes, tokens: npt.NDArray[np.int32], page_size: int) -> list[bytes]:
    """The keys of all full pages of a prompt without media."""
    keys, key = [], space
    for start in range(0, len(tokens) - page_size + 1, page_size):
        key = page_key(space, key, tokens[start : start + page_size])
        keys.append(key)
    return keys


def pages_on_disk(path: str | Path, tokens: npt.NDArray[np.int32]) -> list[dict[str, Any]]:
    """For each namespace of a directory, the most pages first: "pages_of_prompt", the first so many of the prompt that are on disk,
    of "of"; "differs": where the closest prompt on disk goes on otherwise, as in PrefixCache.explain; "unlike": the fields of its
    identity that differ from the first namespace's, each with [the first's, its own]; and what kvstrata.survey tells of it. Raises
    RuntimeError."""
    spaces = [space for space in survey(path)["namespaces"] if space["page_size"]]
    chains = {space["namespace"]: page_keys(bytes.fromhex(space["namespace"]), tokens, space["page_size"]) for space in spaces}
    there = present(str(path), [key for chain in chains.values() for key in chain])
    answers = []
    for space in spaces:
        chain = chains[space["namespace"]]
        first = next((at for at, key in enumerate(chain) if key not in there), len(chain))
        answers.append({**space, "pages_of_prompt": first, "of": len(chain)})
    answers.sort(key=lambda answer: -answer["pages_of_prompt"] * answer["page_size"])
    ends = {}
    for answer in answers:
        name, pages = answer["namespace"], answer["pages_of_prompt"]
        ends[name] = chains[name][pages - 1] if pages else bytes.fromhex(name)
    following: dict[bytes, list[npt.NDArray[np.int32]]] = {}
    for key, continued in pages_after(str(path), list(ends.values()), MOST_CONTINUATIONS):
        following.setdefault(key, []).append(continued)
    unlike = _unlike(path, answers)
    for answer in answers:
        at = answer["pages_of_prompt"] * answer["page_size"]
        answer["differs"] = _parting(tokens, at, following.get(ends[answer["namespace"]], []))
        answer["unlike"] = unlike.get(answer["namespace"], {})
    return answers


def _parting(tokens: npt.NDArray[np.int32], at: int, pages: list[npt.NDArray[np.int32]]) -> dict[str, int] | None:
    """Where the prompt, from token `at` on, and the page that agrees longest with it part; None: nowhere."""
    best = None
    for page in pages:
        length = min(len(page), len(tokens) - at)
        unequal = np.flatnonzero(page[:length] != tokens[at : at + length])
        if len(unequal) and (best is None or at + unequal[0] > best["position"]):
            position = at + int(unequal[0])
            best = {"position": position, "asked": int(tokens[position]), "cached": int(page[unequal[0]])}
    return best


def _unlike(path: str | Path, answers: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By namespace, the fields in which it differs from the first one."""
    first = description(Path(path) / "namespaces" / f"{answers[0]['namespace']}.json") if answers else {}
    if "namespace" not in first:
        return {}
    return {other["namespace"]: other["differs"] for other in nearest_namespaces(path, json.dumps(first), most=len(answers))}


def nearest_namespaces(path: str | Path, ours: str, most: int = 3) -> list[dict[str, Any]]:
    """Described namespaces of the directory, the most alike first: "namespace", "model", and "differs": the fields of the identity
    that are not as in `ours`, each with [ours, theirs]. `ours`: a description, as Identity.describe gives it."""
    mine = json.loads(ours)
    found: list[dict[str, Any]] = []
    for file in sorted(Path(path).glob("namespaces/*.json")):
        theirs = description(file)
        if theirs.get("namespace") in (None, mine["namespace"]):
            continue
        differs = {name: [mine.get(name), theirs.get(name)] for name in FIELDS if mine.get(name) != theirs.get(name)}
        found.append({"namespace": str(theirs["namespace"]), "model": theirs.get("model"), "differs": differs})
    return sorted(found, key=lambda one: len(one["differs"]))[:most]
