"""What must be equal on the model's side for two pages of the same tokens to be interchangeable, as a 32-byte namespace.

A namespace is SHA-256 over typed, length-prefixed fields: the weights, the config (RoPE included), the dtype, planes, page size and
layout tag of the rows, the part of the model they belong to, and per lease the adapter (by content) and the tenant. Names and paths
are never part of it: the same weights at another path are the same model, other weights under the same name are not.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstrata.fingerprint import Fingerprint, FingerprintTask, adapter_digest, weights_fingerprint
from kvstrata.layout import PageLayout, Plane
from kvstrata.secret import SecretError, root_secret

__all__ = [
    "Fingerprint",
    "FingerprintTask",
    "Identity",
    "SecretError",
    "adapter_digest",
    "canonical_json",
    "config_digest",
    "private_identity",
    "root_secret",
    "weights_fingerprint",
]

NAMESPACE_DOMAIN = "kvstrata/namespace/1"
CONFIG_DOMAIN = "kvstrata/config/1"
TENANT_DOMAIN = "kvstrata/tenant/1"

# Keys of a config that say where a model was found or how it is run, never what its KV states are. Every other key counts, known or
# not. The dtype of the KV states is a field of its own.
VOLATILE_KEYS = {
    "_name_or_path",
    "_commit_hash",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
    "_experts_implementation",
    "_experts_implementation_internal",
    "architectures",
    "attn_implementation",
    "bos_token_id",
    "decoder_start_token_id",
    "dtype",
    "eos_token_id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


@dataclass(frozen=True)
class Identity:
    """One model's KV states in one layout. `label` is for people and never hashed."""

    weights: Fingerprint
    config: bytes  # 32 bytes, of config_digest
    dtype: str
    page_size: int
    planes: tuple[Plane, ...]
    tag: str
    part: str = ""  # where rows hold only a part of the model's states: which, for example "rank 0 of 2"
    label: str = field(default="", compare=False)
    version: str = ""  # see version.py

    @classmethod
    def of(cls, config: Any, layout: PageLayout, weights: Fingerprint, *, part: str = "", label: str = "") -> "Identity":
        """`config`: the model's config, as for `config_digest`."""
        return cls(weights, config_digest(config), layout.dtype, layout.page_size, layout.planes, layout.tag, part, label)

    @property
    def persistent(self) -> bool:
        """Whether another process can have the same identity. Pages of a private one never go to disk."""
        return self.weights.kind != "private"

    def namespace(self, adapter: Any = None, tenant: str | None = None, secret: bytes = b"") -> bytes:
        """The 32-byte namespace of pages computed with `adapter` for `tenant`.

        `adapter`: None, the 32-byte digest of its content, or an object with such a `digest`; a name is refused, since the adapter
        behind it may change. `tenant`: None for pages that all share, else any string, which needs the root-local `secret`
        (`root_secret`), so that nobody who knows the tenants can guess their namespaces. Raises TypeError or ValueError.
        """
        digest = _adapter(adapter)
        if tenant is None:
            owner = None
        elif not isinstance(tenant, str):
            raise TypeError(f"tenant must be a string or None, not {type(tenant).__name__}")
        elif len(secret) < 16:
            raise ValueError("a tenant needs the secret of the cache directory, see root_secret(disk_path)")
        else:
            owner = hmac.digest(secret, _encode((TENANT_DOMAIN, tenant)), "sha256")
        fields: tuple[Any, ...] = (
            NAMESPACE_DOMAIN,
            ("weights", self.weights.kind, self.weights.digest),
            ("config", self.config),
            ("dtype", self.dtype),
            ("page_size", self.page_size),
            ("planes", tuple((p.layer, p.name, p.dtype, p.shape, p.offset, p.bytes) for p in self.planes)),
            ("tag", self.tag),
            ("part", self.part),
            ("adapter", digest),
            ("tenant", owner),
        )
        if self.version:
            fields += (("version", self.version),)
        return hashlib.sha256(_encode(fields)).digest()

    def describe(self, adapter: Any = None, tenant: str | None = None, secret: bytes = b"") -> str:
        """What the namespace of the same arguments stands for, as a line of JSON in clear; never the tenant or the secret."""
        digest = _adapter(adapter)
        return canonical_json(
            {
                "format": 1,
                "namespace": self.namespace(adapter, tenant, secret).hex(),
                "model": self.label,
                "weights": {"kind": self.weights.kind, "digest": self.weights.digest.hex()},
                "config": self.config.hex(),
                "dtype": self.dtype,
                "page_size": self.page_size,
                "layout": self.tag,
                "part": self.part,
                "layers": len({plane.layer for plane in self.planes}),
                "planes": sorted({f"{p.name} {p.dtype} {list(p.shape)}" for p in self.planes}),
                "bytes_per_token": sum(plane.bytes_per_token for plane in self.planes),
                "adapter": None if digest is None else digest.hex(),
                "tenant": tenant is not None,
                "version": self.version,
            }
        )


def private_identity() -> Identity:
    """For a cache without weights: equal to no other, so its pages are found by nobody else and are never on disk."""
    return Identity(Fingerprint("private", secrets.token_bytes(32)), bytes(32), "", 0, (), "")


def config_digest(config: Any) -> bytes:
    """32 bytes over everything in a config that may change KV states: all its keys but VOLATILE_KEYS.

    `config`: a transformers config (anything with `to_dict`) or a dict. The two differ for one model, because transformers adds its
    defaults: keep to one of them. Raises TypeError for values that JSON cannot hold.
    """
    if isinstance(config, Mapping):
        values = _durable(config, keep_none=True)
    elif hasattr(config, "to_dict"):
        # A transformers config holds all its settings, and one that is None acts like one that is missing. Left out, so that a
        # version that adds such a setting still finds the pages of the version before.
        values = _durable(config.to_dict(), keep_none=False)
    else:
        raise TypeError(f"a config must be a dict or have to_dict(), not {type(config).__name__}")
    return hashlib.sha256(_encode((CONFIG_DOMAIN, canonical_json(values)))).digest()


def _durable(config: Mapping[str, Any], *, keep_none: bool) -> dict[str, Any]:
    """The keys of a config that count. Configs within it (they name their model_type) are treated alike."""
    return {
        key: _durable(value, keep_none=keep_none) if isinstance(value, Mapping) and "model_type" in value else value
        for key, value in config.items()
        if key not in VOLATILE_KEYS and (keep_none or value is not None)
    }


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and without spaces, ASCII only: equal text for equal values. Tuples become lists, keys their text.
    Raises TypeError for what JSON cannot hold."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        plain = {str(key): _plain(inner) for key, inner in value.items()}
        if len(plain) != len(value):
            raise TypeError("two keys of a mapping have the same text")
        return plain
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(inner) for inner in value), key=lambda one: json.dumps(one, sort_keys=True))
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{value!r} is of the kind {type(value).__name__}, which JSON cannot hold")


def _adapter(adapter: Any) -> bytes | None:
    if adapter is None:
        return None
    digest = adapter if isinstance(adapter, bytes) else getattr(adapter, "digest", None)
    if not isinstance(digest, bytes) or len(digest) != 32:
        raise TypeError(
            f"adapter {adapter!r} must be the 32-byte digest of its content or have one as .digest, see adapter_digest(folder): "
            "what a name stands for may change"
        )
    return digest


def _encode(value: Any) -> bytes:
    """A value as bytes that no other value has: a letter for its type, the length as 8 bytes, the payload."""
    match value:
        case None:
            kind, payload = b"n", b""
        case bytes():
            kind, payload = b"b", value
        case str():
            kind, payload = b"s", value.encode("utf-8", "surrogatepass")
        case int():
            kind, payload = b"i", str(int(value)).encode()
        case tuple():
            kind, payload = b"t", b"".join(map(_encode, value))
        case _:
            raise TypeError(f"{value!r} has no encoding")
    return kind + len(payload).to_bytes(8, "little") + payload
