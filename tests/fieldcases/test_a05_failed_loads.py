"""A5: a page that could not be loaded is never reported as loaded: the hit ends before it, and all that was borrowed comes back."""

import threading

import numpy as np
import pytest
from support import (
    PAGE,
    ByHand,
    GatedDevice,
    crowd,
    find_on_disk,
    fingerprint,
    finish,
    flip,
    prompt,
    serve,
    settle,
    until,
    wrong,
)

from kvstrata._core import page_key

PAGES = 6


def saved(open_cache, root, **options):
    """The first run: one prompt on disk."""
    cache = open_cache(gpu=8, cpu=8, disk=root)
    tokens = prompt(PAGES, seed=5)
    serve(cache, tokens)
    settle(cache)
    cache.close()
    return open_cache(gpu=16, cpu=8, disk=root, **options), tokens


@pytest.mark.parametrize("where", ["row", "row's last byte", "header", "file cut short"])
@pytest.mark.parametrize("bad", [0, 2, PAGES - 1])
def test_damage_in_one_slot(open_cache, tmp_path, bad, where):
    root = tmp_path / "disk"
    cache, tokens = saved(open_cache, root)
    content = fingerprint(cache.layout, cache.namespace(), tokens[: (bad + 1) * PAGE])
    ((path, at),) = find_on_disk(root, content)
    lost = {bad}
    if where == "row":
        flip(path, at + 1000)
    elif where == "row's last byte":
        flip(path, at + cache.layout.row_bytes - 1)
    elif where == "header":
        flip(path, at - 2000)
    else:
        with path.open("r+b") as file:
            file.truncate(at + 100)
        lost = {page for page in range(PAGES) if offset_of(cache, root, tokens, page) is None}
    first = min(lost)

    lease = cache.lease(tokens, leave=0, must=True)
    assert lease.matched == PAGES * PAGE
    assert lease.wait() == first * PAGE
    assert lease.sources == {"gpu": 0, "cpu": 0, "disk": first * PAGE}
    assert not lease.lost
    assert not wrong(cache, lease.rows, tokens, first)
    settle(cache)
    stats = cache.stats()
    assert stats["corrupt"] >= 1
    assert stats["disk"]["looked_up"] == PAGES
    assert stats["disk"]["loaded"] == first
    finish(cache, lease, tokens)  # computes the rest
    settle(cache)
    assert cache.stats()["disk"]["used"] == first
    assert cache.stats()["disk"]["pages"] == PAGES
    cache.close()

    cache = open_cache(gpu=8, cpu=8, disk=root)  # and what was damaged has been written again
    assert serve(cache, tokens, leave=0).disk == PAGES * PAGE
    assert cache.stats()["corrupt"] == 0


def offset_of(cache, root, tokens, page):
    return next(iter(find_on_disk(root, fingerprint(cache.layout, cache.namespace(), tokens[: (page + 1) * PAGE]))), None)


def test_others_wait_for_the_same_bad_page(open_cache, tmp_path):
    """Several requests joined one load that fails: each gets what is good, and rows of its own for the rest."""
    root = tmp_path / "disk"
    device = GatedDevice()
    cache, tokens = saved(open_cache, root, device=device)
    cache.close()
    cache = open_cache(gpu=20, cpu=8, disk=root, device=device)
    path, at = offset_of(cache, root, tokens, 3)
    flip(path, at)
    device.ups.clear()
    leases = [cache.lease(tokens, must=True) for _ in range(4)]
    device.ups.set()
    for lease in leases:
        assert lease.wait() == 3 * PAGE
        assert not lease.lost
        assert not wrong(cache, lease.rows, tokens, 3)
    own = np.concatenate([lease.rows[3:] for lease in leases])
    assert len(set(own.tolist())) == len(own), "two requests compute into one row"
    for lease in leases:
        finish(cache, lease, tokens)


def test_one_gives_up_and_another_waits():
    """The row that was reserved for a page stays with it as long as anybody waits: who gives up computes into another one."""
    hand = ByHand(gpu_rows=10, cpu_rows=6, disk=True)
    tokens = prompt(3, seed=5)
    on_disk(hand, tokens)
    hasty, patient = hand.lease(tokens, leave=0), hand.lease(tokens, leave=0)
    reserved = hand.driver.rows(patient).tolist()
    assert hand.driver.rows(hasty).tolist() == reserved
    hand.driver.settle(0.0, hasty)
    hand.step()
    assert hand.hit(hasty) == 0
    assert not set(hand.driver.rows(hasty).tolist()) & set(reserved)
    hand.finish_ops()
    assert [row for copy in hand.copies for row in copy[3].tolist()] == reserved
    hand.finish_all()
    assert hand.hit(patient) == 3
    assert hand.driver.rows(patient).tolist() == reserved
    hand.release(hasty)
    hand.release(patient)


def on_disk(hand, tokens):
    """Makes the pages known as those of an earlier run."""
    parent = hand.space
    for page in range(len(tokens) // PAGE):
        key = page_key(hand.space, parent, tokens[page * PAGE : (page + 1) * PAGE])
        hand.driver.add_found(key, parent, (0, page))
        parent = key


def test_unreadable_is_kept_and_asked_again_later():
    """EIO: the page is a miss now, and found again after a while, with nothing rewritten."""
    hand = ByHand(gpu_rows=6, cpu_rows=6, disk=True, retry_after=5.0)
    tokens = prompt(4, seed=5)
    hand.release(hand.publish(tokens))
    hand.finish_all()
    others = prompt(6, seed=6)
    hand.release(hand.publish(others))
    hand.finish_all()
    assert hand.where(tokens) == [(0, 0, 2)] * 4
    lease = hand.lease(tokens, leave=0)
    slots = {page: op[2] for page, op in enumerate(hand.ops)}
    assert [op[1] for op in hand.ops] == ["read"] * 4
    hand.finish_ops(lambda kind, slot: "unreadable" if slot == slots[2] else "ok")
    hand.finish_all()
    assert hand.hit(lease) == 2
    assert hand.stats()["unreadable"] == 1
    assert hand.where(tokens)[2][2] == 2, "it is still on disk"
    hand.release(lease)
    lease = hand.lease(tokens, leave=0)
    assert hand.hit(lease) == 2
    hand.release(lease)
    hand.now = 5.1
    lease = hand.lease(tokens, leave=0)
    assert hand.hit(lease) == 4
    hand.finish_all()
    assert hand.hit(lease) == 4
    hand.release(lease)
    assert hand.stats()["disk_writes"] == 10


def test_staging_for_three_of_five(open_cache, tmp_path):
    """All slab rows are taken by pages on their way up: the deadline comes, three pages are served, none unfilled."""
    root = tmp_path / "disk"
    device = GatedDevice()
    cache = open_cache(gpu=8, cpu=8, disk=root)
    tokens = prompt(5, seed=7)
    serve(cache, tokens)
    settle(cache)
    cache.close()
    cache = open_cache(gpu=8, cpu=3, disk=root, device=device)
    device.ups.clear()
    lease = cache.lease(tokens, leave=0, must=True)
    assert lease.matched == 5 * PAGE
    until(lambda: cache.stats()["cpu"]["pages"] == 3, "three pages in RAM")
    waiting = threading.Thread(target=lease.wait, kwargs={"timeout": 0})
    waiting.start()
    until(lambda: lease.hit == 3 * PAGE, "the hit to be cut")
    device.ups.set()
    waiting.join(30)
    assert lease.ready
    assert lease.hit == 3 * PAGE
    assert not lease.lost
    assert not wrong(cache, lease.rows, tokens, 3)
    finish(cache, lease, tokens)
    settle(cache)
    stats = cache.stats()
    assert stats["cpu"]["pages"] + stats["cpu"]["free"] == 3
    assert stats["gpu"]["pages"] + stats["gpu"]["free"] == 8
    crowd(cache)  # every row can be had again: nothing is pinned or held


def test_staging_of_three_carries_five_when_there_is_time(open_cache, tmp_path):
    root = tmp_path / "disk"
    cache = open_cache(gpu=8, cpu=8, disk=root)
    tokens = prompt(5, seed=7)
    serve(cache, tokens)
    settle(cache)
    cache.close()
    cache = open_cache(gpu=8, cpu=3, disk=root)
    assert serve(cache, tokens, leave=0).disk == 5 * PAGE


@pytest.mark.parametrize("given_up", [0, 1, 3, 5])
def test_cut_at_any_moment(given_up):
    """The deadline comes when so many of five reads have ended: the hit is exactly what is on its way to the device."""
    hand = ByHand(gpu_rows=5, cpu_rows=3, disk=True, reads_at_once=1)
    tokens = prompt(5, seed=8)
    on_disk(hand, tokens)
    lease = hand.lease(tokens, leave=0)
    assert hand.hit(lease) == 5
    for _ in range(given_up):
        hand.finish_ops()
        if given_up > 3:
            hand.finish_copies()
    hand.driver.settle(0.0, lease)
    hand.step()
    rows = hand.driver.rows(lease)
    assert hand.hit(lease) == min(given_up, 5)
    assert len(set(rows.tolist())) == 5
    assert min(rows) > 0
    hand.finish_all()
    hand.driver.publish(0.0, lease, len(tokens))
    hand.release(lease)
    hand.finish_all()
    stats = hand.stats()
    assert stats["cpu"]["pages"] + stats["cpu"]["free"] == 3
    assert hand.lease(prompt(5, seed=9)), "every row can be had"
