# SPDX-License-Identifier: Apache-2.0
"""One process of a run that the tests of several processes look at, and what it does.

``steps``: 20 real steps on drawn batches in float64, and what they came to in ``FOLDER/<processes>.pth``. ``spoilt``: the same
with a pixel that is no number in the second step, in one process only.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from test_solver import tiny_cfg
from tiny import DETECTORS, DFINE, DINO, RTDETR

from cpvt_det import builders
from cpvt_det.common import distributed
from cpvt_det.common.structures import Targets
from cpvt_det.layers.norm import MaskedSyncBatchNorm2d
from cpvt_det.losses import TrainingModel
from cpvt_det.solver.optimizer import TrainingSchedule
from cpvt_det.solver.step import wrap_for_processes
from cpvt_det.training.launch import launch, process_group

STEPS, BATCH = 20, 4
REAL_TIME = {"MODEL__QUERIES__DENOISING": 0, "MODEL__DETECTOR__NORM": "SyncBN"}
KINDS = {
    **DETECTORS,
    "dino": DINO,
    "without noise": {**DINO, "MODEL__QUERIES__DENOISING": 0},
    "dfine": {**DFINE, **REAL_TIME},
    "rtdetr": {**RTDETR, **REAL_TIME},
}


def batch_of(iteration):
    """Four images in float64. Only the first two, those of the first of two processes, have objects."""
    generator = torch.Generator().manual_seed(iteration)
    samples = []
    for number in range(BATCH):
        height, width = 24 + 5 * ((number + iteration) % 4), 40 - 3 * number
        count = (number + 1) * (number < 2)
        boxes = torch.rand(count, 4, generator=generator, dtype=torch.float64) * 0.4 + 0.2
        labels = torch.randint(3, (count,), generator=generator)
        image = torch.randint(256, (3, height, width), generator=generator).double()
        samples.append({"image": image, "image_id": 100 + number, "targets": Targets(labels, boxes)})
    return samples


def take_steps(folder, detector, spoilt):
    """Real steps, by the classes that runs take; float64 is the only switch."""
    torch.set_num_threads(1)
    cfg = tiny_cfg(
        MODEL__BACKBONE__NORM="SyncBN",
        MODEL__POSITION__NORM="SyncBN",
        MODEL__DETR__DROPOUT=0.0,
        SOLVER__EMA__ENABLED=True,
        SOLVER__EMA__DECAY=0.5,
        SOLVER__BASE_LR=1e-3,
        **KINDS[detector],
    )
    torch.manual_seed(0)
    model = builders.build_detector(cfg).double()
    for name, parameter in model.named_parameters():
        if name.endswith("sampling_offsets.bias"):  # away from whole cells, where an interpolation has two gradients
            parameter.data += torch.randn_like(parameter) * 0.3
    assert any(isinstance(module, MaskedSyncBatchNorm2d) for module in model.modules())
    ema = builders.build_ema(cfg, model)
    wrapped = wrap_for_processes(TrainingModel(model, builders.build_criterion(cfg)))
    step = builders.build_step(cfg, wrapped, builders.build_optimizer(cfg, model), TrainingSchedule(STEPS, (), 0, 0, ""), 0, ema)
    share = BATCH // distributed.world_size()
    totals = []
    for iteration in range(STEPS):
        samples = batch_of(iteration)
        if spoilt and iteration == 1:
            samples[3]["image"][0, 2, 2] = torch.nan
        own = samples[distributed.rank() * share : (distributed.rank() + 1) * share]
        record = step(own, iteration)
        totals.append(distributed.all_reduce_sum(record["total_loss"]) / distributed.world_size())
        names = distributed.gather_objects(sorted(record))
        assert all(found == names[0] for found in names), names
    step.bad_steps.report()
    if distributed.rank() == 0:
        result = {"losses": torch.stack(totals), "model": model.state_dict(), "ema": ema.state_dict()}
        torch.save({**result, "skipped": step.bad_steps.state_dict()["total"]}, folder / f"{distributed.world_size()}.pth")


def _work(job, folder, detector):
    with process_group(60):
        take_steps(Path(folder), detector, spoilt=job == "spoilt")


def start(job, folder, detector):
    """Do a job in this process, one of those of the environment's variables, as ``cpvt-det train`` does its own."""
    launch(_work, 0, job, folder, detector)
    assert not dist.is_initialized()
