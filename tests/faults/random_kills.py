# SPDX-License-Identifier: Apache-2.0
"""Two machines on the loopback, killed again and again at random moments; at the end the weights are those of an unhurt run.

``benchmarks/kills.py`` counts and records.
"""

import random
import signal
import time
from pathlib import Path

import torch
from conftest import draw_coco
from nodes import Nodes, steps_of, wait_for
from several import end_group, start_group
from tiny import overrides

from cpvt_det.checkpoint.files import read_checkpoint

KINDS = ("process 0", "process 1", "machine 1", "torchrun 1", "machine 0, with the store")
LIMIT = 1800  # seconds for what takes some: the machine may be busy with other work
STEPS = 10  # of a run, for each time that it is killed
SLOW = """
import time
import cpvt_det.solver.step as step
real = step.TrainStep.__call__
def call(self, *arguments):
    time.sleep(0.2)
    return real(self, *arguments)
step.TrainStep.__call__ = call
from cpvt_det.cli import main
main()
"""


def kill_again_and_again(kills: int, folder: Path, draw: random.Random) -> tuple[list[str], bool]:
    """Kill one run ``kills`` times.

    Returns:
        What was killed; and whether the run ended with the weights, average and optimizer of a run that is left alone.
    """
    killed = []
    folder.mkdir(parents=True)
    files, config, script = draw_coco(folder).files, folder / "run.yaml", folder / "slow.py"
    config.write_text("VERSION: 2\n")
    script.write_text(SLOW)
    more = {"MODEL__BACKBONE__NORM": "SyncBN", "MODEL__POSITION__NORM": "SyncBN", "SOLVER__EMA__ENABLED": True}
    more |= {"SOLVER__MAX_ITER": STEPS * kills, "SOLVER__CHECKPOINT_PERIOD": 10_000, "DATASETS__TEST": ()}

    def words(name: str) -> list[str]:
        options = ["--num-gpus", "0", "--config-file", str(config), "--runner", "builtin"]
        return ["train", *options, *overrides(files, folder / name, **more)]

    alone = end_group(folder / "left_alone", start_group(folder / "left_alone", words("whole")), LIMIT)
    assert [one.code for one in alone] == [0, 0], alone
    nodes = Nodes(folder / "printed", [script, *words("hurt")], "--max-restarts", "100", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        for number in (0, 1):
            nodes.start(number)
        for number in range(kills):
            before = steps_of(folder / "hurt")
            wait_for(lambda before=before: steps_of(folder / "hurt") > before, LIMIT, "the next step")
            time.sleep(draw.uniform(0, 1))
            killed.append(draw.choice(KINDS))
            _kill(nodes, killed[-1], number)
        assert [nodes.wait(number, LIMIT) for number in (0, 1)] == [0, 0], nodes.text(0)[-2000:] + nodes.text(1)[-2000:]
    finally:
        nodes.stop()
    return killed, _same(folder / "hurt/model_final.pth", folder / "whole/model_final.pth")


def _kill(nodes: Nodes, kind: str, number: int) -> None:
    start = time.monotonic()
    machine = int(kind.split(",")[0][-1])
    if kind.startswith("torchrun"):
        nodes.agents[machine].kill()
    else:
        nodes.kill(machine, signal.SIGKILL, agent=kind.startswith("machine"))
    if not kind.startswith("process"):
        nodes.agents[machine].wait()
        if machine == 0:  # nobody can go on without the store: the same command with --resume
            nodes.wait(1, LIMIT)
            nodes.words += [] if "--resume" in nodes.words else ["--resume"]
            print(f"{number}: {kind}: machine 1 ended after {time.monotonic() - start:.0f} s", flush=True)
            nodes.start(1)
        nodes.start(machine)
    print(f"{number}: {kind}", flush=True)


def _same(one: Path, two: Path) -> bool:
    first, second = (read_checkpoint(path) for path in (one, two))
    states = [(a["model"], a["cpvt_det"]["ema"], a["trainer"]["_trainer"]["optimizer"]["state"]) for a in (first, second)]
    return all(map(_equal, *states))


def _equal(one: dict, two: dict) -> bool:
    return one.keys() == two.keys() and all(
        _equal(one[key], two[key])
        if isinstance(one[key], dict)
        else torch.equal(torch.as_tensor(one[key]), torch.as_tensor(two[key]))
        for key in one
    )
