# SPDX-License-Identifier: Apache-2.0
"""Callbacks that send a run's numbers elsewhere: ``wandb`` (Weights & Biases) and ``mlflow``.

Each package is an extra of its name; where it sends to, and with which key, its own environment variables say.
"""

import importlib
import math
import re
import time
from types import ModuleType

from cpvt_det.config import flat_items
from cpvt_det.errors import ConfigError
from cpvt_det.runner.callbacks.contract import CALLBACK_REGISTRY, Callback, TrainingRun
from cpvt_det.tasks.task import Results, flatten

FILES = ("config.yaml", "results.json", "pictures")


def _require(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"CALLBACKS {package}: the package is not installed: pip install 'cpvt-det[{package}]'") from error


@CALLBACK_REGISTRY.register_as("wandb")
class Wandb(Callback):
    """Sends config, scalars and figures to Weights & Biases; a resumed run goes on as the same run there.

    Args:
        project: project of the run.
        name: name of the run; ``None``: one is made up.
        mode: ``online``, ``offline`` or ``disabled``; ``None``: as ``WANDB_MODE`` says.
    """

    def __init__(self, project: str = "cpvt_det", name: str | None = None, mode: str | None = None):
        self.wandb, self.options = _require("wandb"), {"project": project, "name": name, "mode": mode}

    def on_start(self, run: TrainingRun) -> None:
        self.run = self.wandb.init(**self.options, id=run.run_id, resume="allow", config=dict(flat_items(run.cfg)), dir=run.output)
        self.run.define_metric("*", step_metric="iteration")  # its own step never goes back, as a resumed run does

    def on_step(self, run: TrainingRun, iteration: int, scalars: dict[str, float]) -> None:
        self.run.log({"iteration": iteration, **scalars})

    def on_evaluation(self, run: TrainingRun, iteration: int, results: Results) -> None:
        self.run.log({"iteration": iteration, **flatten(results)})

    def on_end(self, run: TrainingRun, error: BaseException | None) -> None:
        self.run.finish(exit_code=int(error is not None))


@CALLBACK_REGISTRY.register_as("mlflow")
class Mlflow(Callback):
    """Sends config, scalars, figures and pictures to MLflow; a resumed run goes on as the same run there.

    Args:
        experiment: experiment of the run.
        name: name of the run; ``None``: one is made up.
        uri: place to send to; ``None``: as ``MLFLOW_TRACKING_URI`` says.
    """

    def __init__(self, experiment: str = "cpvt_det", name: str | None = None, uri: str | None = None):
        self.mlflow, self.options = _require("mlflow"), (experiment, name, uri)

    def on_start(self, run: TrainingRun) -> None:
        self.run, (experiment, name, uri), tag = "", self.options, "cpvt_det.run_id"
        if uri is not None:
            self.mlflow.set_tracking_uri(uri)
        self.client = self.mlflow.MlflowClient()  # a run that is active in this process stays as it is
        known = self.client.get_experiment_by_name(experiment)
        place = known.experiment_id if known else self.client.create_experiment(experiment)
        found = self.client.search_runs([place], f"tags.`{tag}` = '{run.run_id}'")
        tags = self.mlflow.tracking.context.registry.resolve_tags({tag: run.run_id})
        self.run = (found[0] if found else self.client.create_run(place, tags=tags, run_name=name)).info.run_id
        self.client.update_run(self.run, status="RUNNING")
        if not found:  # MLflow's parameters never change, those of a resumed run may
            config = [self.mlflow.entities.Param(key, str(value)) for key, value in flat_items(run.cfg)]
            self.client.log_batch(self.run, params=config)

    def on_step(self, run: TrainingRun, iteration: int, scalars: dict[str, float]) -> None:
        defined = {re.sub(r"[^/\w.\- ]", "_", key, flags=re.ASCII): value for key, value in scalars.items() if math.isfinite(value)}
        now = int(1000 * time.time())
        self.client.log_batch(self.run, [self.mlflow.entities.Metric(key, value, now, iteration) for key, value in defined.items()])

    def on_evaluation(self, run: TrainingRun, iteration: int, results: Results) -> None:
        self.on_step(run, iteration, flatten(results))

    def on_end(self, run: TrainingRun, error: BaseException | None) -> None:
        if not self.run:  # it did not start
            return
        try:
            for path in (run.output / name for name in FILES if (run.output / name).exists()):
                self.client.log_artifact(self.run, str(path))  # a folder too
        finally:
            self.client.set_terminated(self.run, "FAILED" if error else "FINISHED")
