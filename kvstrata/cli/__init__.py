"""The command line: `kvstrata COMMAND`, one file per command; torch is imported by the command that needs it."""

import sys
from typing import Annotated

import typer

from kvstrata import __version__
from kvstrata.cli.bench import bench
from kvstrata.cli.config import config
from kvstrata.cli.demo import demo
from kvstrata.cli.doctor import doctor
from kvstrata.cli.explain import explain
from kvstrata.cli.inspect import inspect
from kvstrata.cli.purge import purge
from kvstrata.cli.refusal import Refused
from kvstrata.cli.verify import verify

__all__ = ["app", "main"]

app = typer.Typer(name="kvstrata", add_completion=False, pretty_exceptions_enable=False)
for command in (demo, doctor, inspect, verify, purge, explain):
    app.command()(command)
app.add_typer(config, name="config")
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False
) -> None:
    """A prefix cache for LLM inference that keeps KV states in GPU memory, CPU memory and on disk."""
    if version:
        typer.echo(f"kvstrata {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Entry point. What a user got wrong is one sentence on stderr and exit code 2; a traceback is a bug of ours."""
    try:
        status = typer.main.get_command(app).main(prog_name="kvstrata", standalone_mode=False)
    except Refused as refusal:
        _stop(str(refusal), 2)
    except (typer.Abort, KeyboardInterrupt):
        _stop("interrupted", 130)
    except ImportError as error:
        if error.name not in ("kvstrata._core", "_core"):  # the dynamic loader says it in short
            raise
        _stop(f"its core cannot be loaded ({error}): kvstrata doctor says what to do", 2)
    except Exception as error:
        # Wrong options. Their class is click's or typer's own copy of it, depending on typer's version.
        if not hasattr(error, "format_message"):
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", "kvstrata")
        _stop(f"{error.format_message()} (see {command} --help)", getattr(error, "exit_code", 2))
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _stop(sentence: str, code: int) -> None:
    print(f"kvstrata: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)
