"""What power losses, bad memory and people do to files between two processes."""

import os
import random
from pathlib import Path

BLOCK = 4096


def harm(root: Path, dice: random.Random) -> None:
    """Damages some segments: flipped bits, lost, swapped and foreign blocks, files that were cut, removed, copied or filled."""
    for _ in range(dice.randrange(1, 8)):
        paths = sorted(root.glob("shelves/*/seg-*.kvs"))
        if not paths:
            return
        path = dice.choice(paths)
        data = bytearray(path.read_bytes())
        blocks = max(1, len(data) // BLOCK)
        # Half of it hits the header block and the table.
        one, other = (dice.randrange(min(2, blocks) if dice.random() < 0.5 else blocks) * BLOCK for _ in range(2))
        how = dice.randrange(10)
        if how < 4:
            for _ in range(8):
                if data:
                    data[min(one + dice.randrange(BLOCK), len(data) - 1)] ^= 1 << dice.randrange(8)
        elif how == 4:
            data[one : one + BLOCK] = bytes(len(data[one : one + BLOCK]))
        elif how == 5:
            data[one : one + BLOCK], data[other : other + BLOCK] = data[other : other + BLOCK], data[one : one + BLOCK]
        elif how == 6:
            theirs = dice.choice(paths).read_bytes()[other : other + BLOCK]
            data[one : one + len(theirs)] = theirs
        elif how == 7:
            del data[dice.randrange(len(data) + 1) :]
        elif how == 8:
            data[:] = dice.choice(paths).read_bytes()
        else:
            data[:] = dice.choice([b"", dice.randbytes(len(data)), bytes(len(data))])
        file = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(file, data)
        os.close(file)
    if dice.random() < 0.1:
        dice.choice(paths).unlink()
