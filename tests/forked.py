# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det`` in a process of its own that is there at once: forked from a server that has imported what commands import.

It has its own pid, process group, signals, environment, exit code and output, as one that Python starts. What is about the start of
Python itself, such as what a command imports, needs ``subprocess``. The parent is the server, not the test.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    *("cpvt_det.cli.train", "cpvt_det.training.train", "cpvt_det.training.launch", "cpvt_det.cli.predict", "cpvt_det.predict"),
    *("cpvt_det.builders", "cpvt_det.evaluation", "torch.optim", "torch._dynamo", "torch.distributed.run", "scipy.optimize"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "numba", "faster_coco_eval", "torch.utils.tensorboard"),
    *("cpvt_det.visualize.pictures", "cpvt_det.d2.run"),
]
"""Modules that the server imports; one that cannot be imported is left out."""
CONTEXT.set_forkserver_preload(PRELOADED)


class Forked:
    """A process of ``cpvt-det WORDS``, with the names of :class:`subprocess.Popen`.

    Args:
        words: words of the command line.
        cwd: folder that it runs in; that of the test if ``None``.
        env: its environment variables; those of the test if ``None``.
        before: Python that is run first.
        printed: file for all that it prints; if ``None``, :meth:`stdout` and :meth:`stderr` are apart.

    Attributes:
        pid: number of the process, and of its group.
    """

    def __init__(
        self,
        *words: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        before: str = "",
        printed: Path | None = None,
    ):
        self._folder = tempfile.TemporaryDirectory(prefix="forked")
        self._printed = [printed or Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for path in self._printed:
            path.touch()
        arguments = (list(map(str, words)), self._printed, str(cwd or Path.cwd()), dict(os.environ if env is None else env), before)
        self._process = CONTEXT.Process(target=_run, args=arguments, daemon=True)  # the tests end without waiting for it
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; ``None`` while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float = 120) -> int:
        """Exit code, as soon as there is one.

        Raises:
            TimeoutExpired: it still runs.
        """
        self._process.join(seconds)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", seconds)
        return self.returncode

    def stdout(self) -> str:
        """What it has printed so far."""
        return self._printed[0].read_text(errors="replace")

    def stderr(self) -> str:
        """What it has printed so far as news and errors."""
        return self._printed[1].read_text(errors="replace")

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def end(self) -> None:
        """Kill it, and all of its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._folder.cleanup()


def run(*words: object, seconds: float = 200, **options) -> subprocess.CompletedProcess:
    """:class:`Forked`, and wait for its end."""
    process = Forked(*words, **options)
    try:
        process.wait(seconds)
        return subprocess.CompletedProcess(words, process.returncode, process.stdout(), process.stderr())
    finally:
        process.end()


def _run(words: list[str], printed: list[Path], cwd: str, env: dict[str, str], before: str) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background has it ignored, and hands that on
    multiprocessing.current_process()._config["daemon"] = False  # it may have data workers
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)  # Python's own, not the server's
    for stream, path in zip((1, 2), printed, strict=True):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # that of its own environment
    os.chdir(cwd)
    sys.argv[:] = ["cpvt-det", *words]
    import torch

    from cpvt_det.cli import main

    torch.set_num_threads(1)
    try:
        exec(before, {})
        main(words)
    finally:
        atexit._run_exitfuncs()  # multiprocessing would leave them out
