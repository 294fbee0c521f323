"""`kvstrata config`: the settings in effect and where each came from; what settings there are."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata.cli.refusal import Refused

__all__ = ["config", "reference"]

config = typer.Typer()


@config.callback(invoke_without_command=True)
def _options(context: typer.Context) -> None:
    """What the settings are, and what they come to."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@config.command()
def show(
    file: Annotated[
        Path | None, typer.Option("--config", help="A config.yaml; without one: defaults and KVSTRATA_* variables.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model folder, or its config.json: adds what the settings come to for its pages.")
    ] = None,
    device: Annotated[str, typer.Option(help="With --model: cpu, or cuda[:index].")] = "cpu",
    json_output: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
) -> None:
    """Print every setting, its value, and where it came from."""
    from kvstrata.cli.tables import console, table
    from kvstrata.config import KEYS, ConfigError, Settings

    check_device(device)
    try:
        settings = Settings.load(file)
        banner = None if model is None else _banner(settings, model, device)
    except (ConfigError, ValueError, RuntimeError) as error:
        raise Refused(str(error)) from error
    if json_output:
        values = {key: {"value": settings.value(key), "origin": settings.origin(key)} for key in KEYS}
        typer.echo(json.dumps({"settings": values, "passed_over": settings.others, "effect": banner}))
        return
    rows = table("key", "value", "unit", "origin")
    for column in rows.columns:
        column.justify = "left"
    for key, field in KEYS.items():
        value = settings.value(key)
        shown = _text(value) if value is not None else "none" if key == "kvc2.disk_path" else "automatic"
        rows.add_row(key, shown, field.json_schema_extra["unit"], settings.origin(key))
    out = console()
    out.print(rows)
    if settings.others:
        out.print(f"{', '.join(settings.others)}: not used, these sections are KTransformers' own")
    for line in banner or ():
        out.print(line)
    if banner is None:
        out.print("--model FOLDER tells what they come to in bytes, pages and tokens; `kvstrata config reference`, what each does")


def _banner(settings: Any, model: Path, device: str) -> list[str]:
    from kvstrata.machine import only_looking
    from kvstrata.opening import ACTIVATIONS, device_free

    layout = model_layout(model, settings.attn.page_size)
    with only_looking(settings.disk_root):
        told: list[str] = settings.resolve(layout, device=device, device_free_bytes=device_free(device, ACTIVATIONS)).banner()
    return told


def check_device(device: str) -> None:
    """Raises Refused for what --device cannot be."""
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", device):
        raise Refused(f"--device {device!r} is not known: use cpu or cuda[:index]")


def model_layout(model: Path, page_size: int) -> Any:
    """The layout of a model's pages, from its folder or its config.json, in its own dtype. Raises ValueError or Refused."""
    from kvstrata.layout import PageLayout

    place = model / "config.json" if model.is_dir() else model
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refused(f"--model {model}: no config.json can be read there ({error})") from error
    if not isinstance(content, dict):
        raise Refused(f"--model {model}: its config.json holds {type(content).__name__}, but must hold an object with the config")
    dtype = content.get("dtype") or content.get("torch_dtype") or "float32"
    return PageLayout.from_config(content, page_size=page_size, dtype=dtype)


@config.command(name="reference")
def print_reference() -> None:
    """Print what settings there are, as docs/configuration.md has it."""
    typer.echo(reference(), nl=False)


HEAD = """# Settings

What `config.yaml` may hold, section by section; the part of a key before the dot is its section. Later sources win: defaults, file,
environment, arguments in Python. This page is printed by `kvstrata config reference`; `kvstrata config show` prints the values in
effect, and where each came from.

| key | type | unit | default | effect | allowed |
|---|---|---|---|---|---|
"""
TAIL = """
Each key can be set by a variable: `KVSTRATA_ATTN_PAGE_SIZE` for `attn.page_size`. A size (`_GB`) is a number of 10^9 bytes, which
may be fractional, or a text such as "64GiB" or "512MB". An unknown key is an error that names the nearest one.
"""


def reference() -> str:
    """The reference page, in Markdown."""
    from kvstrata.config import KEYS

    rows = []
    for key, field in KEYS.items():
        more = field.json_schema_extra
        default = "none" if field.default is None else _text(field.default)
        rows.append(f"| `{key}` | {_kind(key, field)} | {more['unit']} | {default} | {field.description} | {more['allowed']} |\n")
    return HEAD + "".join(rows) + TAIL


def _kind(key: str, field: Any) -> str:
    if key.endswith("_GB"):
        return "size"
    text = str(field.annotation)
    for kind, name in (("bool", "true or false"), ("float", "number"), ("int", "whole number"), ("str", "text")):
        if kind in text:
            return name
    raise AssertionError(key)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
