"""F4: an option that is misspelt, or that does nothing where it is set, is told with the nearest valid name.

That every valid one has its effect is in interface/test_s07_effects.py.
"""

from typing import Any

import pytest
from settings_kit import refusal, resolve
from tool_kit import kvstrata

from kvstrata.cache import PrefixCache
from kvstrata.config import KEYS, ConfigError


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ({"kvc2": {"disk_pth": "/x"}}, "unknown key 'kvc2.disk_pth': did you mean 'kvc2.disk_path'?"),
        ({"kvc2": {"cpu_memory_size": 1}}, "unknown key 'kvc2.cpu_memory_size': did you mean 'kvc2.cpu_memory_size_GB'?"),
        ({"kvc2": {"CPU_MEMORY_SIZE_GB": 1}}, "did you mean 'kvc2.cpu_memory_size_GB'?"),
        ({"kvc2": {"page_size": 16}}, "unknown key 'kvc2.page_size': did you mean 'attn.page_size'?"),
        ({"page_size": 16}, "unknown key 'page_size': did you mean 'attn.page_size'?"),
        ({"kvc3": {"gpu_only": True}}, "unknown key 'kvc3': did you mean 'kvc2'?"),
        ({"max_batchsize": 1}, "did you mean 'max_batch_size'?"),
        ({"#": 1}, "valid are attn.page_size, "),
        ({7: 1}, "unknown key 7"),
    ],
)
def test_unknown_keys_name_the_nearest(wrong: Any, near: str) -> None:
    assert near in refusal(wrong)
    assert near in refusal(None, wrong)


def test_unknown_variables_name_the_nearest() -> None:
    assert refusal(KVSTRATA_KVC2_DISKPATH="/x") == (
        "unknown environment variable KVSTRATA_KVC2_DISKPATH: did you mean 'KVSTRATA_KVC2_DISK_PATH'?"
    )
    assert "KVSTRATA_ATTN_PAGE_SIZE" in refusal(KVSTRATA_PAGE_SIZE="16")


@pytest.mark.parametrize("key", KEYS)
def test_every_key_misspelt_is_told_by_its_name(key: str) -> None:
    section, _, name = key.rpartition(".")
    for wrong in (name[:-1], name.upper(), name + "s", name.replace("_", "-")):
        if wrong in (name, ""):
            continue
        written = f"{section}.{wrong}" if section else wrong
        assert f"unknown key {written!r}: did you mean {key!r}?" in refusal({written: 1})
        variable = "KVSTRATA_" + written.replace(".", "_").upper()
        if variable != "KVSTRATA_" + key.replace(".", "_").upper():
            right = "KVSTRATA_" + key.replace(".", "_").upper()
            assert f"unknown environment variable {variable}: did you mean {right!r}?" == refusal(**{variable: "1"})


def test_nothing_is_opened_with_an_unknown_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}
    with pytest.raises(ConfigError, match=r"did you mean 'kvc2\.disk_path'"):
        PrefixCache.open(model, {"kvc2.disk_pth": "/x"}, say=None)
    monkeypatch.setenv("KVSTRATA_KVC2_CPU_MEMORY_GB", "4")
    with pytest.raises(ConfigError, match="did you mean 'KVSTRATA_KVC2_CPU_MEMORY_SIZE_GB'"):
        PrefixCache.open(model, say=None)


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({"kvc2.disk_size_GB": 5}, "kvc2.disk_size_GB: not used, since kvc2.disk_path is not set"),
        ({"kvc2.gpu_only": True, "kvc2.disk_path": "/x"}, "kvc2.disk_path: not used, since kvc2.gpu_only is true"),
        ({"kvc2.gpu_only": True, "kvc2.cpu_memory_size_GB": 1}, "kvc2.cpu_memory_size_GB: not used, since kvc2.gpu_only is true"),
    ],
)
def test_a_valid_key_that_the_chosen_tiers_do_not_use(settings: dict[str, Any], warning: str) -> None:
    assert resolve(settings).warnings == (warning,)
    assert f"warning: {warning}" in resolve(settings).banner()


@pytest.mark.parametrize(
    ("line", "wrong", "command"),
    [
        ("frobnicate", "'frobnicate'", "kvstrata"),
        ("config shw", "'shw'", "kvstrata config"),
        ("doctor --sesions 3", "--sesions", "kvstrata doctor"),
        ("doctor --seq-len many", "--seq-len", "kvstrata doctor"),
        ("explain", "--tokens", "kvstrata explain"),
    ],
)
def test_commands_and_options_that_are_wrong(line: str, wrong: str, command: str) -> None:
    """One line that names it and says where help is; the words between are typer's."""
    ended = kvstrata(*line.split())
    assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith("kvstrata: ")
    assert wrong in ended.err
    assert ended.err.endswith(f" (see {command} --help)\n")


@pytest.mark.parametrize("group", [(), ("config",)])
def test_a_group_alone_prints_its_help(group: tuple[str, ...]) -> None:
    ended = kvstrata(*group)
    assert (ended.status, ended.err) == (0, "")
    assert "Usage: " in ended.out
