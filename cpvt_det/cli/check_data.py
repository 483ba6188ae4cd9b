# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det check-data``: the checks that a run makes before its first iteration, with all their results."""

import math
import tempfile
from functools import partial
from pathlib import Path

import click
from fvcore.common.config import CfgNode

from cpvt_det.cli.folder import describe_classes, folder_config, folder_options, take_folder
from cpvt_det.cli.train import RUN_CONTEXT, config_file_option, load_any, runner_options
from cpvt_det.common.errors import BadInputError, ConfigError, DataError, counted
from cpvt_det.data.folders.prepare import FolderData, refuse_overlap
from cpvt_det.data.validation.check import CheckedData
from cpvt_det.data.validation.duplicates import near_duplicates
from cpvt_det.data.validation.issues import EXAMPLES, Issues, summary
from cpvt_det.training.tasks import build_task

NEARLY_THE_SAME = "validation images that are nearly the same as a training image"


@click.command(context_settings=RUN_CONTEXT)
@config_file_option(required=False)
@partial(runner_options, takes_folder=True)
@folder_options
@click.option("--decode", is_flag=True, help="Also decode every image, to find damage after the header.")
@click.option("--all", "every", is_flag=True, help=f"List every occurrence, not only the first {EXAMPLES} of each kind.")
def check_data(
    config_file: str, decode: bool, every: bool, runner: str, overrides: tuple[str, ...], data_format: str, new_split: bool
) -> None:
    """Find all faults in a folder of images and annotations, or in the data sets of DATASETS.TRAIN and DATASETS.TEST of a config.

    Prints every kind of fault with the first 20 places where it occurs, or with --all every place. Then lists the corrections that
    are made automatically, and the validation images that are nearly the same as training images. The exit code is 2 if there are
    faults that DATASETS.ON_BAD does not drop. A FOLDER is read in the same way as by `cpvt-det train FOLDER`, but nothing is
    written.

    \b
    Example:
      cpvt-det check-data photos
      cpvt-det check-data --config-file coco/detr_r50_peg_50ep.yaml
      cpvt-det check-data --config-file output/mine/config.yaml --decode DATASETS.ON_BAD drop
    """
    folder, overrides = take_folder(config_file, overrides)
    if folder is None:
        _check(load_any(config_file, overrides, runner), decode, every)
        return
    with tempfile.TemporaryDirectory() as drawn:
        cfg, found = folder_config(folder, Path(drawn), overrides, data_format, new_split)
        click.echo("\n".join(found.notes))
        _check(cfg, decode, every, found)


def _check(cfg: CfgNode, decode: bool, every: bool, found: FolderData | None = None) -> None:
    if not cfg.DATASETS.TRAIN and not cfg.DATASETS.TEST:
        raise ConfigError("there is nothing to check: DATASETS.TRAIN and DATASETS.TEST are empty; name a data set in one of them")
    data = build_task(cfg).check_data(decode, math.inf if every else EXAMPLES)
    for dataset in {dataset.name: dataset for dataset in data.train + data.tests}.values():
        click.echo(dataset.describe())
    if found is not None:
        for issues in data.issues:
            issues.source = found.source_of(issues.source)
        _look_at_split(data)
    _compare_with_weights(cfg, data)
    _note_near_duplicates(data, math.inf if every else EXAMPLES)
    for issues in data.issues:
        for line in issues.lines(issues.errors, issues.faults, issues.infos):
            click.echo(line)
    bad = [issues for issues in data.issues if issues.has_errors(cfg.DATASETS.ON_BAD)]
    if bad:
        raise DataError(summary(bad))


def _look_at_split(data: CheckedData) -> None:
    """Print the number of boxes of each class in both splits of a folder, and report an error if the splits share images."""
    if not data.train or not data.tests:
        return
    click.echo("\n".join(describe_classes(data.train[0], data.tests[0])))
    try:
        refuse_overlap(data.train[0], data.tests[0])
    except DataError as error:
        data.issues.append(Issues())
        data.issues[-1].add_error("splits that overlap", str(error))


def _note_near_duplicates(data: CheckedData, examples: float) -> None:
    """Report validation images that are nearly the same as training images; a set that is used for both is compared only with the
    other sets."""
    issues = Issues("", examples)
    data.issues.append(issues)
    trained = [dataset for dataset in data.train if dataset.name not in {test.name for test in data.tests}]
    records = [[record.file_name for dataset in datasets for record in dataset.records] for datasets in (trained, data.tests)]
    alike = near_duplicates(*records) if all(records) else {}
    for second, (first, count) in alike.items():
        more = f" and {counted(count - 1, 'other')}" if count > 1 else ""
        issues.add_info(NEARLY_THE_SAME, f"{records[1][second]}: {records[0][first]}{more}")


def _compare_with_weights(cfg: CfgNode, data: CheckedData) -> None:
    """Report classes that ``MODEL.WEIGHTS`` lack. Training initialises their rows, and evaluation refuses such weights."""
    datasets = data.train + data.tests
    if not cfg.MODEL.WEIGHTS or not datasets:
        return
    from cpvt_det.checkpoint.weights import read_weights  # this imports torch, which the rest does not need

    issues = Issues(cfg.MODEL.WEIGHTS)
    data.issues.append(issues)
    try:
        known = read_weights(cfg.MODEL.WEIGHTS).classes
    except BadInputError as error:
        issues.add_error("weights that cannot be read", str(error))
        return
    for name in () if known is None else sorted(set(datasets[0].classes.names) - set(known.names)):
        issues.add_info("classes of the data that the weights do not have", name)
