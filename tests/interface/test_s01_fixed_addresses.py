"""S1: pages live at fixed addresses: a compiled decode step that writes through update() and reads the pool is compiled once."""

from typing import Any

import pytest
import torch
from pages import PAGE, prompt
from support import settle

from kvstrata.static_cache import KVC2StaticCache

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}


def decode(
    view: KVC2StaticCache, states: torch.Tensor, page_idx: torch.Tensor, page_offset: torch.Tensor, table: torch.Tensor
) -> Any:
    """Writes one token into every layer and sums up its request's pages."""
    total = torch.zeros((), device=states.device)
    for layer in range(2):
        keys, values = view.update(states, states * 2, layer, {"page_idx": page_idx, "page_offset": page_offset})
        total = total + keys[table].sum() + values[table].sum()
    return total


def over_eviction_reset_and_restore(view: KVC2StaticCache, step: Any) -> None:
    """Four turns of one request: computed, found on the device, and twice brought back to it. A step gives the same each time."""
    cache, device = view.cache, view.device
    tokens = prompt(3)
    found = []
    for turn in range(4):
        lease = view.lease(tokens)
        hit = lease.wait()
        assert hit == (2 * PAGE if turn else 0)
        assert lease.sources["cpu"] == (2 * PAGE if turn > 1 else 0)
        batch = view.mini_batch(prefill=[(lease, hit, 3 * PAGE)], decode=[(lease, 3 * PAGE - 1)])
        page_idx, page_offset = view.get_page_table(batch)
        numbers = torch.arange(hit, 3 * PAGE, dtype=torch.float32, device=device)
        written = numbers.view(1, -1, 1, 1).expand(1, 3 * PAGE - hit, 2, 8)
        for layer in range(2):
            view.update(written, written, layer, {"page_idx": page_idx, "page_offset": page_offset})
        page_idx, page_offset = view.get_page_table(batch, is_prefill=False)
        table = torch.from_numpy(lease.rows).long().to(device)
        states = torch.full((1, 1, 2, 8), 0.5, device=device)
        found.append(float(step(view, states, page_idx.view(1, 1), page_offset.view(1, 1), table)))
        lease.publish(3 * PAGE, ready=cache.pool.mark_batch())
        view.reset()
        settle(cache)
        if turn > 0:
            with cache.lease(prompt(cache.pool.pages - 1, seed=turn), must=True):
                pass  # it needs every row of the device
    whole = sum(range(3 * PAGE - 1)) * 16
    assert found == [2 * (whole + 0.5 * 16) + 2 * (whole + 16)] * 4


def test_compiled_once_and_right_over_eviction_reset_and_restore(open_cache: Any) -> None:
    torch._dynamo.reset()
    compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    view = KVC2StaticCache(CONFIG, cache=open_cache(gpu=8, cpu=24))
    over_eviction_reset_and_restore(view, torch.compile(decode, fullgraph=True, backend=backend))
    assert compiled == 1


@pytest.mark.cuda
def test_the_same_under_cuda_graphs(open_cache: Any) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    view = KVC2StaticCache(CONFIG, cache=open_cache(gpu=8, cpu=24, device="cuda"))
    over_eviction_reset_and_restore(view, torch.compile(decode, fullgraph=True, mode="reduce-overhead"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
