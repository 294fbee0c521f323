"""For pytest, in vLLM's own tests: their helpers make our connector, and wrap it where they would make a mock of none."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from vllm_sim import write_model

made: list[Any] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kvstrata-folder", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    folder: Path = config.getoption("--kvstrata-folder")
    shutil.rmtree(folder, ignore_errors=True)
    model = write_model(folder / "model")
    from tests.v1.kv_connector.unit import utils

    config.addinivalue_line("markers", "cpu_test: vLLM's")
    make_config, make_scheduler, make_mock = utils.create_vllm_config, utils.create_scheduler, utils.create_mock_connector

    def create_vllm_config(**options: Any) -> Any:
        settings = {
            "kvc2.cpu_memory_size_GB": "20MB",
            "kvc2.disk_path": str(folder / f"disk{len(made)}"),
            "kvc2.disk_size_GB": "20MB",
        }
        ours = {
            "model": str(model),
            "dtype": "float32",
            "kv_connector": "KVStrataConnector",
            "kv_connector_module_path": "kvstrata.connect.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"config": {"attn.page_size": 16, "kvc2.disk_reserve_free_GB": 0, **settings}},
        }
        return make_config(**{"max_model_len": 4000, **options, **ours})

    def create_scheduler(*given: Any, **options: Any) -> Any:
        scheduler = make_scheduler(*given, **options)
        made.append(scheduler.connector)
        return scheduler

    def create_mock_connector() -> Mock:
        mock = Mock(wraps=made[-1])
        mock.get_external_cache_hit_sources.side_effect = make_mock().get_external_cache_hit_sources.side_effect
        return mock

    utils.ModelConfig = partial(utils.ModelConfig, skip_tokenizer_init=True)  # the tiny model has none
    utils.create_vllm_config, utils.create_scheduler = create_vllm_config, create_scheduler
    utils.create_mock_connector = create_mock_connector


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What the tests leave of ours is whole, and nothing of it is held."""
    for connector in made:
        if connector._scheduler is not None:
            cache = connector.scheduler.cache
            connector.shutdown()
            assert cache.stats()["open_leases"] == 0
    made.clear()
