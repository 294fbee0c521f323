"""`kvstrata explain`: how much of a prompt a cache directory holds, namespace by namespace."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata.cli.directory import ConfigOption, JsonOption, PathArgument, cache_directory, patiently, read_tokens


def explain(
    tokens: Annotated[Path, typer.Option(help="A file with the prompt's token ids: JSON, or numbers between spaces.")],
    path: PathArgument = None,
    config: ConfigOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show how many pages of a prompt are on disk, in each namespace, and why not more.

    Where the closest prompt there goes on otherwise, with both tokens; and in what the identity of other namespaces differs.

    What is in the memory of a running process only it can tell: PrefixCache.explain(tokens).
    """
    from kvstrata.explaining import pages_on_disk

    folder = cache_directory(path, config)
    prompt = read_tokens(tokens, "--tokens")
    found = patiently(lambda: pages_on_disk(folder, prompt))
    if json_output:
        typer.echo(json.dumps({"path": str(folder), "tokens": len(prompt), "namespaces": found}))
        return
    _show(found, len(prompt), str(folder))


def _show(found: list[dict[str, Any]], tokens: int, folder: str) -> None:
    from kvstrata.cli.tables import console, table

    out = console()
    out.print(f"{tokens:,} tokens against {folder}")
    rows = table("namespace", "model", "dtype", "page", "pages there", "tokens there")
    for space in found:
        there, size = space["pages_of_prompt"], space["page_size"]
        rows.add_row(
            space["namespace"][:12],
            space["model"] or "(not described)",
            space["dtype"] or "?",
            str(size),
            f"{there:,} of {space['of']:,}",
            f"{there * size:,}",
        )
    out.print(rows)
    for number, space in enumerate(found):
        name, parts = space["namespace"][:12], space["differs"]
        if parts is not None:
            there = f"{parts['cached']} in the closest prompt that is on disk"
            out.print(f"{name}: token {parts['position']} is {parts['asked']}, and {there}", soft_wrap=True)
        if number and space["unlike"]:
            out.print(f"{name} is not {found[0]['namespace'][:12]}: other {', '.join(space['unlike'])}", soft_wrap=True)
    if not any(space["pages_of_prompt"] for space in found):
        out.print("no namespace holds the beginning of this prompt: other tokens, another model or dtype, or evicted")
