"""The process that is killed: it serves prompts through a PrefixCache, readers beside it, and says what was acknowledged."""

import os
import random
import threading
import traceback
from collections.abc import Callable

import numpy as np
from support import PAGE, begin, serve

from crash.scene import PROMPTS, Scene, tokens_of
from kvstrata.cache import CacheFull, PrefixCache

STORED, REMOVED = b"+", b"-"
REPORT_BYTES = 33  # a sign and a key: less than a pipe takes at once
READERS = 2
_one_version = threading.Lock()  # what a lease holds is compared with what its namespace says: it must not change in between


def write_until_killed(scene: Scene, number: int, report: int) -> None:
    """Reports to the pipe `report` each page that the disk tier stored or removed, after it did."""
    dice = random.Random(f"{scene.seed} {scene.life} {number}")
    while True:
        cache = scene.open()
        over = threading.Event()
        readers = [threading.Thread(target=_read, args=(cache, over, dice.random())) for _ in range(READERS)]
        for reader in readers:
            reader.start()
        for _ in range(dice.randrange(5, 80)):
            _patiently(serve, cache, dice.randrange(PROMPTS))
            if dice.random() < 0.3:
                cache.flush(30)
            if not scene.roomy and dice.random() < 0.03:
                _purge(cache, dice)
            _report(cache, report)
        over.set()
        for reader in readers:
            reader.join()
        cache.close()  # a part of the kills falls in here, and in the opening above
        _report(cache, report)


def _patiently(request: Callable[[PrefixCache, np.ndarray], object], cache: PrefixCache, number: int) -> None:
    """Tries a request again while the others and the copies of their pages hold the pool."""
    while True:
        try:
            request(cache, tokens_of(number))
            return
        except CacheFull:
            cache.flush(0.01)


def _purge(cache: PrefixCache, dice: random.Random) -> None:
    """Drops one prompt's pages and what continues them, those of the model, or everything; or declares all outdated."""
    how = dice.randrange(8)
    if how < 5:
        cache.purge(tokens=tokens_of(dice.randrange(PROMPTS))[: dice.randrange(1, 4) * PAGE], timeout=1.0)
    elif how == 5:
        cache.purge(cache.namespace(), timeout=1.0)
    elif how == 6:
        cache.purge(everything=True, timeout=1.0)
    else:
        with _one_version:
            cache.bump_version(timeout=1.0)


def _report(cache: PrefixCache, report: int) -> None:
    for event in cache.drain_events():
        if event.tier == "disk":
            os.write(report, (STORED if event.kind == "stored" else REMOVED) + event.key)


def _look(cache: PrefixCache, tokens: np.ndarray) -> None:
    with _one_version:
        begin(cache, tokens).release()


def _read(cache: PrefixCache, over: threading.Event, seed: float) -> None:
    """Leases prompts and looks at every byte it is given."""
    dice = random.Random(seed)
    try:
        while not over.is_set():
            _patiently(_look, cache, dice.randrange(PROMPTS))
    except BaseException:
        traceback.print_exc()
        os._exit(4)
