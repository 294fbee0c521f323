"""A17: all images have the same placeholder tokens; what tells their pages apart is the digest of what they show, whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PAGE, crowd, prompt, serve, settle

from kvstrata.explaining import page_keys
from kvstrata.lease import MediaItem

PLACEHOLDER = 29999
AT, LENGTH = 3 * PAGE + 5, 2 * PAGE  # of the image in TOKENS
TOKENS = prompt(8, seed=17)
TOKENS[AT : AT + LENGTH] = PLACEHOLDER
ROOM = {"gpu": (40, 40), "cpu": (8, 200)}


def image(number: int, offset: int = AT, length: int = LENGTH) -> list[MediaItem]:
    return [MediaItem(offset, length, number.to_bytes(32, "big"))]  # digests that are alike in all but their last bytes


@pytest.mark.parametrize("tier", ["gpu", "cpu", "disk", "restart"])
def test_reuse_stops_before_the_first_placeholder_of_another_image(open_cache: Any, tmp_path: Path, tier: str) -> None:
    rows = ROOM.get(tier, (8, 12))
    cache = open_cache(*rows, disk=tmp_path / "disk")
    turns = 0

    def hit(media: Any) -> int:
        nonlocal cache, turns
        served = serve(cache, TOKENS, media=media)
        assert served.hit == 0 or getattr(served, "disk" if tier == "restart" else tier) == served.hit
        settle(cache)
        if tier == "restart":
            cache.close()
            cache = open_cache(*rows, disk=tmp_path / "disk")
        elif tier != "gpu":
            turns += 1
            crowd(cache, 1 if tier == "cpu" else 2, seed=1000 + 10 * turns)
        return served.hit

    before = AT // PAGE * PAGE
    assert hit(image(1)) == 0
    assert hit(image(1)) == 7 * PAGE
    assert hit(image(2)) == before  # pages before the image are shared
    assert hit(image(1, offset=AT + 1)) == before  # the same image, elsewhere in the same page
    assert hit(image(1, length=LENGTH + PAGE)) == 6 * PAGE  # until it runs into a page where it had ended
    assert hit(()) == before  # text of the same tokens
    for media in (image(1), image(2), image(1, offset=AT + 1), ()):
        assert hit(media) == 7 * PAGE


def test_an_image_that_begins_with_its_page(open_cache: Any) -> None:
    cache = open_cache(gpu=24)
    assert serve(cache, TOKENS, media=image(1, offset=4 * PAGE)).hit == 0
    assert serve(cache, TOKENS, media=image(2, offset=4 * PAGE)).hit == 4 * PAGE
    assert serve(cache, TOKENS, media=image(1, offset=4 * PAGE - 1)).hit == 3 * PAGE


def test_keys_of_pages_without_media_are_those_of_their_tokens(open_cache: Any) -> None:
    """Whether images follow or not: what text alone has on disk stays findable."""
    cache = open_cache(gpu=24)
    serve(cache, TOKENS, media=image(1))
    stored = [event.key for event in cache.drain_events() if event.kind == "stored"]
    text = page_keys(cache.namespace(), TOKENS, PAGE)
    assert [key in stored for key in text] == [True] * 3 + [False] * 5
    serve(cache, TOKENS)
    stored += [event.key for event in cache.drain_events() if event.kind == "stored"]
    assert set(text) <= set(stored)
    assert len(set(stored)) == len(stored) == 8 + 5


def test_random_digests_have_keys_of_their_own(open_cache: Any) -> None:
    """100,000 images behind the same placeholders, in the same place: as many keys, and none finds another's page."""
    cache = open_cache(gpu=4)
    rng = np.random.default_rng(17)
    tokens = np.full(PAGE, PLACEHOLDER, np.int32)
    keys: set[bytes] = set()
    for _ in range(20):
        for digest in rng.integers(0, 256, (5000, 32), np.uint8):
            with cache.lease(tokens, media=[MediaItem(0, PAGE, digest.tobytes())], leave=0, must=True) as lease:
                assert lease.matched == 0
                lease.publish(PAGE)
        keys.update(event.key for event in cache.drain_events() if event.kind == "stored")
    assert len(keys) == 100_000
