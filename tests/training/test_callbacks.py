# SPDX-License-Identifier: Apache-2.0
"""Callbacks: what each runner tells them and when, what their failures do, who may end a run, and the loggers."""

import contextlib
import json
import sys
import types

import pytest
import torch
from several import run_group
from test_runner import assert_same_run, metrics_of, weights_of
from tiny import overrides

from cpvt_det.common.errors import ConfigError, InterruptedRun, RunStoppedError, UnknownNameError
from cpvt_det.config import load_cfg
from cpvt_det.solver.step import TrainStep
from cpvt_det.training.callbacks import CALLBACK_REGISTRY, Callback, TrainingRun
from cpvt_det.training.tasks.task import flatten
from cpvt_det.training.train import run as run_builtin

RUNNERS = ["builtin", pytest.param("detectron2", marks=pytest.mark.detectron2)]


class Recorder(Callback):
    """Keeps what it is told; ``acts`` maps an event, as ``step 3``, to what is done then."""

    def __init__(self, **acts):
        self.told, self.scalars, self.results, self.acts = [], {}, {}, {key.replace("_", " "): act for key, act in acts.items()}

    def _take(self, run, event):
        self.run = run
        self.told.append(event)
        self.acts.get(event, lambda run: None)(run)

    def on_start(self, run):
        assert run.evaluated is not None and (run.output / "config.yaml").is_file()
        self._take(run, f"start {run.start}")

    def on_step(self, run, iteration, scalars):
        self.scalars[iteration] = scalars
        self._take(run, f"step {iteration}")

    def on_evaluation(self, run, iteration, results):
        self.results[iteration] = results
        self._take(run, f"evaluation {iteration}")

    def on_end(self, run, error):
        self.files = sorted(path.name for path in run.output.glob("*"))
        self._take(run, f"end {type(error).__name__}")


def strict(figures):
    """Figures as the files have them: ``None`` for NaN."""
    return {name: value if value == value else None for name, value in figures.items()}


def fail(error):
    def act(*arguments, **options):
        raise error

    return act


@pytest.fixture
def train_with(drawn_coco, tmp_path):
    """Train with callbacks in a folder of the given name, in either runner; 6 steps, evaluated after the third and the last."""

    def call(runner, name, *callbacks, resume=False, **more):
        words = overrides(drawn_coco.files, tmp_path / name, **{"TEST__EVAL_PERIOD": 3, **more})
        if runner == "builtin":
            load, run = load_cfg, run_builtin
        else:
            from cpvt_det.d2.run import load_cfg as load
            from cpvt_det.d2.run import run
        run(load("", words), resume=resume, callbacks=callbacks)
        return tmp_path / name

    return call


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_run_tells_what_happens_in_its_order(train_with, runner):
    seen = Recorder()
    folder = train_with(runner, "run", seen, SOLVER__LOG_PERIOD=2)
    assert seen.told == [
        *("start 0", "step 1", "evaluation 2", "step 3", "step 5", "evaluation 5", "end NoneType"),
    ]
    assert strict(flatten(seen.results[5])) == flatten(json.loads((folder / "results.json").read_text()))
    assert {"model_final.pth", "results.json", "pictures", "log.txt"} <= set(seen.files)
    assert (seen.run.output, seen.run.max_iter, seen.run.best.iteration) == (
        folder,
        6,
        weights_of(folder / "model_best.pth")["iteration"],
    )
    assert seen.run.run_id == weights_of(folder / "model_final.pth")["cpvt_det"]["run_id"]


def test_steps_are_told_the_lines_of_the_metrics(train_with):
    seen = Recorder()
    lines = {
        line["iteration"]: line for line in metrics_of(train_with("builtin", "run", seen, SOLVER__LOG_PERIOD=2)) if "lr" in line
    }
    assert seen.scalars.keys() == lines.keys() == {1, 3, 5}
    for iteration, scalars in seen.scalars.items():
        assert {"iteration": iteration, **scalars} == lines[iteration]


@pytest.mark.detectron2
def test_both_runners_tell_the_same(train_with, monkeypatch):
    """The same numbers, a skipped step among them: its loss is not a number and in no mean."""
    real = TrainStep._backward

    def spoil(self, samples):
        if self.training_model.detector.training and self.spoilt == 3:
            samples[0]["image"] = samples[0]["image"] * torch.nan
        self.spoilt += 1
        return real(self, samples)

    monkeypatch.setattr(TrainStep, "_backward", spoil)
    monkeypatch.setattr(TrainStep, "spoilt", 0, raising=False)
    two = [Recorder(), Recorder()]
    for runner, seen in zip(("builtin", "detectron2"), two, strict=True):
        TrainStep.spoilt = 0
        train_with(runner, runner, seen, SOLVER__LOG_PERIOD=3)
    assert two[0].told == two[1].told
    for iteration in (2, 5):
        ours, theirs = (dict(seen.scalars[iteration]) for seen in two)
        for name in ("time", "data_time", "images_per_second", "eta_seconds"):
            del ours[name], theirs[name]
        assert ours == theirs and ours["skipped"] == (iteration == 5) and ours["total_loss"] == ours["total_loss"]
        assert strict(flatten(two[0].results[iteration])) == strict(flatten(two[1].results[iteration]))


@pytest.mark.parametrize("runner", RUNNERS)
def test_callbacks_change_no_weight(train_with, runner):
    assert_same_run(
        train_with(runner, "with", Recorder(), MODEL__DETR__DROPOUT=0.3), train_with(runner, "without", MODEL__DETR__DROPOUT=0.3)
    )


# Who ends a run


@pytest.mark.parametrize("tests", [True, False])
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_callback_ends_the_run_after_a_step(train_with, runner, tests):
    """With an evaluation, where there is a test set, and a final checkpoint; a resumed run goes on."""
    more = {"SOLVER__LOG_PERIOD": 2} if tests else {"SOLVER__LOG_PERIOD": 2, "DATASETS__TEST": (), "TEST__EVAL_PERIOD": 0}
    seen = Recorder(step_3=lambda run: run.stop("enough"))
    folder = train_with(runner, "run", seen, **more)
    evaluated = ["evaluation 2", "evaluation 3"] if tests else []
    assert [event for event in seen.told if not event.startswith("step")] == ["start 0", *evaluated, "end NoneType"]
    assert (
        weights_of(folder / "model_final.pth")["iteration"] == 3 and (folder / "last_checkpoint").read_text() == "model_final.pth"
    )
    assert (folder / "log.txt").read_text().count("Early stop after iteration 3: enough") == 1
    if tests:
        assert [line["iteration"] for line in metrics_of(folder) if "bbox/AP50" in line][-1] == 3
    again = Recorder()
    train_with(runner, "run", again, resume=True, **more)
    assert again.told == ["start 4", "step 5", *(["evaluation 5"] if tests else []), "end NoneType"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_callback_ends_the_run_after_an_evaluation(train_with, runner):
    seen = Recorder(evaluation_2=lambda run: run.stop("good enough"))
    folder = train_with(runner, "run", seen)
    assert seen.told[-2:] == ["evaluation 2", "end NoneType"]
    assert weights_of(folder / "model_final.pth")["iteration"] == 2


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_callback_that_ends_a_new_run_at_its_start_lets_it_take_one_step(train_with, runner):
    """So that there are detections for the report, and a final checkpoint."""
    seen = Recorder(start_0=lambda run: run.stop("a rehearsal"))
    folder = train_with(runner, "run", seen, TEST__REPORT=True)
    assert seen.told == ["start 0", "step 0", "evaluation 0", "end NoneType"]
    assert weights_of(folder / "model_final.pth")["iteration"] == 0 and (folder / "report/report.md").is_file()
    again = Recorder(start_1=lambda run: run.stop("another one"))
    train_with(runner, "run", again, resume=True)
    assert again.told == ["start 1", "evaluation 0", "end NoneType"]


def test_a_run_is_not_stopped_without_a_reason(tmp_path):
    run = TrainingRun(None, tmp_path, "", 0, 6, None, None)
    with pytest.raises(ValueError, match="to stop a run, give a reason for the log; got an empty one"):
        run.stop("")


# Failures


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_callback_that_fails_is_left_out_until_the_end_and_the_run_goes_on(train_with, runner):
    broken, seen = Recorder(step_1=fail(OSError("no route to host")), end_NoneType=fail(OSError("still none"))), Recorder()
    folder = train_with(runner, "run", broken, seen)
    assert broken.told == ["start 0", "step 0", "step 1", "end NoneType"] and len(seen.told) == 10
    log = (folder / "log.txt").read_text()
    assert "Recorder.on_step failed, so the callback is not called again in this run: OSError: no route to host" in log
    assert "still none" not in log


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_callback_that_cannot_start_ends_the_run_before_its_first_step(train_with, tmp_path, runner):
    first, second = Recorder(), Recorder(start_0=fail(OSError("no route to host")))
    with pytest.raises(
        ConfigError, match=r"Recorder.on_start failed: OSError: no route to host; to train without it, remove it from"
    ):
        train_with(runner, "run", first, second)
    assert first.told == ["start 0", "end ConfigError"] and second.told == ["start 0", "end ConfigError"]
    assert not list((tmp_path / "run").glob("model_*"))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("error", [RunStoppedError("the disk is full"), InterruptedRun(15, "saved")])
def test_an_error_that_ends_the_run_is_told_to_all(train_with, runner, error):
    seen, other = Recorder(step_1=fail(error)), Recorder()
    with pytest.raises(type(error)):
        train_with(runner, "run", seen, other)
    assert seen.told[-1] == other.told[-1] == f"end {type(error).__name__}"


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ([3], r"CALLBACKS must contain names, or entries \[name, \{option: value\}\], got 3"),
        ([["mlflow", 2]], r"entries \[name, \{option: value\}\], got \['mlflow', 2\]"),
        ([[]], r"got \[\]"),
        (["wandbb"], r"unknown callback 'wandbb' \(did you mean 'wandb'\?\); known: .*--import MODULE"),
        ([["recorder", {"step": 1}]], r"unknown option of callback 'recorder' 'step'; known: "),
    ],
)
def test_callbacks_that_cannot_be_built_are_refused(train, tmp_path, value, match):
    CALLBACK_REGISTRY._obj_map["recorder"] = lambda period=1: Recorder()
    try:
        with pytest.raises(ConfigError, match=match) as told:
            train("run", CALLBACKS=value)
        assert not (tmp_path / "run/log.txt").exists() and (isinstance(told.value, UnknownNameError) or "unknown" not in match)
    finally:
        del CALLBACK_REGISTRY._obj_map["recorder"]


def test_what_is_no_callback_is_refused(train_with):
    with pytest.raises(TypeError, match=r"a callback must be an instance of cpvt_det.training.callbacks.Callback, got <built-in"):
        train_with("builtin", "run", print)


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_missing_package_is_named(train, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"CALLBACKS {package}: .* not installed: pip install 'cpvt-det\[{package}\]'"):
        train("run", CALLBACKS=package)


# Several processes

WATCHER = """
from pathlib import Path
from cpvt_det.common.distributed import rank
from cpvt_det.training.callbacks import CALLBACK_REGISTRY, Callback

@CALLBACK_REGISTRY.register_as("watcher")
class Watcher(Callback):
    def __init__(self, path="told.txt"):
        self.path = path

    def on_step(self, run, iteration, scalars):
        with Path(self.path).open("a") as file:
            file.write(f"{rank()} {iteration}\\n")
        if iteration == 2:
            run.stop("enough")
"""


def test_of_two_processes_the_first_is_told_and_both_end(drawn_coco, tmp_path, monkeypatch):
    """The callback comes by ``--import`` and its name in the config."""
    (tmp_path / "watcher.py").write_text(WATCHER)
    words = overrides(drawn_coco.files, "run", DATASETS__TEST=(), CALLBACKS=[["watcher", {"path": "steps.txt"}]])
    words = ["train", "--import", "watcher", "--runner", "builtin", "--config-file", "_detectron2.yaml", "--num-gpus", "0", *words]
    monkeypatch.chdir(tmp_path)
    ended = run_group(tmp_path / "printed", words)
    assert [one.code for one in ended] == [0, 0], ended
    assert (tmp_path / "steps.txt").read_text().split("\n") == ["0 0", "0 1", "0 2", ""]
    assert weights_of(tmp_path / "run/model_final.pth")["iteration"] == 2


# Loggers


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package: what is sent to it."""
    sent = []
    run = types.SimpleNamespace(
        define_metric=lambda *names, **options: sent.append(("define", names, options)),
        log=lambda values: sent.append(("log", values)),
        finish=lambda exit_code: sent.append(("finish", exit_code)),
    )
    module = types.ModuleType("wandb")
    module.init = lambda **options: sent.append(("init", options)) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return sent


def test_wandb_gets_config_scalars_and_figures(train, wandb):
    folder = train("run", CALLBACKS=[["wandb", {"project": "mine", "mode": "offline"}]], SOLVER__LOG_PERIOD=3)
    (init,) = (options for event, options in (entry for entry in wandb if entry[0] == "init"))
    assert (init["project"], init["mode"], init["resume"]) == ("mine", "offline", "allow")
    assert init["id"] == weights_of(folder / "model_final.pth")["cpvt_det"]["run_id"]
    assert init["config"]["MODEL.BACKBONE.NAME"] == "resnet10"
    lines = [values for event, values in (entry for entry in wandb if entry[0] == "log")]
    ours = metrics_of(folder)
    assert [line["iteration"] for line in lines] == [2, 5, 5] == [line["iteration"] for line in ours]
    for line, expected in zip(lines, ours, strict=True):
        assert strict(line) == expected
    assert wandb[-1] == ("finish", 0)


def test_wandb_itself_takes_a_run_offline(train, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = train("run", CALLBACKS=[["wandb", {"mode": "offline"}]])
    assert "failed" not in (folder / "log.txt").read_text()
    assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == 1


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow with a store of files, and the address of that."""
    package = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    before, uri = package.get_tracking_uri(), (tmp_path / "store").as_uri()
    yield package, uri
    package.set_tracking_uri(before)


def test_mlflow_keeps_config_scalars_figures_and_pictures(train, mlflow):
    package, uri = mlflow
    folder = train("run", CALLBACKS=[["mlflow", {"experiment": "mine", "name": "first", "uri": uri}]], SOLVER__LOG_PERIOD=3)
    client = package.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.params["MODEL.BACKBONE.NAME"] == "resnet10"
    for line in metrics_of(folder):
        for name in {"total_loss", "lr", "bbox/AP50", "bbox/AP-red"} & line.keys():
            assert line[name] in [
                metric.value for metric in client.get_metric_history(run.info.run_id, name) if metric.step == line["iteration"]
            ]
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {"config.yaml", "results.json", "pictures"}
    assert "failed" not in (folder / "log.txt").read_text()


@pytest.mark.parametrize("call", ["log_batch", "log_artifact"])
def test_a_call_that_fails_leaves_no_run_of_mlflow_running(train, mlflow, monkeypatch, call):
    """Nor one that is active, which the next training in the process would meet."""
    package, uri = mlflow
    more = {"CALLBACKS": [["mlflow", {"uri": uri}]], "DATASETS__TEST": (), "SOLVER__MAX_ITER": 1}
    with monkeypatch.context() as patch:
        patch.setattr(package.MlflowClient, call, fail(OSError("no route to host")))
        with pytest.raises(ConfigError) if call == "log_batch" else contextlib.nullcontext():
            train("broken", **more)
    assert package.active_run() is None
    folder = train("run", **more)
    assert "failed" not in (folder / "log.txt").read_text()
    client = package.MlflowClient(uri)
    ended = [run.info.status for run in client.search_runs([client.get_experiment_by_name("cpvt_det").experiment_id])]
    assert sorted(ended) == ["FAILED" if call == "log_batch" else "FINISHED", "FINISHED"]


def test_a_run_of_mlflow_that_is_not_ours_stays_as_it_is(train, mlflow):
    package, uri = mlflow
    package.set_tracking_uri(uri)
    package.set_experiment("own")
    with package.start_run() as own:
        folder = train("run", CALLBACKS=[["mlflow", {"uri": uri}]])
        assert package.active_run().info.run_id == own.info.run_id
    client = package.MlflowClient(uri)
    assert not client.get_run(own.info.run_id).data.metrics
    (run,) = client.search_runs([client.get_experiment_by_name("cpvt_det").experiment_id])
    assert run.info.status == "FINISHED" and "total_loss" in run.data.metrics
    assert "failed" not in (folder / "log.txt").read_text()


def test_a_second_start_that_fails_leaves_the_first_run_as_it_ended(train_with, mlflow, monkeypatch):
    """Of one callback in two runs of a process."""
    package, uri = mlflow
    callback, more = CALLBACK_REGISTRY.get("mlflow")(uri=uri), {"DATASETS__TEST": (), "SOLVER__MAX_ITER": 1}
    train_with("builtin", "first", callback, **more)
    with monkeypatch.context() as patch:
        patch.setattr(package.MlflowClient, "get_experiment_by_name", fail(OSError("no route to host")))
        with pytest.raises(ConfigError):
            train_with("builtin", "second", callback, **more)
    client = package.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("cpvt_det").experiment_id])
    assert run.info.status == "FINISHED"


def test_a_resumed_run_is_the_same_run_of_mlflow(train, mlflow):
    package, uri = mlflow
    more = {"CALLBACKS": [["mlflow", {"uri": uri}]], "DATASETS__TEST": ()}
    folder = train("run", **more)
    train("run", resume=True, SOLVER__MAX_ITER=8, **more)
    client = package.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("cpvt_det").experiment_id])
    assert {metric.step for metric in client.get_metric_history(run.info.run_id, "total_loss")} == set(range(8))
    assert "failed" not in (folder / "log.txt").read_text()
