# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/clusters.md run as they are written, with a small model and stand-ins for what only a cluster has."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from nodes import ENV, Nodes, family, free_port, steps_of, wait_for
from run_commands import commands
from several import run_group
from test_runner import assert_same_run
from tiny import overrides

from cpvt_det.cli import train

PAGE = ROOT / "docs/clusters.md"
LONG = {"DATASETS__TEST": (), "SOLVER__CHECKPOINT_PERIOD": 1000, "MODEL__BACKBONE__WEIGHTS": ""}
LONG |= {"MODEL__BACKBONE__NORM": "SyncBN", "MODEL__POSITION__NORM": "SyncBN"}
TORCHRUN = """#!{python}
import os, sys
words = " ".join(sys.argv[1:]).replace("--nproc-per-node 8", "--nproc-per-node 1").split()
first = os.environ.get("SLURM_PROCID", os.environ.get("SKYPILOT_NODE_RANK")) == "0"
here = ["--local-addr", "127.0.0.1", "--rdzv-conf", f"is_host={{int(first)}}"]
os.execv("{python}", ["{python}", "-m", "torch.distributed.run", *here, *words, *{pairs!r}])
"""
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
"""A run of slow steps."""
SRUN = """#!/bin/bash
trap 'kill -KILL -- $(sed s/^/-/ step)' TERM
for task in $(seq 0 $((SLURM_NNODES - 1))); do
  SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=$SLURM_NNODES setsid "$@" &
  echo $! >> step
done
wait
"""
"""Starts a task for each machine; at SIGTERM it kills them, as the real one does."""
SCANCEL = """#!/bin/bash
[ "$*" = "--signal=TERM 17" ] && kill -TERM -- $(sed s/^/-/ step)
"""
"""Brings the signal to the tasks."""
SCONTROL = """#!/bin/bash
case "$1" in
  show) echo 127.0.0.1 ;;
  requeue) echo "$2" >> requeued ;;
esac
"""


def blocks(language: str) -> list[str]:
    """The fenced blocks of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def small(files, output: Path, **more) -> list[str]:
    """Words that come after those of the page and so win."""
    return ["--runner", "builtin", "--num-gpus", "0", *overrides(files, output, **{**LONG, **more})]


def resumed_from(run: Path) -> list[int]:
    """Iterations of the checkpoints that a run went on from."""
    log = run / "log.txt"
    return [int(found) for found in re.findall(r"Resumed from .*model_(\d+)\.pth", log.read_text())] if log.exists() else []


def two_machines(files, folder: Path, **more) -> Nodes:
    """The command of the page, as it stands but for host, port and GPUs, with slow steps; it is not started yet."""
    (command,) = (text for text in commands(PAGE) if "torchrun" in text)
    words = shlex.split(command)
    after, options = words[words.index("-m") + 1 :], words[words.index("--max-restarts") :][:2]
    assert words[:6] == ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun", "--nnodes", "2", "--nproc-per-node", "8"]
    assert after[:2] == ["cpvt_det", "train"] and "--resume" in after and words[8:10] == ["--rdzv-backend", "c10d"]
    slow = folder / "slow.py"
    slow.write_text(SLOW)
    run = [slow, *after[1:], *small(files, folder / "run", **more)]
    return Nodes(folder / "printed", run, *options, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


@pytest.mark.parametrize("agent", [False, True], ids=["a process", "a machine"])
def test_when_a_machine_of_the_page_is_lost_the_run_goes_on_from_its_last_step(drawn_coco, tmp_path, agent):
    """Of machine 1, in the middle of the run; where its torchrun is lost too, the same command is given there again."""
    nodes = two_machines(drawn_coco.files, tmp_path, SOLVER__MAX_ITER=8)
    try:
        for number in (0, 1):
            nodes.start(number)
        wait_for(lambda: steps_of(tmp_path / "run") >= 2)
        before = steps_of(tmp_path / "run") - 1
        nodes.kill(1, agent=agent)
        if agent:
            nodes.agents[1].wait()
            nodes.start(1)
        assert [nodes.wait(number) for number in (0, 1)] == [0, 0], nodes.text(0)[-3000:]
    finally:
        nodes.stop()
    (resumed,) = resumed_from(tmp_path / "run")
    assert resumed >= before  # no step is lost
    (command,) = (text for text in commands(PAGE) if "torchrun" in text)
    words = shlex.split(command)
    whole = [*words[words.index("-m") + 2 :], *small(drawn_coco.files, tmp_path / "whole", SOLVER__MAX_ITER=8)]
    assert [one.code for one in run_group(tmp_path / "whole_printed", whole)] == [0, 0]
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_when_the_first_machine_of_the_page_is_lost_the_same_command_goes_on_from_the_last_checkpoint(drawn_coco, tmp_path):
    more = {"SOLVER__MAX_ITER": 9, "SOLVER__CHECKPOINT_PERIOD": 2}
    nodes = two_machines(drawn_coco.files, tmp_path, **more)
    try:
        for number in (0, 1):
            nodes.start(number)
        wait_for(lambda: steps_of(tmp_path / "run") >= 3)
        nodes.kill(0)
        nodes.agents[0].wait()
        assert nodes.wait(1) != 0
        before = steps_of(tmp_path / "run") - 1
        for number in (0, 1):
            nodes.start(number)
        assert [nodes.wait(number) for number in (0, 1)] == [0, 0], nodes.text(0)[-3000:]
    finally:
        nodes.stop()
    (resumed,) = resumed_from(tmp_path / "run")
    assert before - 2 <= resumed <= before  # no more than a period is lost


@pytest.fixture
def cluster(tmp_path, drawn_coco):
    """Variables of a job of two machines, and stand-ins on the path; their torchrun trains a small model in ``tmp_path/run``."""
    pairs = small(drawn_coco.files, tmp_path / "run", SOLVER__MAX_ITER=10_000)
    torchrun = TORCHRUN.format(python=sys.executable, pairs=pairs)
    for name, text in {"torchrun": torchrun, "srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    job = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[a-b]", "PYTHONPATH": os.environ["PYTHONPATH"]}
    job |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    return {**ENV, **job, "SKYPILOT_TASK_ID": "sky-1", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def signal_families(signum: int, *pids: int) -> None:
    """Send a signal to processes and to all that they have started; torchrun's have groups of their own."""
    for one in [one for pid in pids for one in family(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signum)


def test_the_slurm_job_of_the_page_saves_at_its_end_and_queues_itself_again(cluster, tmp_path):
    """With two machines of one process. The signal comes to the script, as ``--signal=B:TERM`` sends it."""
    job = next(block for block in blocks("bash") if "#SBATCH" in block)
    script = tmp_path / "job.sh"
    script.write_text(job.replace(":29500", f":{free_port()}"))
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen(["bash", script], cwd=tmp_path, env=cluster, stderr=printed, start_new_session=True)
    try:
        wait_for(lambda: steps_of(tmp_path / "run") >= 1)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        signal_families(signal.SIGKILL, process.pid)
    told = (tmp_path / "printed").read_text()
    assert "2 process(es)" in told
    assert re.search(r"interrupted by SIGTERM: iteration \d+ is saved; --resume continues", told), told
    assert (tmp_path / "requeued").read_text() == "17\n"
    assert len(list((tmp_path / "run").glob("model_*.pth"))) == 1


def test_the_other_lines_of_the_page_are_read(cluster):
    """By torchrun's parser, and what is after it by ours: SkyPilot's ``run`` on machines of 8 GPUs; ``srun`` without torchrun."""
    from torch.distributed.run import config_from_args, parse_args

    (task,) = blocks("yaml")
    run, env = yaml.safe_load(task)["run"].replace("torchrun", "echo"), {**cluster, "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    line = subprocess.run(["bash", "-c", run], env=env, capture_output=True, text=True)
    args = parse_args(shlex.split(line.stdout))
    config, _, words = config_from_args(args)
    assert (config.min_nodes, config.nproc_per_node, config.rdzv_endpoint, config.run_id) == (2, 8, "127.0.0.1:29500", "sky-1")
    alone = next(block for block in blocks("bash") if "#SBATCH" not in block).replace("srun --ntasks-per-node 8", "echo")
    line = subprocess.run(["bash", "-c", f"{alone}\necho $MASTER_ADDR $MASTER_PORT"], env=cluster, capture_output=True, text=True)
    command, address = line.stdout.splitlines()
    assert address == "127.0.0.1 29500" and command.startswith("python -m cpvt_det train ")
    for own in (words[words.index("train") + 1 :], command.split()[4:]):
        assert train.train.make_context("train", list(own)).params["resume"]
