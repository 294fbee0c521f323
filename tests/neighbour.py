"""A process told what to do, line by line: "serve PAGES SEED", "flush", "stats", "close". It answers in JSON."""

import json
import sys

from guest import Guest
from pages import prompt


def main() -> None:
    root, cap = sys.argv[1], int(sys.argv[2])
    guest = Guest(root, cap, cpu=24, blocks=12, retry_after=0.2)
    print(json.dumps(guest.cache.stats()), flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        answer: object = None
        if what == "serve":
            answer = guest.serve(prompt(*map(int, numbers)))._asdict()
        elif what == "flush":
            answer = guest.cache.flush(30)
        elif what == "stats":
            guest.cache.check_integrity()
            answer = guest.cache.stats()
        elif what == "close":
            answer = guest.close()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
