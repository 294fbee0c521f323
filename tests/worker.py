"""A process that serves prompts from a directory that others use too, and says in JSON what it met."""

import argparse
import json
import random
import sys
import time
from collections import Counter

from guest import Guest
from pages import prompt, tiny_layout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--cap", type=int, required=True)
    parser.add_argument("--number", type=int, default=0, help="which of the workers this is")
    parser.add_argument("--pages", type=int, default=0, help="ends when so many were saved; 0: after --seconds")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument(
        "--prompts", type=int, default=0, help="so many different ones, the same for all workers; 0: always new ones"
    )
    parser.add_argument("--width", type=int, default=16, help="of the layout: a page has 256 times as many bytes")
    parser.add_argument("--round", type=int, default=0, help="how often there were workers before")
    options = parser.parse_args()
    print("ready", flush=True)
    sys.stdin.readline()

    guest = Guest(options.root, options.cap, cpu=64, blocks=8, layout=tiny_layout(width=options.width))
    print("open", flush=True)
    sys.stdin.readline()
    dice = random.Random(f"{options.number} {options.round}")
    totals: Counter[str] = Counter()
    on_disk: set[str] = set()
    mine: Counter[int] = Counter()  # pages of each prompt that this process computed at some time
    end = time.monotonic() + options.seconds
    unique = (1 + options.number + 100 * options.round) << 24
    while totals["saved"] < options.pages if options.pages else time.monotonic() < end:
        seed = dice.randrange(options.prompts) if options.prompts else unique
        unique += 1
        answer = guest.serve(prompt(3 + seed % 6, seed))
        totals.update(requests=1, hit=answer.hit, wrong=answer.wrong, saved=answer.saved)
        totals["of_others"] += max(0, answer.hit - mine[seed])  # found, and never computed here
        mine[seed] = max(mine[seed], answer.hit + answer.saved)
        if totals["requests"] % 4 == 0:
            guest.cache.flush(60)
        for event in guest.cache.drain_events():
            if event.tier == "disk":
                totals[event.kind] += 1
                (on_disk.add if event.kind == "stored" else on_disk.discard)(event.key.hex())
    guest.cache.flush(60)
    on_disk |= {event.key.hex() for event in guest.cache.drain_events() if (event.tier, event.kind) == ("disk", "stored")}
    guest.cache.check_integrity()
    stats = guest.cache.stats()
    report = {name: stats[name] for name in ("disk", "corrupt", "unreadable", "spills_dropped", "timeouts")}
    print(json.dumps({**totals, **report, "on_disk": sorted(on_disk) if options.prompts else [], "closed": guest.close()}))


if __name__ == "__main__":
    main()
