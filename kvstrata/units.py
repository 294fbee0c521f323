"""Sizes and ages as people write and read them. A plain number is a size in GB, 10^9 bytes; a text may name its unit."""

import math
import re

UNITS = {"B": 1} | {f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)}
UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", 1)}
SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)
AGE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*(s|min|m|h|d|w)\s*", re.IGNORECASE)
SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
GB = 10**9


def gigabytes(value: object) -> float:
    """A size in GB: 10, 0.5, "10", "64GiB", "512MB", "10 gb". Raises ValueError for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        size = float(value)
    elif isinstance(value, str) and (found := SIZE.fullmatch(value)) and (found[2] or "GB").upper() in UNITS:
        size = float(found[1]) * UNITS[(found[2] or "GB").upper()] / GB
    else:
        raise ValueError(f"{value!r} is not a size")
    if not math.isfinite(size) or size < 0:
        raise ValueError(f"{value!r} is not a size")
    return size


def in_bytes(size: float) -> int:
    """Whole bytes of a size in GB; exact for sizes below 2 PB."""
    return round(size * GB)


def readable(size: int) -> str:
    """Bytes for people, in powers of 1000 and three digits: 1530000000 -> '1.53 GB'."""
    for power, letter in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if size >= 0.9995 * 1000**power:
            return f"{size / 1000**power:.3g} {letter}B"
    return f"{size} bytes"


def seconds(value: str) -> float:
    """An age in seconds: "90s", "30min", "12h", "7d", "2w". Raises ValueError for anything else."""
    if not (found := AGE.fullmatch(value)):
        raise ValueError(f"{value!r} is not an age")
    return float(found[1]) * SECONDS[found[2].lower()]


def ago(age: float) -> str:
    """An age for people, in its largest whole unit: 7300 -> '2 h ago'."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= size:
            return f"{int(age / size)} {unit} ago"
    return "just now"


def counted(number: int, noun: str) -> str:
    """1 page, 2 pages, 1,000 pages."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
