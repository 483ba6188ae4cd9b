# SPDX-License-Identifier: Apache-2.0
"""Steps that are not finite.

A step whose loss, predictions or gradient are not finite is skipped in all processes: weights, optimiser, running statistics
and average stay unchanged, bit for bit. The log names the images, and `skipped` in `metrics.json` counts such steps. After
`SOLVER.MAX_BAD_STEPS` in a row the run ends with exit code 1; its last checkpoint holds the last good step.
`tests/solver/test_bad_steps.py` covers every kind, with accumulation and in half precision.
"""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tiny import DINO, overrides

from faults.case import Case, Cut, Ending, call
from faults.checkpoints import SHORT
from faults.drawn import call_on, draw


def train(**more: object):
    """Twelve steps with these settings; the log is written after every one."""

    def run(folder: Path) -> Ending:
        settings = {**SHORT, "SOLVER__MAX_ITER": 12, "SOLVER__MAX_BAD_STEPS": 3, **more}
        return call_on(draw(folder / "data", lambda _: None), "train", **settings)

    return run


def little_memory(available: int) -> Callable[[Path], Ending]:
    """Train where that many bytes are available."""

    def act(folder: Path) -> Ending:
        with mock.patch("cpvt_det.common.memory.available", return_value=available):
            return train()(folder)

    return act


def resume_spoilt(folder: Path) -> Ending:
    """Diverge at once, and do as the message says."""
    ended = train(SOLVER__BASE_LR=1e30)(folder)
    if ended.code != 1:
        return ended
    drawn = draw(folder / "again", lambda _: None)
    settings = {**SHORT, "SOLVER__MAX_ITER": 12, "SOLVER__MAX_BAD_STEPS": 3, "SOLVER__BASE_LR": 1e-5}
    return call_on(drawn, "train", "--resume", **settings, OUTPUT_DIR=folder / "out")


def nan_bound(folder: Path) -> Ending:
    (folder / "run.yaml").write_text("SOLVER: {CLIP_NORM: .nan}\n")
    words = overrides(draw(folder / "data", lambda _: None).files, folder / "out", **SHORT)
    return call("train", "--config-file", folder / "run.yaml", "--runner", "builtin", *words)


SKIPPED = Cut(
    "solver/step.py", "bad = ~grad_norm.isfinite() | (self.in_a_row >= self.limit)", "bad = torch.zeros_like(grad_norm).bool()"
)

LARGE = {"INPUT__MIN_SIZE_TRAIN": (128,), "INPUT__MAX_SIZE_TRAIN": 256, "SOLVER__MAX_ITER": 6}
OF_TIMM = {f"MODEL__BACKBONE__{key}": value for key, value in {"NAME": "timm/repvgg_a0", "MASK_PADDING": False}.items()}

CASES = [
    Case(
        "a narrow ResNet, whose strided 1x1 convolution oneDNN lets write past its memory",
        train(**LARGE, MODEL__BACKBONE__WIDTH=4, MODEL__BACKBONE__NORM="FrozenBN"),
        "Final checkpoint",
        0,
        guard=Cut("fast/convolution.py", "    if needs_guard(convolution):\n        x, stride", "    if False:\n        x, stride"),
    ),
    Case(
        "the same in a network of timm, of the 3 channels of an image",
        train(**LARGE, **OF_TIMM),
        "Final checkpoint",
        0,
        guard=Cut("models/image_model.py", "guard_strided_1x1(self.backbone)", "pass"),
    ),
    Case(
        "a batch that memory cannot hold, on a CPU",
        little_memory(100_000),
        "the first step does not fit into memory: 2 images on a canvas of ... pixels keep ... GB for the backward pass (measured "
        "on one of them), but only 0.0001 GB of memory are available; ...INPUT.MIN_SIZE_TRAIN",
        guard=Cut("solver/memory_check.py", "if need > CERTAIN * available:", "if False:"),
    ),
    Case(
        "a batch whose images alone memory cannot hold, on a CPU",
        little_memory(20_000),
        "the first step does not fit into memory: 2 images on a canvas of ... pixels take ... GB before anything is computed, but "
        "only 2e-05 GB are available for each process; set a smaller SOLVER.IMS_PER_BATCH, or SOLVER.ACCUMULATE 2",
        guard=Cut("solver/memory_check.py", "if distributed.all_reduce_max(int(taken > available)):", "if False:"),
    ),
    Case(
        "a million pairs of denoising, on a CPU",
        train(**{**DINO, "MODEL__QUERIES__DENOISING": 1_000_000}),
        "MODEL.QUERIES.DENOISING 1000000 makes ... groups of ... queries for the first batch...and their attention mask alone "
        "needs ... GB of the ... GB of memory for each process; set a lower number",
        guard=Cut("solver/memory_check.py", "if distributed.all_reduce_max(int(need > available)):", "if False:"),
    ),
    Case(
        "learning rate of 1e30",
        train(SOLVER__BASE_LR=1e30),
        "is skipped: the predictions are not finite for images ...stopped: 3 steps in a row were not finite "
        "(SOLVER.MAX_BAD_STEPS 3; the log names their images); the last checkpoint, of iteration 0, is good: check these images",
        1,
        guard=SKIPPED,
    ),
    Case(
        "weights that overflow",
        train(SOLVER__BASE_LR=1e39),
        "stopped: the weights are not finite (...) and are not saved",
        1,
        guard=Cut("checkpoint/checkpointer.py", "if broken:", "if False:"),
    ),
    Case(
        "images divided by zero",
        train(MODEL__PIXEL_STD=[0.0, 1.0, 1.0]),
        "Iteration 0 is skipped: the predictions are not finite for images ...stopped: 3 steps in a row were not finite "
        "(SOLVER.MAX_BAD_STEPS 3; the log names their images); there is no checkpoint yet: check these images and "
        "MODEL.PIXEL_STD, and train again with a lower SOLVER.BASE_LR",
        1,
        guard=SKIPPED,
    ),
    Case(
        "a checkpoint of finite weights that give NaN, --resume",
        resume_spoilt,
        "all steps since --resume were bad: check these ...; or remove the last checkpoint, which may be bad, and --resume again",
        1,
        guard=Cut("training/guard.py", "if self._iteration - self._start < self.step.bad_steps.in_a_row:", "if False:"),
    ),
    Case(
        "NaN as a bound of gradients",
        nan_bound,
        "SOLVER.CLIP_NORM must be a finite number, got nan",
        guard=Cut("builders/training.py", "if isinstance(value, float) and not math.isfinite(value):", "if False:"),
    ),
    Case(
        "MAX_BAD_STEPS of 0",
        train(SOLVER__MAX_BAD_STEPS=0),
        "SOLVER.MAX_BAD_STEPS must be at least 1, got 0",
        guard=Cut("builders/training.py", "if solver[key] < 1:", "if False:"),
    ),
]
