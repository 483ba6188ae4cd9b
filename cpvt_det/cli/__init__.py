# SPDX-License-Identifier: Apache-2.0
"""The command ``cpvt-det``: one file for each subcommand, imported when it is called, so that help is quick."""

import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

import cpvt_det
from cpvt_det.common.errors import BadInputError, DataFaultsError, InterruptedRun, RunStoppedError, exit_code, first_line
from cpvt_det.common.memory import limit_spinning, quick_imports
from cpvt_det.common.registry import import_modules

limit_spinning()  # before any module imports torch, also those of --import

COMMANDS = {
    "analyze": "Show parameters, operations, time and memory, by part of the model.",
    "check-data": "Find faults in a folder of images and annotations, or in the data sets of a config.",
    "compare": "Draw the curves of several runs in one picture.",
    "configs": "List the configs of the package.",
    "convert-weights": "Convert DETR weights from other projects.",
    "eval": "Evaluate weights on a data set.",
    "export": "Convert weights to ONNX, OpenVINO or a torch.export program.",
    "pack": "Pack the images of a data set into tar files.",
    "predict": "Detect objects in images, or classify images; write pictures and JSON.",
    "serve": "View detections in the browser.",
    "shapes": "Draw the shapes data set, in COCO format.",
    "show": "Draw attention, position encodings, or the model's input.",
    "train": "Train a detector or a classifier on a folder or with a config, and evaluate it.",
    "weights": "List public weights, and show which are on this machine.",
}


class LazyGroup(click.Group):
    """A command group that imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module = name.replace("-", "_")
        with quick_imports():
            return getattr(importlib.import_module(f"cpvt_det.cli.{module}"), module)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; errors become one line and an exit code."""
        return report_errors(super().invoke)(ctx)


def common_options(command: Callable) -> Callable:
    """``--debug`` and ``--import`` for every command, so that they work anywhere on the command line."""
    command = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")(command)
    return click.option(
        "--import",
        multiple=True,
        expose_value=False,
        is_eager=True,
        metavar="MODULE",
        callback=lambda context, option, names: import_modules(names),
        help="Python module to import first, which registers your own parts; may be given several times.",
    )(command)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@common_options
@click.version_option(cpvt_det.__version__, prog_name="cpvt-det")
def main() -> None:
    """PEG in DETR and Deformable-DETR: train, evaluate, predict.

    \b
    Example:
      cpvt-det train photos --budget 30m
      cpvt-det predict output/photos/model_best.pth --input photo.jpg --output found
    """


def report_errors(command: Callable) -> Callable:
    """Turn errors into a one-line message and an exit code: 2 for bad input, 1 for a failed run, 130 for an interrupted one.

    Each fault in the data has its own line. ``--debug`` anywhere on the command line adds the traceback.
    """

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _replace_missing_streams()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # names of files may have any bytes
        try:
            return command(*args, **kwargs)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except InterruptedRun as error:
            _end(str(error), error.exit_code)
        except KeyboardInterrupt:
            _end("interrupted", exit_code(signal.SIGINT))
        except DataFaultsError as error:
            _end(f"error: {error}", 2)
        except BadInputError as error:
            _end(f"error: {first_line(error)}", 2)
        except RunStoppedError as error:
            _end(f"stopped: {first_line(error)}", 1)
        except Exception as error:
            _end(f"failed: {type(error).__name__}: {first_line(error)} (--debug shows the traceback)", 1)

    return wrapped


def _replace_missing_streams() -> None:
    """Discard printed output in a process without a terminal or with a closed stream (``2>&-``, ``pythonw``).

    The streams are replaced in order, so that each gets its own file descriptor. Otherwise the next file that is opened would get
    that descriptor, and with it the output of libraries.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 for the whole process
            setattr(sys, name, stream)


def _end(message: str, code: int) -> None:
    if "--debug" in sys.argv:
        traceback.print_exc()
    click.echo(message, err=True)
    raise SystemExit(code)
