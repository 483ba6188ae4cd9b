# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det check-data``: the checks that a run makes before its first iteration, with all their results."""

import math

import click
from fvcore.common.config import CfgNode

from cpvt_det.cli.configs import config_options, load_any
from cpvt_det.cli.train import RUN_CONTEXT
from cpvt_det.data.validation.check import CheckedData
from cpvt_det.data.validation.issues import EXAMPLES, Issues, summary
from cpvt_det.errors import BadInputError, ConfigError, DataError
from cpvt_det.tasks import build_task


@click.command(context_settings=RUN_CONTEXT)
@config_options
@click.option("--decode", is_flag=True, help="Also decode every image, to find damage behind the header.")
@click.option("--all", "every", is_flag=True, help=f"List every place, not only the first {EXAMPLES} of each kind.")
def check_data(config_file: str, decode: bool, every: bool, runner: str, overrides: tuple[str, ...]) -> None:
    """Find all faults in the data sets of DATASETS.TRAIN and DATASETS.TEST; KEY VALUE pairs override the config.

    Prints every kind of fault with its first 20 places, or with --all every place; then what is corrected automatically. The exit
    code is 2 if there are faults that DATASETS.ON_BAD does not drop.

    \b
    Example:
      cpvt-det check-data --config-file coco/detr_r50_peg_50ep.yaml
      cpvt-det check-data --config-file output/mine/config.yaml --decode DATASETS.ON_BAD drop
    """
    cfg = load_any(config_file, overrides, runner)
    if not cfg.DATASETS.TRAIN and not cfg.DATASETS.TEST:
        raise ConfigError("there is nothing to check: DATASETS.TRAIN and DATASETS.TEST are empty; name a data set in one of them")
    data = build_task(cfg).check_data(decode, math.inf if every else EXAMPLES)
    for dataset in {dataset.name: dataset for dataset in data.train + data.tests}.values():
        click.echo(dataset.describe())
    _compare_with_weights(cfg, data)
    for issues in data.issues:
        for line in issues.lines(issues.errors, issues.faults, issues.infos):
            click.echo(line)
    bad = [issues for issues in data.issues if issues.has_errors(cfg.DATASETS.ON_BAD)]
    if bad:
        raise DataError(summary(bad))


def _compare_with_weights(cfg: CfgNode, data: CheckedData) -> None:
    """Report classes that ``MODEL.WEIGHTS`` lack: training initialises their rows, evaluation refuses such weights."""
    datasets = data.train + data.tests
    if not cfg.MODEL.WEIGHTS or not datasets:
        return
    from cpvt_det.checkpoint.weights import read_weights  # and with it torch, which the rest does not need

    issues = Issues(cfg.MODEL.WEIGHTS)
    data.issues.append(issues)
    try:
        known = read_weights(cfg.MODEL.WEIGHTS).classes
    except BadInputError as error:
        issues.add_error("weights that cannot be read", str(error))
        return
    for name in () if known is None else sorted(set(datasets[0].classes.names) - set(known.names)):
        issues.add_info("classes of the data that the weights do not have", name)
