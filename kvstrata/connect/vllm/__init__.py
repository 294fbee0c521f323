"""vLLM with three tiers: its block pool is the hot one, kvstrata adds CPU and disk. See docs/vllm.md.

    --kv-transfer-config '{"kv_connector": "KVStrataConnector", "kv_role": "kv_both"}'

Importing this package imports neither torch nor vLLM; naming KVStrataConnector does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata.connect.vllm.connector import KVStrataConnector

__all__ = ["KVStrataConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVStrataConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstrata.connect.vllm.connector import KVStrataConnector

    return KVStrataConnector
