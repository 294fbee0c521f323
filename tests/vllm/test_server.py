"""vLLM's server with the connector: hits in every tier, kill -9, tenants, aborts, and what /metrics and usage say."""

import signal
import threading
import urllib.error

import numpy as np
import pytest
from real import PAGE, PATIENCE, serving
from support import until

from kvstrata.survey import survey

pytestmark = pytest.mark.slow

LENGTH = 970
HIT = 960


def words(seed: int, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 40000, length).tolist()


def pages_on(disk) -> int:
    return sum(space["pages"] for space in survey(disk)["namespaces"])


def same(one, other) -> None:
    assert one["text"] == other["text"]
    assert np.abs(np.array(one["logprobs"]) - np.array(other["logprobs"])).max() <= 5e-5


def test_server(smollm2_path, tmp_path):
    """One server after the other on one directory: the first is killed, the second gets SIGTERM and no time to clean up."""
    disk = tmp_path / "disk"
    a = words(1)
    with serving(smollm2_path, tmp_path / "first.log", disk=disk) as server:
        cold, own = server.complete(a), server.complete(a)
        assert (cold["cached"], own["cached"]) == (0, HIT)
        server.post("/reset_prefix_cache")
        cpu = server.complete(a)
        assert cpu["cached"] == HIT
        same(cpu, own)
        assert server.metric("vllm:external_prefix_cache_hits_total") == HIT
        assert server.metric("vllm:prompt_tokens_cached_by_source_total", source="host") == HIT
        for tenant in ("one", "two"):
            assert server.complete(a, cache_salt=tenant)["cached"] == 0, "of nobody else's"
            assert server.complete(a, cache_salt=tenant)["cached"] == HIT
        until(lambda: pages_on(disk) >= 3 * HIT // PAGE, "the pages of three tenants on disk", PATIENCE)
        server.end(signal.SIGKILL)

    with serving(smollm2_path, tmp_path / "second.log", disk=disk, policy=None) as server:
        found = server.complete(a)
        assert found["cached"] == HIT
        same(found, own)
        assert server.metric("vllm:prompt_tokens_cached_by_source_total", source="disk") == HIT
        # Before anything is computed: where that turns out to be faster than the disk, the disk is left alone.
        assert server.complete(a, cache_salt="one")["cached"] == HIT
        assert server.complete(a, cache_salt="three")["cached"] == 0

        def used() -> float:
            server.complete(words(9, 40))  # counters are looked at while the engine steps
            return server.metric("kvstrata:used_total", tier="disk")

        until(lambda: used() >= 2 * HIT // PAGE, "our counters on vLLM's page", PATIENCE)
        two_streams(server)
        server.end(signal.SIGTERM)

    assert pages_on(disk) > 3 * HIT // PAGE
    assert not survey(disk)["problems"]


def two_streams(server) -> None:
    """Twenty requests each, with shared and private prefixes; every fifth client leaves in the middle; the rest get what they got
    alone."""
    shared = words(50, 640)
    alone = server.complete(shared + words(60, 60), cache_salt="x")
    before = server.metric("vllm:request_success_total")
    failures: list[str] = []
    done: list[str] = []

    def stream(number: int) -> None:
        for turn in range(20):
            private = turn % 3 == 2
            prompt = words(1000 * number + turn, 700) if private else shared + words(60 if turn % 3 else 100 * number + turn, 60)
            try:
                if turn % 5 == 4:
                    server.complete(prompt, new=200, timeout=0.4)
                else:
                    answer = server.complete(prompt, cache_salt="x" if turn % 3 else None)
                    done.append(answer["finish"])
                    if not private and turn % 3 and answer["text"] != alone["text"]:
                        failures.append(f"{number}.{turn}: {answer['text']!r} and not {alone['text']!r}")
            except TimeoutError:
                pass  # the client that left
            except (urllib.error.HTTPError, ConnectionError) as error:
                failures.append(f"{number}.{turn}: {error}")

    threads = [threading.Thread(target=stream, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:3]
    assert done == ["length"] * 32
    until(lambda: server.metric("vllm:num_requests_running") == 0, "who left to be gone", PATIENCE)
    assert server.metric("vllm:request_success_total") >= before + 32
