"""The namespaces of one cache: by adapter and tenant, under its identity, its directory's secret, and the version of its pages."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from kvstrata.identity import Identity, private_identity
from kvstrata.version import new_version, read_version, write_version

__all__ = ["Spaces"]

MOST_KNOWN = 65536  # tenants may come without end


class Spaces:
    """Where `root` is a directory, the version of the pages is what it says there. Raises VersionError."""

    def __init__(self, identity: Identity | None, root: str, group: bool) -> None:
        identity = identity or private_identity()
        self._root, self._group = root, group
        self._base = identity.namespace()  # of the model, whatever its version
        self.identity = dataclasses.replace(identity, version=read_version(root, self._base)) if root else identity
        self.secret = b""
        self.describe: Callable[[bytes, str], None] | None = None  # told of every namespace that is new
        self._known: dict[tuple[Any, Any], bytes] = {}
        self._changing = threading.RLock()  # over identity and _known: no namespace of before is kept after a bump

    def of(self, adapter: Any = None, tenant: str | None = None) -> bytes:
        """The 32-byte namespace. Raises TypeError for an adapter or a tenant that cannot be."""
        key = (getattr(adapter, "digest", adapter), tenant)
        space = self._known.get(key)
        if space is not None:
            return space
        with self._changing:
            space = self.identity.namespace(adapter, tenant, self.secret)  # checks both
            if self.describe is not None and self._root:
                self.describe(space, self.identity.describe(adapter, tenant, self.secret))
            if len(self._known) > MOST_KNOWN:
                self._known.clear()
            self._known[key] = space
        return space

    def outdate(self) -> list[bytes]:
        """Another version from now on; the namespaces that were in use until now. Raises VersionError, and nothing changed."""
        with self._changing:
            if self._root:
                write_version(self._root, self._base, new_version(), self._group)
            self.identity = dataclasses.replace(self.identity, version=new_version())
            known, self._known = self._known, {}
            self.of()
            return list(known.values())
