"""Tensor parallelism: one decision for all ranks, one row for all slices, what ranks hold alike kept once."""

import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import find_on_disk, flip
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm_sim import BLOCK, LAYERS, PAGE, PATIENCE, WIDTH, tokens_of

from kvstrata.connect.vllm.plan import Report

PROMPT = tokens_of(6 * PAGE + 1)
SLICE = PAGE * WIDTH * 4  # bytes of a rank's layer in a page


def test_f3_the_log_says_whose_the_bytes_are(make_sim, tmp_path, caplog):
    caplog.set_level(logging.INFO, "kvstrata")
    make_sim(disk=tmp_path / "disk", ranks=4, replicas=2)
    lines = [line for line in caplog.messages if "of all 4 ranks together, " in line and " for each of 2 parts, " in line]
    assert [line.split()[0] for line in lines] == ["kvc2.cpu_memory_size_GB", "kvc2.disk_size_GB"]


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2), (4, 2), (8, 8)])
def test_every_rank_gets_its_own(make_sim, tmp_path, ranks, replicas):
    sim = make_sim(disk=tmp_path / "disk", ranks=ranks, replicas=replicas)
    assert sim.serve(PROMPT) == (0, 0)
    sim.scheduler.reset_prefix_cache()
    assert sim.serve(PROMPT) == (0, 6 * PAGE)
    sim.settle()
    again = make_sim(disk=tmp_path / "disk", ranks=ranks, replicas=replicas)
    assert again.serve(PROMPT) == (0, 6 * PAGE)


def test_e10_replicated_states_are_kept_once(make_sim, tmp_path):
    """E10. Eight ranks that hold the same latent: its bytes are there once, and every rank can load them. Sharded: eight slices."""
    once = make_sim(disk=tmp_path / "once", ranks=8, replicas=8)
    once.serve(PROMPT)
    sharded = make_sim(disk=tmp_path / "sharded", ranks=8, replicas=1)
    name = sharded.add(PROMPT)
    sharded.run()
    assert once.cache.layout.row_bytes == SLICE * len(LAYERS)
    assert sharded.cache.layout.row_bytes == SLICE * len(LAYERS) * 8
    once.settle()
    sharded.settle()
    assert len(find_on_disk(tmp_path / "once", sharded.page_bytes(name, 2, layer=1, part=0))) == 1
    for part in range(8):
        assert len(find_on_disk(tmp_path / "sharded", sharded.page_bytes(name, 2, layer=1, part=part))) == 1
    saved = [rank.connector.worker._blocks.writes(rank.number) for rank in once.ranks]
    assert saved == [True] + [False] * 7


@pytest.mark.parametrize("part", [0, 1])
def test_one_damaged_slice_is_a_miss_for_all(make_sim, tmp_path, part):
    sim = make_sim(disk=tmp_path / "disk", ranks=2)
    name = sim.add(PROMPT)
    sim.run()
    sim.settle()
    ((path, at),) = find_on_disk(tmp_path / "disk", sim.page_bytes(name, 3, layer=1, part=part))
    sim.connector.shutdown()
    flip(path, at + SLICE - 1)
    again = make_sim(disk=tmp_path / "disk", ranks=2)
    assert again.serve(PROMPT) == (0, 3 * PAGE)
    assert again.cache.stats()["corrupt"] == 1


def test_a_rank_that_cannot_load(make_sim, monkeypatch):
    """The others have loaded; the request is computed again all the same."""
    sim = make_sim(ranks=2)
    sim.serve(PROMPT)
    sim.scheduler.reset_prefix_cache()
    monkeypatch.setattr(sim.ranks[1].connector.worker._copier, "copy", lambda what, up: 1 / 0)
    assert sim.serve(PROMPT) == (0, 0)
    assert sim.cache.stats()["copy_failures"] == 1


def test_a_rank_that_cannot_save(make_sim, monkeypatch):
    """Half a page is no page."""
    sim = make_sim(ranks=2)
    monkeypatch.setattr(sim.ranks[1].connector.worker, "_copy", lambda plan, copy, up: False)
    sim.serve(PROMPT)
    monkeypatch.undo()
    sim.scheduler.reset_prefix_cache()
    assert sim.serve(PROMPT) == (0, 0)


def test_reports_of_ranks_come_one_by_one(make_sim):
    """A page is findable when the last rank has reported, however the reports are put together."""
    sim = make_sim(ranks=2)
    sim.add(PROMPT)
    output = sim.scheduler.schedule()
    (save,) = output.kv_connector_metadata.saves
    results = [sim._execute(rank, output) for rank in sim.ranks]
    first, second = (one.kv_connector_output.kv_connector_worker_meta for one in results)
    assert first.ended == second.ended == {save.ticket: (1, True)}
    assert first.aggregate(second).ended == {save.ticket: (2, True)}
    assert first.aggregate(Report({save.ticket: (1, False)})).ended == {save.ticket: (2, False)}
    scheduler = sim.connector.scheduler
    scheduler.reported(first)
    assert sim.cache.stats()["cpu"]["stored"] == 0
    scheduler.reported(second)
    assert sim.cache.stats()["cpu"]["stored"] == 6


@pytest.mark.slow
def test_workers_in_processes_of_their_own(make_sim, tmp_path):
    """Two worker roles in two processes map the slab and carry out the plans of one scheduler role, as under vLLM's executor: what
    one
    pair saved another pair loads, each its own slice."""
    sim = make_sim(ranks=2)
    name = sim.add(PROMPT)
    output = sim.scheduler.schedule()
    table = sim.scheduler.kv_cache_manager.get_block_ids(name)[0]
    known = sim._expected(sim._requests[name])
    content = [[sim._rows(known, layer, part) for layer in range(2)] for part in range(2)]
    told = _in_processes(tmp_path, sim, output.kv_connector_metadata, table, content)
    assert [one["ended"] for one in told] == [{str(output.kv_connector_metadata.saves[0].ticket): [1, True]}] * 2
    scheduler = sim.connector.scheduler
    for one in told:
        scheduler.reported(Report({int(ticket): tuple(what) for ticket, what in one["ended"].items()}))
    sim.abort(name)
    sim.scheduler.reset_prefix_cache()
    name = sim.add(PROMPT)
    output = sim.scheduler.schedule()
    (load,) = output.kv_connector_metadata.loads
    told = _in_processes(tmp_path, sim, output.kv_connector_metadata, load.blocks.tolist(), None)
    for part, one in enumerate(told):
        assert one["loaded"] == [name]
        assert one["bad"] == []
        found = np.load(one["content"])
        for layer in range(2):
            assert np.array_equal(found[layer][: 6 * PAGE], content[part][layer][: 6 * PAGE])
    sim.abort(name)
    ended = KVConnectorOutput(finished_recving={name}, kv_connector_worker_meta=Report({load.ticket: (2, True)}))
    sim.scheduler.update_from_output(output, ModelRunnerOutput([], {}, kv_connector_output=ended))
    assert not sim.scheduler.requests


def _in_processes(folder, sim, plan, table, content):
    """Both ranks carry out a plan, each in a process of its own; what they tell."""
    running, told = [], []
    for rank in range(2):
        given = folder / f"rank{rank}.pickle"
        own = content[rank] if content else None
        given.write_bytes(pickle.dumps((sim.connector._blocks, rank, plan, table, own, sim.kv.num_blocks)))
        command = [sys.executable, str(Path(__file__).parent / "rank_process.py"), str(given)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for process in running:
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors[-2000:]
        told.append(json.loads(output.splitlines()[-1]))
    assert len(table) * BLOCK >= 6 * PAGE
    return told
