# SPDX-License-Identifier: Apache-2.0
"""A folder in place of a config: ``cpvt-det train FOLDER`` and ``cpvt-det check-data FOLDER``."""

import os
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import click
from tabulate import tabulate

from cpvt_det.common.errors import BadInputError, ConfigError, output_errors
from cpvt_det.common.files import atomic_file
from cpvt_det.common.memory import quick_imports
from cpvt_det.common.registry import import_words
from cpvt_det.training.launchers import is_of_torchrun, variables_of_group

if TYPE_CHECKING:
    from fvcore.common.config import CfgNode

    from cpvt_det.data.coco import CocoDataset
    from cpvt_det.data.folders.prepare import FolderData

BUDGET = "30m"
CHOSEN = "chosen.yaml"
CHOSEN_FOR = "Chosen by cpvt-det train "
"""Beginning of the first comment in the file of chosen settings; the folder's absolute path follows."""
LAST = "last_checkpoint"
"""File that a run writes with its first checkpoint."""
ENOUGH = 10**6
"""Number of queries to assume while the data are checked. The real number is chosen later, from the number of objects per
image."""
MOST_CLASSES = 30
"""Largest number of classes in the table; with more classes, only those without objects are listed."""


class Duration(click.ParamType):
    """A time such as ``90s``, ``30m`` or ``1h30m``, as seconds."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert text to seconds."""
        match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", value)
        seconds = sum(float(part or 0) * length for part, length in zip(match.groups(), (3600, 60, 1), strict=True)) if match else 0
        return seconds if seconds > 0 else self.fail(f"{value!r} is not a time such as 90s, 30m or 1h30m", param, ctx)


budget_option = click.option("--budget", type=Duration(), help=f"Time to train, such as 90s, 30m or 2h.  [default: {BUDGET}]")


def folder_options(command: Callable) -> Callable:
    """Add ``--format`` and ``--new-split`` to a command that takes a FOLDER."""
    option = click.option("--format", "data_format", default="", metavar="NAME", help="Format to read if a FOLDER has several.")
    text = "Divide a FOLDER into training and validation images, even if it is already split."
    return option(click.option("--new-split", is_flag=True, help=text)(command))


def take_folder(config_file: str, words: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    """Separate the FOLDER from the KEY VALUE words after it; ``None`` if there is a config instead of a folder.

    Raises:
        ConfigError: neither a config nor a folder.
    """
    if config_file:
        return None, tuple(words)
    if not words or words[0].startswith("--") or (len(words) % 2 == 0 and not Path(words[0]).exists()):
        raise ConfigError("name a folder of images and annotations, or a config with --config-file (cpvt-det configs lists them)")
    return Path(words[0]).expanduser(), tuple(words[1:])


def choose_run(
    folder: Path,
    overrides: Sequence[str],
    budget: float | None,
    data_format: str,
    new_split: bool,
    num_gpus: int | None,
    resume: bool,
    start: str | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Choose the settings of a run on a folder, and write them to ``chosen.yaml`` in ``OUTPUT_DIR``; options as in ``train``.

    Returns:
        The path of that file, and the KEY VALUE words that are not in it. With ``resume``, the file is that of the previous run.

    Raises:
        BadInputError: data or settings that cannot be used, or a process that was started as one of several, because each of them
            would choose its own settings.
    """
    if is_of_torchrun() or variables_of_group(os.environ):
        raise BadInputError("each process would choose its own settings; use --num-gpus, or --config-file with a chosen.yaml")
    typed = dict(zip(overrides[::2], overrides[1::2], strict=False))
    output = typed.get("OUTPUT_DIR") or _output_of(folder, resume)
    path = Path(output).expanduser() / CHOSEN
    if resume and path.is_file():
        if not _is_for(folder, path):
            raise ConfigError(
                f"--resume: there is no run on {folder} to continue, and {path} belongs to other data; leave out --resume for a "
                f"new run, or continue that one with --config-file {path}"
            )
        if budget or data_format or new_split or start:
            raise ConfigError(
                f"--resume takes the data and the length of the run from {path}: leave out --budget, --format, --new-split and "
                "--start; to train longer, set a larger SOLVER.EPOCHS"
            )
        return str(path), tuple(overrides)
    _require_outside(path.parent, folder)
    with quick_imports():
        from cpvt_det.training.choose import choose_settings, describe_machine, write_choices
        from cpvt_det.training.launch import require_gpus
        from cpvt_det.training.recipe import Choice
        from cpvt_det.training.setup import is_in_use
        from cpvt_det.training.tuning import choose_start
    require_gpus(num_gpus)
    if is_in_use(path.parent):
        raise ConfigError(f"another run is using OUTPUT_DIR {path.parent}; stop it, or set another OUTPUT_DIR")
    device = typed.get("MODEL.DEVICE") or ("cpu" if num_gpus == 0 else "auto")
    machine, lines = describe_machine(num_gpus, device), []

    def tell(line: str) -> None:
        lines.append(line)
        click.echo(line)

    if "MODEL.WEIGHTS" in typed:
        if start is not None:
            raise ConfigError("--start and MODEL.WEIGHTS set the same thing: leave one out")
        start = typed["MODEL.WEIGHTS"] or "none"
    opened = choose_start(start, machine.device, list(typed), tell)  # first, because it may need to be fetched
    cfg, datasets, found = _read(folder, path.parent / "data", overrides, data_format, new_split)
    if resume:
        click.echo(f"--resume: there is no run in {output} to continue; this one starts at iteration 0")
    for line in found:
        tell(line)
    settled = [Choice("OUTPUT_DIR", output), Choice("SEED", 0)]
    settled += [Choice("MODEL.DEVICE", "cpu", "--num-gpus 0")] if num_gpus == 0 else []
    settled += [Choice(f"DATASETS.{key}", list(cfg.DATASETS[key])) for key in ("REGISTER", "TRAIN", "TEST")]
    seconds = budget or Duration().convert(BUDGET, None, None)
    choices = choose_settings(settled, overrides, datasets, machine, seconds, tell, opened)
    rows = [choice for choice in choices if choice.reason]
    click.echo(tabulate(rows, ("chosen", "", "because"), tablefmt="plain", disable_numparse=True))
    processes = "" if num_gpus is None else f" --num-gpus {num_gpus}"  # the processes share the batch
    again = f"cpvt-det train{import_words()}{processes} --config-file {shlex.quote(str(path))}"
    again += f" OUTPUT_DIR {shlex.quote(f'{output}_again')}"
    header = [f"{CHOSEN_FOR}{folder.resolve()}", f"To repeat this run from {Path.cwd()}: {again}", *lines]
    with output_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(write_choices(choices, header).encode(errors="backslashreplace"))  # names of files may have any bytes
    click.echo(f"all settings: {path}")
    return str(path), ()


def _output_of(folder: Path, resume: bool) -> str:
    """``output/NAME_OF_FOLDER``. A number is appended if another run was started there, either on this folder or on a folder with
    the same name.

    Args:
        folder: folder of the data.
        resume: whether to return the output folder of the last run on this folder.
    """
    from cpvt_det.training.setup import is_in_use

    first = f"output/{folder.resolve().name}"
    outputs = (first if number == 1 else f"{first}_{number}" for number in count(1))
    # Folders with this name, optionally followed by a number, in which a run was started, sorted by number
    pattern = re.compile(rf"{re.escape(Path(first).name)}(?:_(\d+))?")
    matches = [(pattern.fullmatch(path.name), str(path)) for path in Path(first).parent.glob("*")]
    numbered = sorted((int(match[1] or 1), path) for match, path in matches if match)
    begun = [path for _, path in numbered if Path(path, CHOSEN).is_file() or Path(path, LAST).is_file()]
    ours = [output for output in begun if _is_for(folder, Path(output, CHOSEN))]
    if resume:
        output = max(ours, key=lambda one: Path(one, CHOSEN).stat().st_mtime_ns, default=first)
        said = f"the last run on {folder} is in {output}"
    else:
        without_checkpoint = [one for one in ours if not Path(one, LAST).is_file() and not is_in_use(Path(one))]
        output = without_checkpoint[0] if without_checkpoint else next(one for one in outputs if one not in begun)
        said = f"{first} already has a run, so this one goes to {output}; --resume continues the last one"
    if output != first:
        click.echo(said)
    return output


def _is_for(folder: Path, chosen: Path) -> bool:
    """Whether a file of chosen settings belongs to a run on this folder."""
    if not chosen.is_file():
        return False
    with chosen.open(encoding="utf-8", errors="replace") as file:
        return file.readline().rstrip("\n") == f"# {CHOSEN_FOR}{folder.resolve()}"


def _read(
    folder: Path, output: Path, overrides: Sequence[str], data_format: str, new_split: bool
) -> tuple["CfgNode", list["CocoDataset"], list[str]]:
    """The config of a folder's data sets, its checked training and validation sets, and lines to print about them."""
    from cpvt_det.builders.datasets import check_datasets
    from cpvt_det.data.folders.prepare import refuse_overlap
    from cpvt_det.data.validation.issues import require_no_errors

    cfg, found = folder_config(folder, output, overrides, data_format, new_split)
    data = check_datasets(cfg)
    require_no_errors(data.issues, cfg.DATASETS.ON_BAD)
    if not data.tests:
        raise ConfigError("DATASETS.TEST is empty, but a run on a folder is evaluated on a validation set; leave the key out")
    datasets = [data.train[0], data.tests[0]]
    refuse_overlap(*datasets)
    written = [f"images of each split are listed in {', '.join(found.written)}"] if found.written else []
    return cfg, datasets, [*found.notes, *written, *describe_classes(*datasets)]


def folder_config(
    folder: Path, output: Path, overrides: Sequence[str], data_format: str = "", new_split: bool = False
) -> tuple["CfgNode", "FolderData"]:
    """A config whose ``DATASETS`` refer to a folder, and a description of the data found there.

    Args:
        folder, data_format, new_split: as in ``train``.
        output: folder for the files of a split into training and validation images, if one must be made.
        overrides: KEY VALUE words.

    Raises:
        BadInputError: a folder without data sets, or words that cannot be used.
    """
    from cpvt_det.config import get_cfg, merge_overrides
    from cpvt_det.data.folders.prepare import name_datasets

    found = name_datasets(folder, output, data_format, new_split)
    cfg = get_cfg()
    cfg.DATASETS.REGISTER, cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = found.register, (found.train,), (found.val,)
    cfg.MODEL.DETR.NUM_OBJECT_QUERIES = cfg.TEST.DETECTIONS_PER_IMAGE = ENOUGH
    merge_overrides(cfg, overrides)
    return cfg, found


def describe_classes(train: "CocoDataset", val: "CocoDataset") -> list[str]:
    """A table with the number of boxes of each class, and notes if a split lacks a class."""
    from cpvt_det.data.folders.prepare import count_classes

    rows, notes = count_classes({"train": train, "val": val})
    if len(rows) > MOST_CLASSES:
        return notes
    return [*tabulate(rows, ("class", "train", "val"), tablefmt="plain").splitlines(), *notes]


def _require_outside(output: Path, folder: Path) -> None:
    """Refuse to write into the user's folder.

    Raises:
        ConfigError: an ``OUTPUT_DIR`` inside the folder.
    """
    inside, around = output.resolve(), folder.resolve()
    if inside == around or around in inside.parents:
        raise ConfigError(
            f"OUTPUT_DIR {output} is inside {folder}, where nothing may be written; run the command from another folder, or add "
            f"OUTPUT_DIR {around.parent / 'output' / around.name}"
        )
