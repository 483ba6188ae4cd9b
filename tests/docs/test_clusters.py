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
from nodes import ENV, Nodes, free_port, steps_of, wait_for
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
os.execv("{python}", ["{python}", "-m", "torch.distributed.run", *words, *{pairs!r}])
"""
SRUN = """#!/bin/bash
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=1
exec "$@"
"""
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


def test_the_two_machines_of_the_page_go_on_when_one_is_lost(drawn_coco, tmp_path):
    """As it stands but for host, port and GPUs. Machine 1 is lost in the middle of the run; a new one starts the same command."""
    (command,) = (text for text in commands(PAGE) if "torchrun" in text)
    words = shlex.split(command)
    after = words[words.index("-m") + 1 :]
    options = words[words.index("--max-restarts") :][:2]
    assert words[:6] == ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun", "--nnodes", "2", "--nproc-per-node", "8"]
    assert after[:2] == ["cpvt_det", "train"] and "--resume" in after and words[8:10] == ["--rdzv-backend", "c10d"]
    slow = tmp_path / "slow.py"
    slow.write_text((ROOT / "tests/faults/random_kills.py").read_text().split('SLOW = """')[1].split('"""')[0])
    run = [slow, *after[1:], *small(drawn_coco.files, tmp_path / "hurt", SOLVER__MAX_ITER=8)]
    nodes = Nodes(tmp_path / "printed", run, *options, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        for number in (0, 1):
            nodes.start(number)
        wait_for(lambda: steps_of(tmp_path / "hurt") >= 2)
        nodes.kill(1)
        nodes.agents[1].wait()
        nodes.start(1)
        assert [nodes.wait(number) for number in (0, 1)] == [0, 0], nodes.text(0)[-3000:]
    finally:
        nodes.stop()
    assert "died or lost its machine; iteration" in nodes.text(0)
    whole = [*after[1:], *small(drawn_coco.files, tmp_path / "whole", SOLVER__MAX_ITER=8)]
    assert [one.code for one in run_group(tmp_path / "whole_printed", whole)] == [0, 0]
    assert_same_run(tmp_path / "hurt", tmp_path / "whole")


@pytest.fixture
def cluster(tmp_path, drawn_coco, monkeypatch):
    """A folder with stand-ins for Slurm on the path, whose torchrun trains a small model in ``tmp_path/run``."""
    pairs = small(drawn_coco.files, tmp_path / "run", SOLVER__MAX_ITER=10_000)
    stands = {"torchrun": TORCHRUN.format(python=sys.executable, pairs=pairs), "srun": SRUN, "scontrol": SCONTROL}
    for name, text in stands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    job = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node-[a-b]", "PYTHONPATH": os.environ["PYTHONPATH"]}
    return {**ENV, **job, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def test_the_slurm_job_of_the_page_saves_at_its_end_and_queues_itself_again(cluster, tmp_path):
    """With one machine of one process. The signal comes to the script, as ``--signal=B:TERM`` sends it."""
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    told = (tmp_path / "printed").read_text()
    assert re.search(r"interrupted by SIGTERM: iteration \d+ is saved; --resume continues", told), told
    assert (tmp_path / "requeued").read_text() == "17\n"
    assert len(list((tmp_path / "run").glob("model_*.pth"))) == 1


def test_the_other_lines_of_the_page_are_read(cluster, monkeypatch):
    """By torchrun's parser, and what is after it by ours: the ``run`` of SkyPilot, and ``srun`` without torchrun."""
    from torch.distributed.run import config_from_args, parse_args

    for name, value in {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_TASK_ID": "sky-1"}.items():
        cluster[name] = value
    (task,) = blocks("yaml")
    run = yaml.safe_load(task)["run"].replace("torchrun", "echo")
    line = subprocess.run(["bash", "-c", run], env={**cluster, "SKYPILOT_NUM_GPUS_PER_NODE": "8"}, capture_output=True, text=True)
    args = parse_args(shlex.split(line.stdout))
    config, _, words = config_from_args(args)
    assert (config.min_nodes, config.nproc_per_node, config.rdzv_endpoint, config.run_id) == (2, 8, "10.0.0.1:29500", "sky-1")
    alone = next(block for block in blocks("bash") if "#SBATCH" not in block).replace("srun --ntasks-per-node 8", "echo")
    line = subprocess.run(["bash", "-c", f"{alone}\necho $MASTER_ADDR $MASTER_PORT"], env=cluster, capture_output=True, text=True)
    command, address = line.stdout.splitlines()
    assert address == "127.0.0.1 29500" and command.startswith("python -m cpvt_det train ")
    for own in (words[words.index("train") + 1 :], command.split()[4:]):
        assert train.train.make_context("train", list(own)).params["resume"]
