"""`kvstrata bench`: what the cache costs, beside the physical limit measured in the same run."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstrata.cli.demo import DTYPES, model_folder
from kvstrata.cli.directory import JsonOption
from kvstrata.cli.refusal import Refused

if TYPE_CHECKING:
    from kvstrata.bench.report import Row

bench = typer.Typer(help="Measure what the cache costs, beside the limit of this machine in the same run.", no_args_is_help=True)

FolderOption = Annotated[Path | None, typer.Option(help="Where the disk tier lies meanwhile. Default: a temporary directory.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Rounds; each takes our figure and the limit once.")]


@bench.command()
def match(
    page_size: Annotated[list[int] | None, typer.Option(help="Tokens of a page; repeatable. Default: 16 and 256.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of the prompts that are found.")] = 131072,
    pages: Annotated[int, typer.Option(min=1, help="Held on the device, 4 KiB of memory each.")] = 1_000_000,
    rounds: RoundsOption = 30,
    folder: FolderOption = None,
    json_output: JsonOption = False,
) -> None:
    """Finding, pinning, publishing and evicting pages, against comparing and hashing their tokens."""
    from kvstrata.bench import match as benchmark

    sizes = tuple(page_size or (16, 256))
    for size in sizes:
        _check_page_size(size, tokens)
        if tokens // size * (2 * benchmark.PROMPTS + 2) > pages:
            least = tokens // size * (2 * benchmark.PROMPTS + 2)
            raise Refused(f"--pages {pages} cannot hold the prompts that are looked for: use at least {least}, or fewer --tokens")
    _show(lambda say: benchmark.measure(sizes, tokens, pages, rounds, _folder(folder), say), json_output)


@bench.command()
def copy(
    mib: Annotated[int, typer.Option(min=1, max=4096, help="MiB of pages moved at a time; seven times as much is used.")] = 128,
    rounds: RoundsOption = 15,
    json_output: JsonOption = False,
) -> None:
    """Pages between the device pool and the CPU tier, against memcpy on one thread."""
    from kvstrata.bench import copy as benchmark

    _show(lambda say: benchmark.measure(benchmark.CASES, mib, rounds, say), json_output)


@bench.command()
def disk(
    mib: Annotated[int, typer.Option(min=4, max=8192, help="MiB of pages moved at a time; four times as much lies on disk.")] = 256,
    rounds: RoundsOption = 10,
    folder: FolderOption = None,
    json_output: JsonOption = False,
) -> None:
    """Pages from a cold disk to the device and back, against raw requests of equal size and depth."""
    from kvstrata.bench import disk as benchmark

    _show(lambda say: benchmark.measure(mib, rounds, _folder(folder), say), json_output)


@bench.command()
def ttft(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a Hugging Face model. Default: SmolLM2-135M-Instruct, fetched once.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    tokens: Annotated[int, typer.Option(min=1, help="Of the prompt that are cached; 7 more are not.")] = 2048,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 256,
    rounds: RoundsOption = 10,
    folder: FolderOption = None,
    json_output: JsonOption = False,
) -> None:
    """CPU seconds to the first token of a real model, on one thread, against a forward pass over KV states already in place."""
    from kvstrata.bench import ttft as benchmark

    _check_page_size(page_size, tokens)
    path = str(model_folder(model))
    _show(lambda say: benchmark.measure(path, _dtype(dtype), tokens, page_size, rounds, _folder(folder), say), json_output)


def _dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise Refused(f"--dtype {dtype} is not known: use one of {', '.join(DTYPES)}")
    return dtype


def _check_page_size(size: int, tokens: int) -> None:
    from kvstrata.layout import check_page_size

    try:
        check_page_size(size)
    except ValueError as error:
        raise Refused(f"--page-size: {error}") from error
    if tokens % size:
        raise Refused(f"--tokens {tokens} is not a multiple of the page size {size}: nothing would be found of the rest")


def _folder(folder: Path | None) -> str | None:
    if folder is None:
        return None
    if not folder.is_dir():
        raise Refused(f"--folder {folder} is no directory: make it first")
    return str(folder)


def _show(measure: Callable[[Callable[[str], None]], "Iterator[Row]"], json_output: bool) -> None:
    """Prints rows as they come, or all at the end as JSON; wrong data is the end of it."""
    from kvstrata.bench.report import WrongData, environment
    from kvstrata.cli.tables import console

    out, notes = console(), console(stderr=True)
    found = environment()
    rows: list[dict[str, Any]] = []
    if not json_output:
        out.print(_machine(found), soft_wrap=True)
    try:
        for row in measure(lambda text: notes.print(f"  {text}", soft_wrap=True)):
            rows.append(row.as_dict())
            if not json_output:
                out.print(_line(rows[-1]), soft_wrap=True)
    except WrongData as error:
        raise Refused(f"the benchmark failed: {error}") from error
    except (MemoryError, OSError, RuntimeError, ValueError) as error:
        raise Refused(f"the benchmark cannot run here: {error}") from error
    if json_output:
        typer.echo(json.dumps({"rows": rows, "machine": found}))


FIXED = ("case", "value", "unit", "limit", "ratio", "spread", "ratio_spread", "rounds")


def _line(row: dict[str, Any]) -> str:
    parameters = ", ".join(f"{name} {value}" for name, value in row.items() if name not in FIXED)
    low, high = row["spread"]
    figure = f"{row['case']:12} {row['value']:>9} {row['unit']:5} ({low} to {high})"
    if row["limit"] is None:
        return f"{figure:60} {'':30} {parameters}"
    low, high = row["ratio_spread"]
    return f"{figure:60} {row['ratio']:>6} x the limit {row['limit']} ({low} to {high})  {parameters}"


def _machine(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{found['processor']}, {found['cores']} cores, load {found['load_average']}; {versions}"
