# SPDX-License-Identifier: Apache-2.0
"""Two machines on the loopback, killed again and again at random moments; at the end the weights are those of an unhurt run.

``benchmarks/kills.py`` counts and records.
"""

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

import torch
from conftest import draw_coco
from nodes import Nodes, is_alive, wait_for
from several import end_group, start_group
from tiny import overrides

from cpvt_det.checkpoint.files import read_checkpoint

STORE = "machine 0, with the store"
STARTING = "torchrun 1, and machine 0, with the store, while the next torchrun 1 starts"
KINDS = ("process 0", "process 1", "machine 1", "torchrun 1", STORE, STARTING)
READ_TIMEOUT = 6  # seconds that a torchrun waits for the store at its start, and for its answers; torch's own 60 are too many here
LIMIT = 1800  # seconds for what takes some: the machine may be busy with other work
STEPS = 10  # of a run, for each time that it is killed
SLOW = """
import time
from pathlib import Path
import cpvt_det.runner.launch, cpvt_det.runner.train
import cpvt_det.solver.step as step
real = step.TrainStep.__call__
def call(self, *arguments):
    time.sleep(0.2)
    return real(self, *arguments)
step.TrainStep.__call__ = call
from cpvt_det.cli import main
with Path(__file__).with_name("imported").open("a") as file:
    file.write(f"{time.time()}\\n")
main()
"""
"""A run of slow steps, which writes down when it had imported everything."""


class Kill(NamedTuple):
    """What was killed, and what came of it.

    Attributes:
        kind: one of ``KINDS``.
        before: last iteration in ``metrics.json`` at that moment.
        resumed: iteration of the checkpoint from which the run went on.
        hurt_ended: seconds until all earlier processes had saved and ended.
        imported: seconds until new ones had started and had imported torch; ``None`` where the store was lost.
        seconds: seconds until the run went on with a new step, or, where the store was lost, until the other torchrun had ended.
        went_on: whether the run went on by itself; where the store is lost the same command is given again.
        load: processes that wanted a core of the machine then, the average of a minute.
        cores: number of its cores.
    """

    kind: str
    before: int
    resumed: int
    hurt_ended: float
    imported: float | None
    seconds: float
    went_on: bool
    load: float
    cores: int


def kill_again_and_again(kills: int, folder: Path, draw: random.Random) -> tuple[list[Kill], bool]:
    """Kill one run ``kills`` times, each time in the middle of the steps that it goes on with.

    Returns:
        The kills; and whether the run ended with the weights, average and optimizer of a run that is left alone.
    """
    killed = []
    folder.mkdir(parents=True)
    files, config, script = draw_coco(folder).files, folder / "run.yaml", folder / "slow.py"
    config.write_text("VERSION: 2\n")
    script.write_text(SLOW)
    more = {"MODEL__BACKBONE__NORM": "SyncBN", "MODEL__POSITION__NORM": "SyncBN", "SOLVER__EMA__ENABLED": True}
    more |= {"SOLVER__MAX_ITER": STEPS * kills, "SOLVER__CHECKPOINT_PERIOD": 10_000, "DATASETS__TEST": ()}

    def words(name: str) -> list[str]:
        options = ["--num-gpus", "0", "--config-file", str(config), "--runner", "builtin", "--resume"]
        return ["train", *options, *overrides(files, folder / name, **more)]

    alone = end_group(folder / "left_alone", start_group(folder / "left_alone", words("whole")), LIMIT)
    assert [one.code for one in alone] == [0, 0], alone
    options, env = ["--max-restarts", "100"], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    nodes = Nodes(folder / "printed", [script, *words("hurt")], *options, conf=f"read_timeout={READ_TIMEOUT}", **env)
    try:
        for number in (0, 1):
            nodes.start(number)
        wait_for(lambda: len(steps_taken(folder / "hurt")) > 0, LIMIT, "the first step")
        for _ in range(kills):
            time.sleep(draw.uniform(0, 1))
            killed.append(_kill(nodes, draw.choice(KINDS), draw.uniform(0, 1), folder / "hurt"))
            print(json.dumps(killed[-1]._asdict()), flush=True)
        assert [nodes.wait(number, LIMIT) for number in (0, 1)] == [0, 0], nodes.text(0)[-2000:] + nodes.text(1)[-2000:]
    finally:
        nodes.stop()
    return killed, _same(folder / "hurt/model_final.pth", folder / "whole/model_final.pth")


def steps_taken(run: Path) -> list[int]:
    """Iterations in ``metrics.json`` of a run, in the order in which they were taken."""
    metrics = run / "metrics.json"
    return [int(found) for found in re.findall(r'"iteration": (\d+)', metrics.read_text())] if metrics.exists() else []


def resumed_from(run: Path) -> list[int]:
    """Iterations of the checkpoints that a run went on from."""
    log = run / "log.txt"
    return [int(found) for found in re.findall(r"Resumed from .*model_(\d+)\.pth", log.read_text())] if log.exists() else []


def _kill(nodes: Nodes, kind: str, moment: float, run: Path) -> Kill:
    """Kill, give the same command again where a torchrun has gone, and wait until the run goes on."""
    hurt = {pid for number in (0, 1) for pid in nodes.workers(number)}
    rounds, before, start = len(resumed_from(run)), max(steps_taken(run)), time.time()
    if kind in ("torchrun 1", STARTING):
        nodes.agents[1].kill()
    elif kind != STORE:
        nodes.kill(int(kind[-1]), signal.SIGKILL, agent=kind.startswith("machine"))
    if kind in ("machine 1", "torchrun 1", STARTING):
        nodes.agents[1].wait()
        nodes.start(1)
    store_is_lost = kind in (STORE, STARTING)
    if store_is_lost:
        time.sleep(moment if kind == STARTING else 0)
        before, start = max(steps_taken(run)), time.time()
        nodes.kill(0, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, hurt)), LIMIT, "the processes to end")
    hurt_ended, imported = time.time() - start, None
    if store_is_lost:
        nodes.agents[0].wait()
        nodes.wait(1, LIMIT)
        seconds = time.time() - start
        for number in (0, 1):
            nodes.start(number)
    wait_for(lambda: len(resumed_from(run)) > rounds, LIMIT, "the run to go on")
    taken = len(steps_taken(run))
    wait_for(lambda: len(steps_taken(run)) > taken, LIMIT, "the next step")
    if not store_is_lost:
        seconds = time.time() - start
        imported = round(max(map(float, (run.parent / "imported").read_text().split())) - start, 1)
    resumed, load = min(resumed_from(run)[rounds:]), round(os.getloadavg()[0], 1)
    return Kill(kind, before, resumed, round(hurt_ended, 1), imported, round(seconds, 1), not store_is_lost, load, os.cpu_count())


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
