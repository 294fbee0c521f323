"""Whether loading a prefix beats computing it again, from speeds that are measured while serving."""

__all__ = ["Speed", "worth_loading"]


class Speed:
    """A moving average of units per second; None until something was measured. Recent measurements count most."""

    def __init__(self, weight: float = 0.3) -> None:
        self.weight = weight
        self.value: float | None = None

    def measured(self, units: float, seconds: float, at_least: bool = False) -> None:
        """`at_least`: it took no longer than `seconds`, perhaps much less, so only a higher speed is learned from it."""
        speed = units / max(seconds, 1e-6)
        if self.value is None:
            self.value = None if at_least else speed
        elif speed > self.value or not at_least:
            self.value += self.weight * (speed - self.value)


def worth_loading(load_bytes: int, queued_bytes: int, bytes_per_s: float | None, tokens: int, tokens_per_s: float | None) -> bool:
    """Whether reading `load_bytes` behind `queued_bytes` is at most as slow as prefilling the `tokens` they hold. Unknown speeds:
    load, and learn.
    """
    if bytes_per_s is None or tokens_per_s is None:
        return True
    return (queued_bytes + load_bytes) / bytes_per_s <= tokens / tokens_per_s
