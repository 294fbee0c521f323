"""B8: a file system smaller than the limit: pages are dropped, nothing is raised, reads go on, and writing resumes by itself."""

import logging

from file_systems import MIB, fill_up, tmpfs
from support import PAGE, crowd, prompt, serve, settle, until


def test_full_and_room_again(open_cache, tmp_path, caplog):
    caplog.set_level(logging.INFO, "kvstrata")

    def lines():
        return [record.getMessage() for record in caplog.records if "disk tier" in record.getMessage()]

    with tmpfs(tmp_path / "full", 64 * MIB) as root:
        cache = open_cache(gpu=8, cpu=10, disk=root / "cache", disk_bytes=1 << 30, retry_after=0.05)
        filler = fill_up(root)
        for seed in range(8):
            assert serve(cache, prompt(5, seed)).hit == 0
            settle(cache)
        stats = cache.stats()
        assert stats["spills_dropped"] > 0
        assert stats["disk"]["pages"] == 0
        assert stats["disk"]["health"].startswith("no new pages: ")
        until(lines, "a line about it")
        filler.unlink()

        def saved():
            serve(cache, prompt(5, 100))
            settle(cache)
            return cache.stats()["disk"]["pages"] >= 5

        until(saved, "writing to resume, without a restart")
        crowd(cache, 4)
        fill_up(root)
        for seed in range(200, 208):
            assert serve(cache, prompt(5, 100)).hit == 4 * PAGE, "what is there is read all the while"
            settle(cache)
            serve(cache, prompt(5, seed))
            settle(cache)
            crowd(cache, 2, seed=seed * 10)
        until(lambda: any("works again" in line for line in lines()), "a line that it works")
        assert sum("no new pages" in line for line in lines()) == 1, lines()
        cache.close()
