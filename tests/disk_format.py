"""The disk format as docs/disk-format.md has it, read and written without the core: what one makes the other must understand.

Only the documentation was followed here, and XXH3 comes from the system's library; needs neither the extension nor torch.
"""

import ctypes
import ctypes.util
import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK = 4096
RECORD_BYTES = 128
PAGE, FREE = 0x45474150, 0x45455246
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
_SEGMENT = struct.Struct("<8sIIIIQQQIIQQQ")
_SLOT = struct.Struct("<8sIIIIIIQQ32s32s32sI")
_RECORD = struct.Struct("<II32s32s32sI4x")  # what its checksum covers; then when it was used since, and how often

_library = ctypes.CDLL(ctypes.util.find_library("xxhash") or "libxxhash.so.0")
_xxh3 = _library.XXH3_64bits_withSeed
_xxh3.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64]
_xxh3.restype = ctypes.c_uint64


def checksum(data: bytes, seed: int = 0) -> int:
    return int(_xxh3(data, len(data), seed))


def round_up(value: int, to: int = BLOCK) -> int:
    return -(-value // to) * to


def page_key(space: bytes, parent: bytes, tokens: np.ndarray) -> bytes:
    """Of a page without media. The parent of a first page is the namespace."""
    content = np.asarray(tokens, "<i4").tobytes()
    return hashlib.sha256(
        b"kvstrata.page.1\0" + space + parent + struct.pack("<I", len(content) // 4) + content + struct.pack("<I", 0)
    ).digest()


def page_keys(space: bytes, tokens: np.ndarray, page_size: int) -> list[bytes]:
    """The keys of all full pages of a prompt."""
    keys, parent = [], space
    for at in range(0, len(tokens) - page_size + 1, page_size):
        parent = page_key(space, parent, tokens[at : at + page_size])
        keys.append(parent)
    return keys


@dataclass(frozen=True)
class Shape:
    """`planes`: the bytes of each, in order; they fill the row."""

    page_size: int
    planes: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return sum(self.planes)

    @property
    def row_stride(self) -> int:
        return round_up(self.row_bytes)

    @property
    def header_bytes(self) -> int:
        media = max(16, self.page_size // 8)
        return round_up(192 + 16 * len(self.planes) + 4 * self.page_size + 36 * media + 8)

    @property
    def slot_bytes(self) -> int:
        return self.header_bytes + self.row_stride

    @property
    def layout(self) -> int:
        at, pairs = 0, b""
        for size in self.planes:
            pairs += struct.pack("<QQ", at, size)
            at += size
        return checksum(pairs)

    def slots_offset(self, slots: int) -> int:
        return BLOCK + round_up(slots * RECORD_BYTES)

    def segment_bytes(self, slots: int) -> int:
        return self.slots_offset(slots) + slots * self.slot_bytes


class Record(NamedTuple):
    key: bytes
    parent: bytes
    space: bytes
    uses: int = 0
    last_use: int = 0


def segment_header(shape: Shape, slots: int, epoch: int) -> bytes:
    block = _SEGMENT.pack(
        b"KVSTRATA",
        1,
        shape.page_size,
        len(shape.planes),
        shape.header_bytes,
        shape.row_bytes,
        shape.row_stride,
        shape.layout,
        slots,
        0,
        shape.slots_offset(slots),
        shape.segment_bytes(slots),
        epoch,
    ).ljust(BLOCK - 8, b"\0")
    return block + struct.pack("<Q", checksum(block))


def table(records: Sequence[Record], slots: int, epoch: int) -> bytes:
    """The record table: `records` in the first slots, the others free; padded."""
    free = struct.pack("<I", FREE).ljust(_RECORD.size, b"\0")
    parts = []
    for slot in range(slots):
        if slot < len(records):
            one = records[slot]
            body = _RECORD.pack(PAGE, one.uses, one.key, one.parent, one.space, one.last_use)
        else:
            body = free
        parts += [body, bytes(8), struct.pack("<Q", checksum(body, epoch ^ (slot * GOLDEN & MASK)))]
    return b"".join(parts).ljust(round_up(slots * RECORD_BYTES), b"\0")


def slot(shape: Shape, record: Record, tokens: np.ndarray, row: bytes) -> bytes:
    """Header and row of a page without media."""
    header = _SLOT.pack(
        b"KVSSLOT1",
        1,
        shape.header_bytes,
        shape.page_size,
        len(shape.planes),
        0,
        record.uses,
        shape.row_bytes,
        shape.layout,
        record.space,
        record.parent,
        record.key,
        record.last_use,
    ).ljust(192, b"\0")
    at = 0
    for size in shape.planes:
        header += struct.pack("<QQ", size, checksum(row[at : at + size]))
        at += size
    header += np.asarray(tokens, "<i4").tobytes()
    header = header.ljust(shape.header_bytes - 8, b"\0")
    return header + struct.pack("<Q", checksum(header)) + row.ljust(shape.row_stride, b"\0")


# --- reading


class Slot(NamedTuple):
    """A page that a table names."""

    path: Path
    number: int
    record: Record
    header: bytes
    row: bytes


class FoundSegment(NamedTuple):
    """`state`: "sound", "blank" (all zeros or no header block yet), "damaged". `damaged`: records whose checksum does not hold."""

    path: Path
    state: str
    slots: int
    damaged: int
    pages: list[Slot]


def read_segment(path: Path, shape: Shape) -> FoundSegment:
    """Every record of a segment, and the slots of those that name a page."""
    data = path.read_bytes()
    block = data[:BLOCK]
    if not any(block):
        return FoundSegment(path, "blank", 0, 0, [])
    fields = _SEGMENT.unpack_from(block.ljust(BLOCK, b"\0"))
    slots, epoch = fields[8], fields[12]
    if block != segment_header(shape, slots, epoch) or len(data) < shape.segment_bytes(slots):
        return FoundSegment(path, "damaged", 0, 0, [])
    damaged, pages = 0, []
    for number in range(slots):
        at = BLOCK + number * RECORD_BYTES
        body, sealed = data[at : at + _RECORD.size], int.from_bytes(data[at + 120 : at + 128], "little")
        state, *rest = _RECORD.unpack(body)
        if sealed != checksum(body, epoch ^ (number * GOLDEN & MASK)) or state not in (PAGE, FREE):
            damaged += 1
        elif state == PAGE:
            uses, key, parent, space, last_use = rest
            at = shape.slots_offset(slots) + number * shape.slot_bytes
            header, row = data[at : at + shape.header_bytes], data[at + shape.header_bytes :][: shape.row_bytes]
            pages.append(Slot(path, number, Record(key, parent, space, uses, last_use), header, row))
    return FoundSegment(path, "sound", slots, damaged, pages)


def read_directory(root: Path, shape: Shape) -> Iterator[FoundSegment]:
    for path in sorted(root.glob("shelves/*/seg-*.kvs")):
        yield read_segment(path, shape)


def proven(shape: Shape, found: Slot) -> bool:
    """The slot holds the page that its record names, all of it."""
    header = found.header
    if len(header) < shape.header_bytes or int.from_bytes(header[-8:], "little") != checksum(header[:-8]):
        return False
    magic, version, size, page_size, planes, media, _, row_bytes, layout, space, parent, key, _ = _SLOT.unpack_from(header)
    expected = (b"KVSSLOT1", 1, shape.header_bytes, shape.page_size, len(shape.planes), 0, shape.row_bytes, shape.layout)
    if (magic, version, size, page_size, planes, media, row_bytes, layout) != expected:
        return False
    if (space, parent, key) != (found.record.space, found.record.parent, found.record.key):
        return False
    tokens_at = 192 + 16 * planes
    tokens = np.frombuffer(header, "<i4", page_size, tokens_at)
    if page_key(space, parent, tokens) != key:
        return False
    at = 0
    for plane, size in enumerate(shape.planes):
        if struct.unpack_from("<QQ", header, 192 + 16 * plane) != (size, checksum(found.row[at : at + size])):
            return False
        at += size
    return True
