"""What pages are of besides their tokens: a request's adapter and its media."""

from collections.abc import Callable
from typing import Any

import pytest
from engine_kit import words

from kvstrata.engine import Engine, Request, Sampling
from kvstrata.lease import MediaItem

PROMPT = words(150)
DIGESTS = [bytes([number]) * 32 for number in range(3)]


def reused(engine: Engine, **content: Any) -> int:
    sequence = engine.submit(Request(PROMPT, Sampling(max_new_tokens=2), **content)).result()
    assert sequence.error is None
    return sum(sequence.stats.reused_tokens.values())


def test_adapters_do_not_share_pages(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=80)
    for adapter in (None, *DIGESTS[:2]):
        assert reused(engine, adapter=adapter) == 0
    for adapter in (None, *DIGESTS[:2]):
        assert reused(engine, adapter=adapter) == 128
    assert reused(engine, adapter=DIGESTS[0], tenant="a") == 0
    (sequence,) = engine.generate([PROMPT], adapter=DIGESTS[1], max_new_tokens=2)
    assert sequence.stats.reused_tokens["gpu"] == 128


def image(number: int, offset: int = 70, length: int = 20) -> MediaItem:
    return MediaItem(offset, length, DIGESTS[number])


def test_media_separate_pages_of_equal_placeholders(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=80)
    assert reused(engine, media=[image(0)]) == 0
    assert reused(engine, media=[image(0)]) == 128
    assert reused(engine, media=[image(1)]) == 64  # the chunk before the image
    assert reused(engine) == 64
    assert reused(engine, media=[image(1, offset=71)]) == 64
    assert reused(engine, media=[image(0, length=60)]) == 64  # runs into the next chunk
    assert reused(engine, media=[image(2, offset=140, length=5)]) == 128  # behind every full page
    assert reused(engine, media=[image(1)]) == 128


def test_media_that_can_be_read_once_count(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=80)
    assert reused(engine, media=iter([image(0)])) == 0
    assert reused(engine, media=iter([image(1)])) == 64  # the chunk before the image
    assert reused(engine, media=iter([image(0)])) == 128
    with engine.cache.lease(PROMPT, media=iter([image(2)])) as lease:
        assert lease.matched == 64


def test_media_are_what_they_were_when_the_request_was_submitted(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(gpu_pages=80)
    media = [image(0)]
    sequence = engine.submit(Request(PROMPT, Sampling(max_new_tokens=1), media=media))
    media[0] = image(1)  # the next request's
    assert sequence.result().reason == "length"
    assert reused(engine, media=[image(1)]) == 64
    assert reused(engine, media=[image(0)]) == 128


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"adapter": "sql"}, "adapter 'sql' must be the 32-byte digest of its content"),
        ({"adapter": bytes(20)}, "must be the 32-byte digest of its content"),
        ({"tenant": 5}, "tenant must be a string or None, not int"),
        ({"media": [("cat.png", 3)]}, r"media item ('cat.png', 3) must be a MediaItem(offset, length, digest)"),
        ({"media": [MediaItem(3, 5, b"short")]}, "the digest of the media item at token 3 has 5 bytes; it must have 32"),
        ({"media": 5}, "media is 5, but must be a list of MediaItem"),
        ({"media": [image(0), image(1)]}, "media item at token 70 with length 20: items must be in order, apart, and not empty"),
    ],
)
def test_content_that_cannot_be_is_refused(make_engine: Callable[..., Engine], content: Any, sentence: str) -> None:
    engine = make_engine()
    sequence = engine.submit(Request(PROMPT, **content))
    assert (sequence.reason, list(sequence)) == ("refused", [])
    assert sentence in str(sequence.error)


def test_loaded_adapters_must_be_named(make_engine: Callable[..., Engine]) -> None:
    """Pages of a model that PEFT has changed are not those of the model."""
    engine = make_engine()
    assert engine.model._hf_peft_config_loaded is False  # transformers' own mark: its PeftAdapterMixin keeps it
    engine.model._hf_peft_config_loaded = True
    sequence = engine.submit(Request(PROMPT))
    assert sequence.reason == "refused"
    assert str(sequence.error).startswith("the model has adapters loaded: name the active one's content")
    assert not engine.scheduler.live
    assert reused(engine, adapter=DIGESTS[0]) == 0
