"""PrefixCache.explain and `kvstrata explain`: where a hit ends, and why."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import PAGE, prompt, tiny_identity, tiny_layout
from support import crowd, serve, settle
from tool_kit import kvstrata

from kvstrata.cache import MediaItem, PrefixCache


@pytest.fixture
def cache(open_cache: Any, tmp_path: Path) -> PrefixCache:
    made: PrefixCache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk")
    return made


def saved(cache: PrefixCache, pages: float = 4, seed: int = 1) -> np.ndarray:
    tokens = prompt(pages, seed=seed)
    serve(cache, tokens)
    settle(cache)
    return tokens


def test_by_tier(cache: PrefixCache) -> None:
    tokens = saved(cache)
    before = cache.stats()
    told = cache.explain(tokens)
    assert told["pages"] == [{"gpu": "there", "cpu": "there", "disk": "there"}] * 4
    assert (told["hit"], told["differs"]) == (3 * PAGE, None)
    assert "every full page that may be reused is cached" in told["because"]
    crowd(cache, 1)
    assert cache.explain(tokens)["pages"] == [{"cpu": "there", "disk": "there"}] * 4
    crowd(cache, 3, seed=77)
    assert cache.explain(tokens)["pages"] == [{"disk": "there"}] * 4
    assert before["leases"] == cache.stats()["leases"] - 4  # those of crowd()
    assert serve(cache, tokens).hit == cache.explain(tokens)["hit"] == 3 * PAGE


def test_where_two_prompts_part(cache: PrefixCache) -> None:
    tokens = saved(cache)
    other = tokens.copy()
    other[2 * PAGE + 5] += 1
    told = cache.explain(other)
    at = 2 * PAGE + 5
    assert told["differs"] == {"position": at, "asked": int(other[at]), "cached": int(tokens[at])}
    assert told["hit"] == 2 * PAGE
    assert f"token {at} is {other[at]}, and {tokens[at]} in the closest prompt" in told["because"]
    # The closest of several, wherever in the page it parts.
    third = tokens.copy()
    third[2 * PAGE + 9] += 1
    serve(cache, third)
    fourth = third.copy()
    fourth[2 * PAGE + 12] += 1
    assert cache.explain(fourth)["differs"]["position"] == 2 * PAGE + 12


def test_a_prompt_that_ends_early_or_goes_on(cache: PrefixCache) -> None:
    tokens = saved(cache)
    told = cache.explain(tokens[: 2 * PAGE + 3])
    assert (told["hit"], told["differs"], len(told["pages"])) == (2 * PAGE, None, 2)
    longer = np.concatenate([tokens, prompt(2, seed=9)])
    told = cache.explain(longer)
    assert (told["hit"], told["differs"]) == (4 * PAGE, None)
    assert "nothing that continues the first 4 pages is cached" in told["because"]
    assert "only full pages of 16 are kept" in cache.explain(tokens[:5])["because"]


def test_pages_of_an_earlier_run_are_told_by_their_keys(open_cache: Any, tmp_path: Path) -> None:
    first = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk")
    tokens = saved(first)
    first.close()
    second = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk")
    assert second.explain(tokens)["pages"] == [{"disk": "there"}] * 4
    for at in (3, 2 * PAGE - 1, 3 * PAGE):  # what they hold instead is read from there
        other = tokens.copy()
        other[at] += 1
        told = second.explain(other)
        assert len(told["pages"]) == at // PAGE
        assert told["differs"] == {"position": at, "asked": int(other[at]), "cached": int(tokens[at])}
        why = f"token {at} is {other[at]}, and {tokens[at]} in the closest prompt" if at < 3 * PAGE else "every full page"
        assert why in told["because"]  # the last page is computed in any case


def test_other_tenants_and_models(open_cache: Any, tmp_path: Path) -> None:
    layout = tiny_layout()
    cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", identity=tiny_identity(layout))
    tokens = saved(cache)
    assert cache.explain(tokens, tenant="acme")["pages"] == []
    cache.close()
    other = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", identity=tiny_identity(layout, weights=b"w" * 32))
    told = other.explain(tokens)
    assert told["pages"] == []
    nearest = told["namespaces"][0]
    assert nearest["namespace"] == cache.namespace().hex()
    assert list(nearest["differs"]) == ["weights"]
    ours, theirs = nearest["differs"]["weights"]
    assert (ours["digest"], theirs["digest"]) == ((b"w" * 32).hex(), bytes(32).hex())


def test_the_command(cache: PrefixCache, tmp_path: Path) -> None:
    tokens = saved(cache)
    longer = np.concatenate([tokens, prompt(2, seed=9)])
    (tmp_path / "tokens").write_text(json.dumps(longer.tolist()))
    ended = kvstrata("explain", tmp_path / "disk", "--tokens", tmp_path / "tokens", "--json")
    assert ended.status == 0
    (space,) = ended.json["namespaces"]
    assert (space["namespace"], space["pages_of_prompt"], space["of"]) == (cache.namespace().hex(), 4, 6)
    assert "4 of 6" in kvstrata("explain", tmp_path / "disk", "--tokens", tmp_path / "tokens").out
    (tmp_path / "tokens").write_text("[1, 2, x")
    assert "must hold token ids" in kvstrata("explain", tmp_path / "disk", "--tokens", tmp_path / "tokens").err
    assert kvstrata("explain", tmp_path, "--tokens", tmp_path / "tokens").status == 2


def test_the_command_tells_why_not_more(open_cache: Any, tmp_path: Path) -> None:
    """The first token that differs, of the closest prompt; and in what another model's namespace differs."""
    layout = tiny_layout()
    for weights, seeds in ((bytes(32), (1, 2)), (b"w" * 32, (3,))):
        cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", identity=tiny_identity(layout, weights=weights))
        for seed in seeds:
            saved(cache, seed=seed)
        cache.close()
    tokens = prompt(4, seed=1)
    for at in (5, 2 * PAGE + 3):
        asked = tokens.copy()
        asked[at] += 1
        (tmp_path / "tokens").write_text(json.dumps(asked.tolist()))
        ended = kvstrata("explain", tmp_path / "disk", "--tokens", tmp_path / "tokens", "--json")
        spaces = {space["namespace"]: space for space in ended.json["namespaces"]}
        ours, theirs = spaces.pop(ended.json["namespaces"][0]["namespace"]), next(iter(spaces.values()))
        if at > PAGE:
            assert ours["pages_of_prompt"] == 2
            assert ours["differs"] == {"position": at, "asked": int(asked[at]), "cached": int(tokens[at])}
        assert {tuple(ours["unlike"]), tuple(theirs["unlike"])} == {(), ("weights",)}
        out = kvstrata("explain", tmp_path / "disk", "--tokens", tmp_path / "tokens").out
        assert f"token {at} is {asked[at]}, and {tokens[at]} in the closest prompt that is on disk" in out
        assert ": other weights" in out


def test_the_same_tokens_with_other_media(open_cache: Any) -> None:
    cache = open_cache(gpu=8, cpu=0)
    tokens = prompt(4)
    serve(cache, tokens, media=[MediaItem(2, 3, bytes(32))])
    told = cache.explain(tokens, media=[MediaItem(2, 3, b"1" * 32)])
    assert (told["hit"], told["differs"]) == (0, None)
    assert "the media that they stand for are others" in told["because"]
    assert cache.explain(tokens, media=[MediaItem(2, 3, bytes(32))])["hit"] == 3 * PAGE
