"""`kvstrata demo`: a real model answers from GPU, CPU and disk, and after a restart from disk again."""

import json
import secrets
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from kvstrata.cli.refusal import Refused

DTYPES = ("float32", "bfloat16", "float16")


def demo(
    model: Annotated[
        Path | None, typer.Option(help="Folder of a Hugging Face model. Default: SmolLM2-135M-Instruct, fetched once.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda. On the CPU one thread computes, or OMP_NUM_THREADS.")] = "auto",
    page_size: Annotated[int | None, typer.Option(help="Tokens of a page, a power of two from 16 to 1024. Default: 256.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    config: Annotated[
        Path | None, typer.Option(help="A config.yaml. Sizes of the tiers are the demo's own, whatever it says.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    process: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Watch a real model answer from GPU, CPU and disk, and after a restart from disk again.

    One text, two questions: the first answer is computed, the others continue from the cached states of the text, wherever other
    prompts have pushed them. Every answer is compared with that of a run with the cache off. Exit code 1 if one differs, or its
    pages came another way.
    """
    if process is not None:
        _run_process(process)
    if device not in ("auto", "cpu", "cuda") and not device.startswith("cuda:"):
        raise Refused(f"--device {device} is not known: use auto, cpu or cuda.")
    if dtype not in DTYPES:
        raise Refused(f"--dtype {dtype} is not known: use one of {', '.join(DTYPES)}.")
    with ExitStack() as stack:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is temporary is removed
        overrides, own_disk = _settings(config, page_size, stack)
        _show(model_folder(model), device, dtype, config, overrides, own_disk, json_output)


def _settings(config: Path | None, page_size: int | None, stack: ExitStack) -> tuple[dict[str, Any], bool]:
    """(settings beside the config file, whether the disk tier is temporary). Checks everything that needs no model."""
    from kvstrata.config import ConfigError, Settings

    overrides: dict[str, Any] = {} if page_size is None else {"attn.page_size": page_size}
    try:
        settings = Settings.load(config, overrides)
        own_disk = settings.kvc2.disk_path is None
        if own_disk:
            overrides["kvc2.disk_path"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstrata-demo-"))
        if settings.kvc2.gpu_only:
            raise Refused("kvc2.gpu_only is true, and the demo shows three tiers: leave it out.")
        Settings.load(config, overrides).check()
    except ConfigError as error:
        raise Refused(str(error)) from error
    return overrides, own_disk


def model_folder(model: Path | None) -> Path:
    """The folder that is meant, by default SmolLM2's. Raises Refused where there is no model."""
    from rich.console import Console

    from kvstrata.cli.progress import progress_bar
    from kvstrata.models import ModelError, check_model, smollm2_path

    try:
        if model is not None:
            check_model(model)
            return model
        with progress_bar(Console(stderr=True)) as report:
            return smollm2_path(progress=report)
    except ModelError as error:
        raise Refused(str(error)) from error


def _show(
    model: Path, device: str, dtype: str, config: Path | None, overrides: dict[str, Any], own_disk: bool, json_output: bool
) -> None:
    from rich.console import Console

    from kvstrata.demo.conductor import Conductor, ProcessFailed
    from kvstrata.demo.spec import Spec
    from kvstrata.demo.view import View

    spec = Spec(
        model=str(model.absolute()),
        device=device,
        dtype=dtype,
        config=None if config is None else str(config.absolute()),
        overrides=overrides,
        own_disk=own_disk,
        tenant=None if own_disk else f"demo {secrets.token_hex(8)}",
    )
    view = View(Console(quiet=json_output))
    conductor = Conductor(spec, view)
    try:
        with view:
            conductor.run()
    except ProcessFailed as failure:
        if failure.status == 2:
            raise Refused(str(failure).rpartition("\n")[2]) from failure
        print(failure, f"kvstrata: a process of the demo ended with status {failure.status}", sep="\n", file=sys.stderr)
        raise typer.Exit(1) from failure
    if json_output:
        print(json.dumps(conductor.report))
    else:
        view.result(conductor.report, conductor.same, proven=not conductor.faults)
    for fault in conductor.faults:
        print(f"kvstrata: {fault}", file=sys.stderr)
    if conductor.faults:
        raise typer.Exit(1)


def _run_process(text: str) -> None:
    """This is one of the demo's own processes."""
    from kvstrata.demo.spec import Spec
    from kvstrata.models import use_offline

    use_offline()
    from kvstrata.demo.process import run

    raise typer.Exit(run(Spec(**json.loads(text))))
