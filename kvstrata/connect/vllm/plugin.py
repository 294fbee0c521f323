"""What vLLM finds through the entry point `vllm.general_plugins`, in each of its processes: the connector's short name."""

__all__ = ["NAME", "TESTED", "check_version", "register"]

NAME = "KVStrataConnector"
TESTED = ("0.32",)  # releases of vLLM, without their last number, that the tests run against


def register() -> None:
    """Makes the connector known by its short name. vLLM calls it more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvstrata.connect.vllm", NAME)


def check_version(found: str, allow: bool) -> None:
    """Raises RuntimeError where `found` is a version of vLLM this connector was not tested with, unless `allow`."""
    if allow or ".".join(found.split("+")[0].split(".")[:2]) in TESTED:
        return
    raise RuntimeError(
        f"kvstrata's connector was tested with vLLM {', '.join(one + '.x' for one in TESTED)}, and this is vLLM {found}: install "
        'one of those, or set "allow_untested_vllm": true in kv_connector_extra_config to try it'
    )
