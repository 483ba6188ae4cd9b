# SPDX-License-Identifier: Apache-2.0
"""A few of our training steps with PEG in a separate process, for settings that are read when a process starts."""

import json
import statistics
import sys

from benchmarks.clocks import ProcessClock
from benchmarks.suites.model import DEFORMABLE, DETR, PASSES, Shape, make_contender, make_inputs, our_model

STEPS = 5


def main(detector: str, side: int, batch: int) -> None:
    recipe = DETR if detector == DETR.detector else DEFORMABLE
    shape = Shape(recipe, (side, side), batch, PASSES[1])
    contender = make_contender(shape, *make_inputs(shape, "cpu"), "cpvt_det PEG", our_model(recipe, position="peg"))
    output = {name: float(value.norm()) for name, value in contender.output().items()}
    clock = ProcessClock()
    clock.time(contender.call, 1)
    samples = [clock.time(contender.call, 1) for _ in range(STEPS)]
    wall, cpu = (statistics.median(values) for values in zip(*((one.wall, one.cpu) for one in samples), strict=True))
    print(json.dumps({"wall": wall, "cpu": cpu, "output": output}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
