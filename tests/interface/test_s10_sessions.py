"""S10: load, page, update; reset() between sessions keeps addresses and every cached page."""

from typing import Any

import torch
from pages import PAGE, prompt
from support import serve, settle

from kvstrata.static_cache import KVC2StaticCache

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}


def test_sessions(open_cache: Any) -> None:
    cache = open_cache(gpu=8, cpu=16)
    view = KVC2StaticCache(CONFIG, cache=cache)
    addresses = [tensor.data_ptr() for tensor in (*view.k_cache, *view.v_cache)]
    tokens = prompt(4)
    assert view.get_seq_length() == 0
    for session in range(3):
        lease = view.lease(tokens)
        hit = lease.wait()
        assert hit == (3 * PAGE if session else 0)
        assert view.get_seq_length() == hit
        batch = view.mini_batch(prefill=[(lease, hit, len(tokens))])
        assert view.get_seq_length() == len(tokens)
        page_idx, page_offset = view.get_page_table(batch)
        states = torch.randn(1, len(tokens) - hit, 2, 8)
        view.update(states, states + 1, 0, {"page_idx": page_idx, "page_offset": page_offset})
        if session == 0:
            first = states
            lease.publish(len(tokens), ready=cache.pool.mark_batch())
        view.reset()
        assert view.get_seq_length() == 0
        assert cache.stats()["open_leases"] == 0
    lease = view.lease(tokens)
    lease.wait()
    for page, row in enumerate(lease.rows[:3]):  # what the first session wrote
        assert torch.equal(view.get_k_cache(0)[int(row)], first[0, page * PAGE : (page + 1) * PAGE])
        assert torch.equal(view.get_v_cache(0)[int(row)], first[0, page * PAGE : (page + 1) * PAGE] + 1)
    view.reset()
    view.close()
    settle(cache)  # it is still open: the view did not make it
    assert [tensor.data_ptr() for tensor in (*view.k_cache, *view.v_cache)] == addresses


def test_a_lease_given_back_early_is_no_trouble(open_cache: Any) -> None:
    cache = open_cache(gpu=8, cpu=16)
    view = KVC2StaticCache(CONFIG, cache=cache)
    tokens = prompt(3)
    serve(cache, tokens)
    settle(cache)
    with view.lease(tokens) as lease:
        view.mini_batch(decode=[(lease, 0)])
    again = view.lease(tokens)
    batch = view.mini_batch(decode=[(again, 5)])
    assert view.get_page_table(batch, is_prefill=False)[0].tolist() == [int(again.rows[0])]
    view.reset()
