"""What the commands for a cache directory share: which one it is, and waiting for it."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvstrata.cli.refusal import Refused

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

STOP_S = 2.0  # that a call has for ending when it is told to; it looks whenever a request to the disk has ended
Result = TypeVar("Result")
PathArgument = Annotated[Path | None, typer.Argument(help="The cache directory. Default: the disk_path of the settings.")]
ConfigOption = Annotated[Path | None, typer.Option(help="A config.yaml whose disk_path is meant.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def cache_directory(path: Path | None, config: Path | None) -> Path:
    """The directory that is meant. Raises Refused where there is no cache."""
    if path is None:
        from kvstrata.config import ConfigError, Settings

        try:
            path = Settings.load(config).disk_root
        except ConfigError as error:
            raise Refused(str(error)) from error
        if path is None:
            raise Refused("no cache directory is named: give its path, or a --config with kvc2.disk_path")
    elif config is not None:
        raise Refused("give a path or a --config, not both")
    try:
        if (path / "shelves").is_dir():
            return path
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from error
    raise Refused(f"{path} holds no cache: it has no directory shelves/; name the directory that kvc2.disk_path names")


def read_tokens(file: Path, option: str) -> "npt.NDArray[np.int32]":
    """The token ids in a file, int32. Raises Refused."""
    from kvstrata.arguments import token_array

    try:
        text = file.read_text()
        return token_array(json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()])
    except OSError as error:
        raise Refused(f"{option} {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"{option} {file} must hold token ids, as a JSON list or as numbers between spaces: {error}") from None


def patiently(call: Callable[[], Result], stop: threading.Event | None = None) -> Result:
    """The result of a call into the core, which may wait for a disk that does not answer: Ctrl-C works all the same.

    After Ctrl-C, `stop` is set and the call has a moment to come to its end. Raises what the call raises; RuntimeErrors of the
    core, one sentence each, as Refused.
    """
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
    except KeyboardInterrupt:
        if stop:
            stop.set()
        if thread.ident:
            thread.join(STOP_S)
        raise
    if failure:
        if isinstance(failure[0], RuntimeError):
            raise Refused(str(failure[0])) from failure[0]
        raise failure[0]
    found: Result = result[0]
    return found
