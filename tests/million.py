"""Directories with very many pages, written as documented: sound tables, and slots of a few prompts; other slots are holes."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from disk_format import GOLDEN, MASK, PAGE, RECORD_BYTES, Record, Shape, checksum, page_keys, round_up, segment_header, slot

CHAIN = 256  # pages of a prompt
EPOCH = 0x1234567890ABCDEF

_RECORDS = np.dtype(
    [("state", "<u4"), ("uses", "<u4"), ("key", "V32"), ("parent", "V32"), ("space", "V32"), ("last_use", "<u4"), ("zero", "V4")]
)
assert _RECORDS.itemsize == RECORD_BYTES - 16


class Prompt(NamedTuple):
    """One whose pages are really there."""

    tokens: np.ndarray
    rows: list[bytes]


def write_directory(
    root: Path, shape: Shape, space: bytes, pages: int, prompts: list[Prompt], *, first: int | None = None, slots: int = 32768
) -> None:
    """A shelf without an owner: `pages` pages in chains of CHAIN, used in random order, in full segments of `slots` slots (the last
    may have fewer). The chains from page `first` on, by default in the middle, are the prompts, of CHAIN pages each."""
    shelf = root / "shelves" / f"{1:016x}"
    shelf.mkdir(parents=True, mode=0o700)
    for folder in (root, root / "shelves"):
        folder.chmod(0o700)
    table = _chains(space, pages)
    first = pages // CHAIN // 2 * CHAIN if first is None else first
    for number, prompt in enumerate(prompts):
        at = first + number * CHAIN
        keys = page_keys(space, prompt.tokens, shape.page_size)
        table["key"][at : at + CHAIN] = np.frombuffer(b"".join(keys), "V32")
        table["parent"][at : at + CHAIN] = np.frombuffer(b"".join([space, *keys[:-1]]), "V32")
    for number, begin in enumerate(range(0, pages, slots)):
        records = table[begin : begin + slots]
        epoch = EPOCH + number
        path = shelf / f"seg-{number + 1:06}.kvs"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(file, shape.segment_bytes(len(records)))
        os.pwrite(file, segment_header(shape, len(records), epoch) + _sealed(records, epoch), 0)
        for at in range(max(begin, first), min(begin + len(records), first + len(prompts) * CHAIN)):
            prompt = prompts[(at - first) // CHAIN]
            page = (at - first) % CHAIN
            one = table[at]
            record = Record(*(bytes(one[name]) for name in ("key", "parent", "space")), int(one["uses"]), int(one["last_use"]))
            tokens = prompt.tokens[page * shape.page_size : (page + 1) * shape.page_size]
            where = shape.slots_offset(len(records)) + (at - begin) * shape.slot_bytes
            os.pwrite(file, slot(shape, record, tokens, prompt.rows[page]), where)
        os.close(file)


def _chains(space: bytes, pages: int) -> np.ndarray:
    """Records of pages whose keys are random: who asks for none of them cannot tell."""
    table = np.zeros(pages, _RECORDS)
    table["state"] = PAGE
    table["key"] = np.frombuffer(np.random.default_rng(7).bytes(32 * pages), "V32")
    table["parent"][1:] = table["key"][:-1]
    table["parent"][::CHAIN] = np.frombuffer(space, "V32")
    table["space"] = np.frombuffer(space, "V32")
    chains = -(-pages // CHAIN)
    table["last_use"] = 1_700_000_000 + np.random.default_rng(8).permutation(chains)[np.arange(pages) // CHAIN]
    return table


def _sealed(records: np.ndarray, epoch: int) -> bytes:
    bodies, size = records.tobytes(), _RECORDS.itemsize
    sealed = np.zeros(len(records), [("body", f"V{size}"), ("since", "V8"), ("sum", "<u8")])
    sealed["body"] = np.frombuffer(bodies, f"V{size}")
    sealed["sum"] = [checksum(bodies[at * size : (at + 1) * size], epoch ^ (at * GOLDEN & MASK)) for at in range(len(records))]
    return sealed.tobytes().ljust(round_up(len(records) * RECORD_BYTES), b"\0")
