"""`kvstrata doctor`: whether this machine can hold the cache that is wanted, and what to do about it where not."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata.cli.directory import JsonOption
from kvstrata.cli.refusal import Refused

MARKS = {"ok": "ok", "warning": "warning", "error": "ERROR"}


def doctor(
    config: Annotated[Path | None, typer.Option(help="A config.yaml; without one: defaults and KVSTRATA_* variables.")] = None,
    model: Annotated[Path | None, typer.Option(help="A model folder, or its config.json: what its pages need.")] = None,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a session.")] = 4096,
    sessions: Annotated[int | None, typer.Option(min=1, help="Sessions to be kept. Default: max_batch_size.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda[:index].")] = "cpu",
    selftest: Annotated[bool, typer.Option("--selftest", help="Send pages through every tier and compare them.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Check software, memory and the disk tier's directory against what is to be served. Leaves a missing directory missing.

    Exit code 0 when all is well, 1 with warnings, 2 with errors.
    """
    from kvstrata.cli.config import check_device
    from kvstrata.config import ConfigError, Settings
    from kvstrata.doctor import Subject, examine, exit_code
    from kvstrata.machine import only_looking

    check_device(device)
    try:
        settings = Settings.load(config)
    except ConfigError as error:
        raise Refused(str(error)) from error
    layout = None if model is None else _layout(model, settings)
    subject = Subject(settings, layout, seq_len, sessions or settings.max_batch_size, device)
    rows: list[Any] = []
    with only_looking(settings.disk_root):
        for row in examine(subject):
            _tell(row, rows, json_output)
        for row in _selftest(subject, rows) if selftest else ():
            _tell(row, rows, json_output)
    if json_output:
        typer.echo(json.dumps({"rows": [row._asdict() for row in rows], "exit_code": exit_code(rows)}))
    raise typer.Exit(exit_code(rows))


def _layout(model: Path, settings: Any) -> Any:
    from kvstrata.cli.config import model_layout

    try:
        return model_layout(model, settings.attn.page_size)
    except ValueError as error:
        raise Refused(f"--model {model}: {error}") from error


def _selftest(subject: Any, rows: list[Any]) -> list[Any]:
    from kvstrata.doctor import Row

    usable = not any(row.check == "disk_path" and row.state == "error" for row in rows)
    root = subject.settings.disk_root if usable else None
    try:
        from kvstrata.selftest import selftest

        results = selftest(root, subject.device)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        return [Row("self-test", "error", f"could not run: {error}", "see the rows above")]
    return [
        Row(f"self-test: {tier}", "error" if trouble else "ok", trouble or "pages came back as they were")
        for tier, trouble in results.items()
    ]


def _tell(row: Any, rows: list[Any], json_output: bool) -> None:
    rows.append(row)
    if not json_output:
        _show(row)


def _show(row: Any) -> None:
    from kvstrata.cli.tables import console

    out = console()
    out.print(f"{MARKS[row.state]:8} {row.check}: {row.value}", soft_wrap=True)
    if row.fix:
        out.print(f"{'':8} -> {row.fix}", soft_wrap=True)
