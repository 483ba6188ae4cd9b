# SPDX-License-Identifier: Apache-2.0
"""Resume and signals.

Data order, augmentation and dropout follow from seed and iteration, so a resumed run equals the uninterrupted one, bit for bit on
a CPU with the same number of threads: losses, weights, average, optimiser, scaler, best AP and seed.

| interrupted | settings | runner | test |
|:--|:--|:--|:--|
| inside an epoch, at its border, at the end | dropout, augmentation, 2 accumulated parts, EMA | builtin | `test_runner.py` |
| after step 3 of 6 | float16 with its scaler, 2 workers, best AP, evaluations between | builtin | `test_resume.py` |
| by SIGTERM, to the run and its 2 workers | no checkpoint but the signal's | builtin, detectron2 | `test_interruption.py` |
| by SIGTERM within an evaluation | the evaluation is repeated | builtin, detectron2 | `test_interruption.py` |
| after step 3, then continued in the other runner | dropout, EMA | builtin to detectron2 and back | `test_detectron2.py` |
| by kill -9 of one of two processes, restarted by torchrun | synchronised norms | builtin, detectron2 | `test_processes.py` |
| by kill -9 of either of two processes, in a step | synchronised norms; process 0 saves | builtin | `test_lost_processes.py` |

A first SIGTERM or Ctrl-C finishes the step, saves and ends with exit code 143 or 130; a second one (at least half a second
later, 15 seconds under torchrun) ends everything at once. The last complete step is also saved when an error ends the run.
"""

import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from nodes import wait_for

from cpvt_det.data.mapper import Mapper
from cpvt_det.data.records import ImageRecord
from cpvt_det.solver.step import TrainStep
from faults.case import Case, Cut, Ending
from faults.checkpoints import FINAL, SHORT, after_run, nothing
from faults.drawn import call_on, draw


def signalled(signum: int) -> Callable[[Path], Ending]:
    """Send a signal in the middle of the second step."""
    real = TrainStep.__call__

    def step(self: TrainStep, samples: list, iteration: int) -> dict:
        if iteration == 1:
            os.kill(os.getpid(), signum)
        return real(self, samples, iteration)

    def run(folder: Path) -> Ending:
        with mock.patch.object(TrainStep, "__call__", step):
            return call_on(draw(folder / "data", lambda _: None), "train", **{**SHORT, "SOLVER__MAX_ITER": 9})

    return run


def waiting(workers: int) -> Callable[[Path], Ending]:
    """SIGTERM while the third step waits for an image, which comes some seconds later; without workers, while it is read."""
    real_read, real_step = Mapper.__call__, TrainStep.__call__

    def run(folder: Path) -> Ending:
        process, reads, steps = os.getpid(), itertools.count(), multiprocessing.Value("i", 0)

        def read(self: Mapper, record: ImageRecord) -> dict:
            if next(reads) == 4:
                wait_for(lambda: steps.value == 2, what="the second step")
                threading.Timer(0.5, os.kill, (process, signal.SIGTERM)).start()
                time.sleep(6)
            return real_read(self, record)

        def step(self: TrainStep, samples: list, iteration: int) -> dict:
            scalars = real_step(self, samples, iteration)
            steps.value += 1
            return scalars

        with mock.patch.object(Mapper, "__call__", read), mock.patch.object(TrainStep, "__call__", step):
            words = {**SHORT, "SOLVER__MAX_ITER": 9, "SOLVER__CHECKPOINT_PERIOD": 9, "DATALOADER__NUM_WORKERS": workers}
            return call_on(draw(folder / "data", lambda _: None), "train", **words)

    return run


def classes(folder: Path) -> Ending:
    ending = after_run(nothing)(folder)
    if ending.code:
        return ending
    other = draw(folder / "other", lambda drawn: drawn.content["categories"][0].update(name="worm"))
    return call_on(other, "train", "--resume", **{**SHORT, "OUTPUT_DIR": folder / "out"})


def box_less(folder: Path) -> Ending:
    ending = after_run(nothing)(folder)
    if ending.code:
        return ending
    other = draw(folder / "other", lambda drawn: drawn.content["annotations"].pop())
    return call_on(other, "train", "--resume", **{**SHORT, "OUTPUT_DIR": folder / "out"})


def unreadable(folder: Path) -> Ending:
    """All images become unreadable in the third step."""
    drawn = draw(folder / "data", lambda _: None)
    real = TrainStep.__call__

    def step(self: TrainStep, samples: list, iteration: int) -> dict:
        if iteration == 2:
            for image_id in range(1, 5):
                drawn.path(image_id).write_bytes(b"x")
        return real(self, samples, iteration)

    with mock.patch.object(TrainStep, "__call__", step):
        return call_on(drawn, "train", **{**SHORT, "SOLVER__MAX_ITER": 9, "SOLVER__CHECKPOINT_PERIOD": 9})


def without_metrics(folder: Path) -> Ending:
    return after_run(lambda out: (out / "metrics.json").unlink(), "--resume")(folder)


def without_the_final_one(folder: Path) -> Ending:
    """As of a run that was killed after its last step, before the final checkpoint."""

    def unlink(out: Path) -> None:
        (out / FINAL).unlink()
        (out / "last_checkpoint").write_text("model_0000001.pth")

    ending = after_run(unlink, "--resume")(folder)
    named = re.search(r"Final checkpoint[^:]*: (\S+\.pth)", ending.text)
    assert named and Path(named[1]).is_file(), f"names a checkpoint that does not exist: {ending.text}"
    return ending


AT_ONCE = Cut("training/guard.py", "self._signals.at_once if distributed.world_size() == 1 else contextlib", "contextlib")
OBEYED = (Cut("training/train.py", "guard.obey_signals()\n", "pass\n"), AT_ONCE)

SHORTER = Cut("training/train.py", "if start > length.max_iter:", "if False:")

CASES = [
    Case(
        "SIGTERM",
        signalled(signal.SIGTERM),
        "interrupted by SIGTERM: iteration 1 is saved; --resume continues after it",
        143,
        guard=OBEYED,
    ),
    Case(
        "Ctrl-C",
        signalled(signal.SIGINT),
        "interrupted by SIGINT: iteration 1 is saved; --resume continues after it",
        130,
        guard=OBEYED,
    ),
    Case(
        "SIGTERM while a step waits for a data worker",
        waiting(1),
        "interrupted by SIGTERM: iteration 1 is saved; --resume continues after it",
        143,
        guard=AT_ONCE,
    ),
    Case(
        "SIGTERM while an image is read without data workers",
        waiting(0),
        "interrupted by SIGTERM: iteration 1 is saved; --resume continues after it",
        143,
        guard=AT_ONCE,
    ),
    Case(
        "images that become unreadable in the third step",
        unreadable,
        "Iteration 2 is saved; --resume continues after it...error: cannot read image ",
        guard=Cut("training/guard.py", "if isinstance(error, Exception) and whole and", "if False and"),
    ),
    Case(
        "--resume of a finished run without its metrics.json",
        without_metrics,
        "No curves are drawn: no line of ",
        0,
        guard=Cut("training/evaluate.py", "except DataError as error:", "except ZeroDivisionError as error:"),
    ),
    Case(
        "--resume with another learning rate",
        after_run(nothing, "--resume", SOLVER__BASE_LR=0.001),
        "The config of the resumed run has changed: SOLVER.BASE_LR was 0.0001, is 0.001",
        0,
        guard=Cut("checkpoint/checkpointer.py", 'logger.warning("The config of the resumed run has changed: %s", change)', "pass"),
    ),
    Case(
        "--resume with fewer iterations than the run has",
        after_run(nothing, "--resume", SOLVER__MAX_ITER=1),
        "has 2 iterations already, and the config asks for 1 (SOLVER.MAX_ITER = 1 iterations of 2 images / 4 images = 0.5 epochs): "
        "nothing is left to train. A larger SOLVER.MAX_ITER trains longer, --eval-only --resume evaluates",
        guard=SHORTER,
    ),
    Case(
        "--resume with a larger batch, which makes the epochs shorter",
        after_run(nothing, "--resume", SOLVER__EPOCHS=1, SOLVER__IMS_PER_BATCH=4),
        "A run counts iterations, not images...has 2 iterations already, and the config asks for 1 (1 epochs x 4 images / 4 images "
        "per iteration = 1 iterations...): nothing is left to train. A larger SOLVER.EPOCHS, or a smaller SOLVER.IMS_PER_BATCH, "
        "trains longer",
        guard=SHORTER,
    ),
    Case(
        "--resume with a smaller batch",
        after_run(nothing, "--resume", SOLVER__MAX_ITER=3, SOLVER__IMS_PER_BATCH=1),
        "SOLVER.IMS_PER_BATCH was 2, is 1...A run counts iterations, not images: with a different SOLVER.IMS_PER_BATCH its "
        "images and the number of epochs change",
        0,
        guard=Cut("checkpoint/checkpointer.py", 'if change.startswith("SOLVER.IMS_PER_BATCH "):', "if False:"),
    ),
    Case(
        "--resume of a run killed between its last step and its final checkpoint",
        without_the_final_one,
        "Final checkpoint (nothing was evaluated): ",
        0,
        guard=Cut("training/train.py", "            elif start == length.max_iter:\n", "            elif False:\n"),
    ),
    Case(
        "--resume with another width",
        after_run(nothing, "--resume", MODEL__DETR__HIDDEN_DIM=32),
        "MODEL.DETR.HIDDEN_DIM was 16, is 32...cannot be resumed, because it does not match the model in the config",
        guard=Cut(
            "checkpoint/checkpointer.py",
            "except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:",
            "except ZeroDivisionError as error:",
        ),
    ),
    Case(
        "--resume with a box less in the training data",
        box_less,
        "The training data of the resumed run has changed: 4 images before, 4 now",
        0,
        guard=Cut("checkpoint/checkpointer.py", "if before != self.data:", "if False:"),
    ),
    Case(
        "--resume with other classes",
        classes,
        "the run to resume was trained on different classes (2: cell, mite)",
        guard=Cut("checkpoint/checkpointer.py", "if names != self.classes.names:", "if False:"),
    ),
]
