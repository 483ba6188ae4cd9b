# SPDX-License-Identifier: Apache-2.0
"""A process of ``scaling.py --processes``: complete training steps with DDP; the first one prints images per second of all."""

import sys
import time

import torch
import torch.distributed as dist

from benchmarks.models import CONFIGS, ORIGINS
from cpvt_det import builders
from cpvt_det.common.structures import Targets
from cpvt_det.config import load_cfg
from cpvt_det.losses import TrainingModel
from cpvt_det.solver.step import wrap_for_processes

SIDE, BATCH, STEPS = 480, 2, 4  # per process


def main(detector_name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    words = ["MODEL.NUM_CLASSES", "80", "SOLVER.IMS_PER_BATCH", str(BATCH * dist.get_world_size())]
    cfg = load_cfg(str(CONFIGS / f"{ORIGINS[detector_name].config.format('peg')}.yaml"), words)
    detector = builders.build_detector(cfg)
    model = wrap_for_processes(TrainingModel(detector, builders.build_criterion(cfg)))
    step = builders.build_step(cfg, model, builders.build_optimizer(cfg, detector), builders.build_schedule(cfg, 1000), seed=0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    samples = [
        {
            "image": torch.randint(256, (3, SIDE, SIDE), dtype=torch.uint8, generator=generator),
            "image_id": number,
            "targets": Targets(torch.randint(80, (10,), generator=generator), 0.2 + 0.2 * torch.rand(10, 4, generator=generator)),
        }
        for number in range(BATCH)
    ]
    step(samples, 0)
    dist.barrier()
    start = time.perf_counter()
    for iteration in range(1, STEPS + 1):
        step(samples, iteration)
    dist.barrier()
    if dist.get_rank() == 0:
        print(STEPS * BATCH * dist.get_world_size() / (time.perf_counter() - start))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
