"""`kvstrata demo`: on a tiny model at all page sizes, on the real one as people run it, and what it says when things are wrong."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvstrata.cache import Event
from kvstrata.cli import main
from kvstrata.demo.conductor import Conductor
from kvstrata.demo.journal import Journal
from kvstrata.demo.sizes import ANSWER_TOKENS, make_sizes
from kvstrata.demo.spec import Spec
from kvstrata.demo.view import View

CASES = {"cold": None, "gpu": "gpu", "cpu": "cpu", "disk": "disk", "restart": "disk"}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model with a tokenizer of its own."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from kvstrata.demo.prompts import alice

    folder = tmp_path_factory.mktemp("tiny")
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces.train_from_iterator([alice()], trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces)
    torch.manual_seed(7)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=16384, eos_token_id=None, bos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def demo(*arguments: object) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of the command."""
    command = [sys.executable, "-m", "kvstrata", "demo", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    return done.returncode, done.stdout, done.stderr


def check_report(report: dict[str, Any], page_size: int) -> None:
    """Everything the demo promises but speed."""
    assert list(report) == ["model", "prompt_tokens", "shared_tokens", "page_size", "rows", "identical"]
    assert report["identical"] is True
    assert report["page_size"] == page_size
    shared = report["shared_tokens"]
    pages = shared // page_size * page_size
    assert shared >= 2048
    assert shared - pages <= 32
    assert [row["case"] for row in report["rows"]] == list(CASES)
    for row in report["rows"]:
        assert set(row) == {"case", "ttft_s", "cpu_s", "computed_tokens", "reused_tokens", "speedup", "output_sha256"}
        assert row["ttft_s"] > 0
        assert row["cpu_s"] > 0
        reused = row["reused_tokens"]
        assert set(reused) == {"gpu", "cpu", "disk"}
        tier = CASES[row["case"]]
        if tier is None:
            assert sum(reused.values()) == 0
            assert row["computed_tokens"] == report["prompt_tokens"]
            assert row["speedup"] == 1
        else:
            assert reused[tier] >= pages
            assert sum(reused.values()) == reused[tier]
            assert row["computed_tokens"] <= 64
    hashes = {row["case"]: row["output_sha256"] for row in report["rows"]}
    assert hashes["cold"] == hashes["cpu"] == hashes["disk"] == hashes["restart"]  # the same question


@pytest.mark.slow
def test_the_real_model(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    status, out, err = demo("--json")
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    report = json.loads(out)
    check_report(report, 256)
    assert report["model"] == "SmolLM2-135M-Instruct"
    cold, *hits = report["rows"]
    assert cold["output_sha256"] != hits[0]["output_sha256"]  # the other question
    for row in hits:
        assert row["computed_tokens"] + sum(row["reused_tokens"].values()) == report["prompt_tokens"]
        assert row["cpu_s"] <= cold["cpu_s"] / 12, row
    assert not list(tmp_path.glob("kvstrata-demo-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "dtype"), [(16, "float32"), (64, "bfloat16"), (1024, "float32")])
def test_page_sizes(tiny_model: Path, page_size: int, dtype: str) -> None:
    status, out, err = demo("--model", tiny_model, "--json", "--page-size", page_size, "--dtype", dtype)
    assert (status, err) == (0, "")
    check_report(json.loads(out), page_size)


@pytest.mark.slow
def test_a_config_file(tiny_model: Path, tmp_path: Path) -> None:
    """Its disk_path is used and kept; a second run is cold again, because its pages are another tenant's."""
    disk = tmp_path / "disk"
    config = tmp_path / "config.yaml"
    config.write_text(f"attn: {{page_size: 32, chunk_size: 64}}\nkvc2: {{disk_path: {disk}, disk_size_GB: 0.2}}\n")
    for _ in range(2):
        status, out, err = demo("--model", tiny_model, "--json", "--config", config)
        assert (status, err) == (0, "")
        check_report(json.loads(out), 32)
    assert list(disk.glob("shelves/*/seg-*"))


@pytest.mark.slow
def test_on_a_terminal_or_not(tiny_model: Path) -> None:
    status, out, err = demo("--model", tiny_model)
    assert (status, err) == (0, "")
    for case in (*CASES, "off", "others"):
        assert f"\n {case} " in out or f"\n  {case} " in out
    assert "attn.page_size" in out  # the settings in effect
    assert out.count(" yes") == 5


@pytest.mark.slow
def test_terminated_it_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstrata", "demo", "--json", "--model", str(tiny_model)]
    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)})
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until = time.monotonic() + 120
    while not list(tmp_path.glob("kvstrata-demo-*/shelves")) and time.monotonic() < until:
        time.sleep(0.02)
    started = children.read_text().split()
    assert started
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert not list(tmp_path.glob("kvstrata-demo-*"))
    assert not any(Path(f"/proc/{child}").exists() for child in started)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--page-size", "100"], "attn.page_size is 100, but must be a power of two from 16 to 1024"),
        (["--page-size", "many"], "--page-size"),
        (["--dtype", "int8"], "use one of float32, bfloat16, float16"),
        (["--device", "tpu"], "use auto, cpu or cuda"),
        (["--model", "/nowhere"], "There is no model in /nowhere"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml cannot be read"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvstrata", "demo", "--json", *arguments])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capfd.readouterr()
    assert stopped.value.code == 2
    assert out == ""
    assert sentence in err
    assert err.startswith("kvstrata: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kvc2: {gpu_only: true}", "leave it out"),
        ("kvc2: {disk_paht: /tmp}", "did you mean 'kvc2.disk_path'"),
        ("kvc2: {disk_path: /proc/nothing}", "kvc2.disk_path"),
    ],
)
def test_wrong_config_files(
    text: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["kvstrata", "demo", "--config", str(tmp_path / "config.yaml")])
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capfd.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


# --- the parts


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("prompt", [2050, 2067, 2111, 4112])
def test_sizes_push_one_tier_at_a_time(page_size: int, prompt: int) -> None:
    sizes = make_sizes(prompt, page_size)
    text = (prompt - 1) // page_size
    assert sizes.gpu_pages * page_size >= prompt + ANSWER_TOKENS
    for length in sizes.past_gpu:
        assert -(-length // page_size) == sizes.gpu_pages  # needs every row
    for length in sizes.past_cpu:
        assert length <= sizes.gpu_pages * page_size
    assert max(sizes.past_cpu) == sizes.past_gpu[0]  # the GPU pool is filled again on the way
    assert sizes.cpu_pages >= text + sizes.past_gpu[0] // page_size  # the first push leaves the text in the CPU tier
    assert sum(length // page_size for length in sizes.past_cpu) >= sizes.cpu_pages  # the second one does not
    assert sizes.disk_pages >= sizes.cpu_pages + sum(length // page_size for length in sizes.past_cpu)
    assert sizes.other_tokens < 12000 or prompt > 4096  # the text is long enough


def stored(tier: str, source: str, *keys: bytes) -> list[Event]:
    return [Event(0, 0.0, "stored", tier, source, depth, key) for depth, key in enumerate(keys, 1)]


def removed(tier: str, *keys: bytes) -> list[Event]:
    return [Event(0, 0.0, "removed", tier, tier, 0, key) for key in keys]


def test_the_journal_follows_pages() -> None:
    a, b = b"a", b"b"
    journal = Journal()
    cold = stored("gpu", "gpu", a, b, b"question") + stored("cpu", "gpu", a, b) + stored("disk", "cpu", a, b)
    journal.begin()
    journal.add(cold)
    journal.learn(cold, 2)
    assert journal.pages == [a, b]
    assert journal.faults_before("gpu") == []
    assert journal.faults_before("cpu") == ["2 of 2 pages are still in gpu"]

    journal.begin()
    assert journal.faults_after("gpu") == []
    journal.add(removed("gpu", a))
    assert journal.faults_before("gpu") == ["1 of 2 pages are not in gpu"]
    assert journal.faults_before("cpu") == ["1 of 2 pages are still in gpu"]
    journal.add(removed("gpu", b))
    assert journal.faults_before("cpu") == []

    journal.begin()
    journal.add(stored("gpu", "cpu", a))
    assert journal.faults_after("cpu") == ["1 pages came to gpu from cpu, not 2"]
    journal.add(stored("gpu", "cpu", b))
    assert journal.faults_after("cpu") == []
    assert journal.moved("gpu", "cpu") == 2

    journal.add(removed("gpu", a, b) + removed("cpu", a, b))
    assert journal.faults_before("disk") == []
    journal.begin()
    journal.add(stored("cpu", "disk", a, b) + stored("gpu", "cpu", a))
    assert journal.faults_after("disk") == ["1 pages came to gpu from cpu, not 2"]
    journal.add(stored("gpu", "gpu", b))  # computed after all
    assert len(journal.faults_after("disk")) == 2


SPEC = Spec(model="m", device="cpu", dtype="float32", config=None, overrides={}, own_disk=True, tenant=None)


def told(output_of: dict[str, list[int]], faults: list[str]) -> Iterator[list[dict[str, Any]]]:
    """What the two processes of a run tell."""
    setup = {
        "kind": "setup",
        "model": "m",
        "prompt_tokens": 2067,
        "shared_tokens": 2050,
        "page_size": 256,
        "pages": 8,
        "banner": ["x"],
    }

    def case(name: str, question: int) -> list[dict[str, Any]]:
        reused = {tier: 2048 if CASES[name] == tier else 0 for tier in ("gpu", "cpu", "disk")}
        output = output_of.get(name, [question])
        row = {
            "case": name,
            "ttft_s": 8.0 if name == "cold" else 0.5,
            "cpu_s": 1.0,
            "computed_tokens": 2067 - sum(reused.values()),
            "reused_tokens": reused,
            "output_sha256": hashlib.sha256(str(output).encode()).hexdigest(),
        }
        done = {"computed": 3, "disk": 5}
        return [
            {"kind": "begin", "case": name, "said": "Why?"},
            {"kind": "progress", "done": done, "answer": "Because."},
            {"kind": "row", "row": row, "question": question, "output": output, "faults": faults if name == "disk" else []},
        ]

    reference = [
        message
        for question in (0, 1)
        for message in (
            {"kind": "begin", "case": "off", "said": "Why?"},
            {"kind": "reference", "question": question, "output": [question]},
        )
    ]
    first = [setup, *reference, *case("cold", 0), *case("gpu", 1), *case("cpu", 0), *case("disk", 0)]
    yield [*first, {"kind": "closed", "saved": True, "pages": ["aa", "bb"]}]
    yield [setup, *case("restart", 0), {"kind": "closed", "saved": True, "pages": ["aa", "bb"]}]


@pytest.mark.parametrize(
    ("outputs", "faults", "expected"),
    [
        ({}, [], []),
        ({"cpu": [9]}, [], ["cpu: the text differs from that with the cache off"]),
        ({}, ["2 pages came late"], ["disk: 2 pages came late"]),
    ],
)
@pytest.mark.parametrize("terminal", [True, False])
def test_the_conductor(
    outputs: dict[str, list[int]], faults: list[str], expected: list[str], terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = told(outputs, faults)
    started: list[Spec] = []

    def process(self: Conductor, spec: Spec) -> list[dict[str, Any]]:
        started.append(spec)
        return next(runs)

    monkeypatch.setattr(Conductor, "_process", process)
    console = Console(record=True, width=80, force_terminal=terminal, file=StringIO())
    view = View(console)
    conductor = Conductor(SPEC, view)
    with view:
        conductor.run()
    view.result(conductor.report, conductor.same, proven=not conductor.faults)
    assert [(spec.restart, spec.pages) for spec in started] == [(False, ()), (True, ("aa", "bb"))]
    assert conductor.faults == expected
    assert conductor.report["identical"] is (not outputs)
    assert [row["speedup"] for row in conductor.report["rows"]] == [1, 16, 16, 16, 16]
    text = console.export_text()
    assert text.count(" yes ") == 5 - len(outputs)
    assert text.count(" NO ") == len(outputs)
    assert ("event log" in text) is (not expected)


@pytest.mark.parametrize(
    ("outputs", "faults", "status"), [({}, [], 0), ({"restart": [9]}, [], 1), ({}, ["a page was computed twice"], 1)]
)
def test_what_differs_is_the_exit_status(
    outputs: dict[str, list[int]],
    faults: list[str],
    status: int,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = told(outputs, faults)
    monkeypatch.setattr(Conductor, "_process", lambda self, spec: next(runs))
    monkeypatch.setattr(sys, "argv", ["kvstrata", "demo", "--model", str(tiny_model), "--json"])
    try:
        main()
        ended = 0
    except SystemExit as end:
        ended = int(end.code or 0)
    assert ended == status
    told_out, told_err = capsys.readouterr()
    assert json.loads(told_out)["identical"] is (not outputs)
    assert bool(told_err.strip()) is bool(status)
