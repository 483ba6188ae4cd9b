# SPDX-License-Identifier: Apache-2.0
"""Two machines on the loopback: a torchrun each, that can be killed, frozen and started again."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ENV = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def children(pid: int) -> list[int]:
    """The processes that a process has started, by pid."""
    found = [line.split() for line in subprocess.run(["ps", "-eo", "ppid,pid"], capture_output=True, text=True).stdout.splitlines()]
    return [int(child) for parent, child in found[1:] if int(parent) == pid]


def family(pid: int) -> list[int]:
    """A process, those that it has started, and those that these have started."""
    return [pid, *(one for child in children(pid) for one in family(child))]


def steps_of(folder: Path) -> int:
    """How many steps of a run are written down."""
    metrics = folder / "metrics.json"
    return metrics.read_text().count("total_loss") if metrics.exists() else 0


def wait_for(condition, seconds: float = 120, what: str = "it") -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)


class Nodes:
    """Machines by number, each a torchrun with one process; number 0 has the store. They print to ``<folder>/<number>.txt``.

    Args:
        folder: folder for what they print.
        words: command after torchrun's options.
        options: options of torchrun.
        env: further environment variables.
    """

    def __init__(self, folder: Path, words: list, *options: str, **env: str):
        self.folder, self.words, self.options = folder, [str(word) for word in words], options
        self.env = {**ENV, **env}
        self.port = free_port()
        self.agents: dict[int, subprocess.Popen] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, number: int, **env: str) -> None:
        """Start a machine, for the first time or again."""
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--local-addr", "127.0.0.1"]
        where += ["--rdzv-conf", f"is_host={int(number == 0)}"]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *where]
        with self.printed(number).open("ab") as file:
            agent = [*command, *self.options, *self.words]
            self.agents[number] = subprocess.Popen(agent, env={**self.env, **env}, stderr=file, stdout=file, start_new_session=True)

    def printed(self, number: int) -> Path:
        """The file with what a machine printed."""
        return self.folder / f"{number}.txt"

    def text(self, number: int) -> str:
        """What a machine printed."""
        return self.printed(number).read_text(errors="replace")

    def workers(self, number: int) -> list[int]:
        """The processes of the run on a machine, by pid."""
        return [pid for pid in children(self.agents[number].pid) if _is_worker(pid)]

    def kill(self, number: int, signum: int = signal.SIGKILL, agent: bool = True) -> None:
        """Send a signal to the processes of the run on a machine, and to its torchrun: as if the machine were lost, or frozen."""
        workers = self.workers(number)
        assert workers or agent
        for pid in ([self.agents[number].pid] if agent else []) + workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def wait(self, number: int, seconds: float = 120) -> int:
        """The exit code of a machine's torchrun."""
        return self.agents[number].wait(seconds)

    def stop(self) -> None:
        """End everything."""
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
