"""LoRA adapters by content: digested in a thread of their own, so that no step of the scheduler touches their files."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from kvstrata.fingerprint import adapter_digest

__all__ = ["Adapters", "Digest"]

log = logging.getLogger("kvstrata")


class Digest:
    """Of one request's adapter. `done`: whether `value` is final; `value`: 32 bytes, None where the adapter cannot be named."""

    __slots__ = ("done", "value")

    def __init__(self, value: bytes | None = None, done: bool = False) -> None:
        self.value = value
        self.done = done


NO_ADAPTER = Digest(done=True)


class Adapters:
    """What vLLM has loaded of an adapter is what its files held when it was first used. Where they change later without a reload in
    place, nobody can tell which content computed what, so requests with that adapter are not cached any more."""

    def __init__(self, digest: Callable[[str], bytes] = adapter_digest) -> None:
        self._digest = digest
        self._first: dict[tuple[int, str, str], bytes | None] = {}
        self._told: set[str] = set()
        self._asked: queue.SimpleQueue[tuple[Any, Digest] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, adapter: Any) -> Digest:
        """For a LoRARequest or None. Returns at once; the files are looked at for every request."""
        if adapter is None:
            return NO_ADAPTER
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstrata-adapters", daemon=True)
            self._thread.start()
        answer = Digest()
        self._asked.put((adapter, answer))
        return answer

    def close(self) -> None:
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            adapter, answer = asked
            try:
                answer.value = self._look(adapter)
            except Exception as error:  # whatever it is, this adapter is not cached, and the thread lives on
                if adapter.lora_path not in self._told:
                    log.warning("requests with LoRA adapter %s are not cached: %s", adapter.lora_name, error)
                    self._told.add(adapter.lora_path)
            answer.done = True

    def _look(self, adapter: Any) -> bytes | None:
        key = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        found = self._digest(adapter.lora_path)
        if key not in self._first or adapter.load_inplace:
            self._first[key] = found
        elif self._first[key] not in (None, found):
            log.warning(
                "requests with LoRA adapter %s are not cached any more: %s changed after it was loaded; load it in place, or under "
                "another id",
                adapter.lora_name,
                adapter.lora_path,
            )
            self._first[key] = None
        return self._first[key]
