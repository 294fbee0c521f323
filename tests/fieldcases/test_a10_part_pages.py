"""A10: what lies behind the last full page is never part of a hit, in whatever tier the pages are."""

import pytest
from support import begin, crowd, fill, prompt, serve, settle, tiny_layout, wrong

LAYOUT = tiny_layout(page_size=256, layers=1, width=4)


@pytest.fixture
def cache(open_cache, tmp_path):
    return open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", disk_bytes=16 << 20, layout=LAYOUT)


def test_a_thousand_tokens_are_three_pages_in_each_tier(open_cache, tmp_path, cache):
    tokens = prompt(1000 / 256, seed=10, page_size=256)
    longer = prompt(6, seed=11, page_size=256)
    longer[: len(tokens)] = tokens
    assert len(tokens) == 1000
    assert serve(cache, tokens).hit == 0
    settle(cache)
    assert cache.stats()["gpu"]["pages"] == cache.stats()["cpu"]["pages"] == cache.stats()["disk"]["pages"] == 3
    for asked in (tokens, longer):
        with begin(cache, asked, leave=0, write=False) as lease:
            assert lease.sources == {"gpu": 768, "cpu": 0, "disk": 0}
    crowd(cache)
    for asked in (longer, tokens):
        with begin(cache, asked, leave=0, write=False) as lease:
            assert lease.hit == 768
            assert lease.sources["disk"] == 0
    crowd(cache, prompts=3)
    with begin(cache, longer, leave=0, write=False) as lease:
        assert lease.sources == {"gpu": 0, "cpu": 0, "disk": 768}
    settle(cache)
    cache.close()
    cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", disk_bytes=16 << 20, layout=LAYOUT)
    with begin(cache, longer, leave=0, write=False) as lease:
        assert lease.sources == {"gpu": 0, "cpu": 0, "disk": 768}


@pytest.mark.parametrize("computed", [0, 1, 255, 256, 257, 511, 767, 768, 1000])
def test_only_pages_computed_to_the_end_are_published(cache, computed):
    """The prompt is longer than what has been computed of it: chunked prefill, cancelled after `computed` tokens."""
    tokens = prompt(1000 / 256, seed=12, page_size=256)
    with begin(cache, tokens) as lease:
        fill(cache, lease.rows, tokens, 0, -(-computed // 256))
        assert lease.publish(computed, ready=cache.pool.mark_batch()) == computed // 256 * 256
    settle(cache)
    with begin(cache, tokens, leave=0) as lease:
        assert lease.hit == computed // 256 * 256
    assert cache.stats()["disk"]["pages"] == computed // 256


def test_tokens_that_are_not_known_yet_are_not_published(cache):
    """Rows are reserved beyond the tokens: a page whose tokens are not all there has no name."""
    tokens = prompt(2, seed=13, page_size=256)
    with begin(cache, tokens[:300], reserve=212) as lease:
        fill(cache, lease.rows, tokens, 0, 2)
        assert lease.publish(512, ready=cache.pool.mark_batch()) == 256
        lease.append(tokens[300:511])
        assert lease.publish(512, ready=cache.pool.mark_batch()) == 256
        lease.append(tokens[511:])
        assert lease.publish(512, ready=cache.pool.mark_batch()) == 512
    with begin(cache, tokens, leave=0) as lease:
        assert lease.hit == 512


@pytest.mark.parametrize("chunk", [512, 768, 1024])
def test_hits_end_on_the_grid_of_chunks(open_cache, tmp_path, chunk):
    """Five full pages are cached; a caller that computes in larger chunks gets the whole chunks of them."""
    cache = open_cache(gpu=8, cpu=16, layout=LAYOUT, chunk=chunk)
    tokens = prompt(5.5, seed=14, page_size=256)
    serve(cache, tokens)
    settle(cache)
    whole = 1280 // chunk * chunk
    longer = prompt(8, seed=15, page_size=256)
    longer[: len(tokens)] = tokens
    for asked in (longer, tokens):
        with begin(cache, asked, multiple=chunk, leave=0, write=False) as lease:
            assert lease.hit == lease.matched == whole
            assert not wrong(cache, lease.rows, asked, whole // 256)
    crowd(cache)
    with begin(cache, tokens, multiple=chunk) as lease:
        assert lease.sources == {"gpu": 0, "cpu": whole, "disk": 0}
