# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one contender above the memory in use before the call: on a CPU in a separate process.

``python -m benchmarks.memory`` is that process. It builds the case again, so that no other contender's memory counts, and does the
work on a tiny input first, so that libraries and compiled code do not count. In it glibc returns every block of a megabyte or more
when it is freed, so that the peak is memory in use and does not depend on the placement of blocks.
"""

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.clocks import CommandRun, fixed_threads
from benchmarks.harness import Case, Contender, Work
from benchmarks.suites import Options, find_case, find_suite
from cpvt_det.common.memory import peak, reset_peak, resident, trim_heap

ROOT = Path(__file__).resolve().parent.parent
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""glibc's size in bytes from which the kernel provides a block, fixed; otherwise it grows to 32 MB as such blocks are freed."""


def peak_bytes(suite: str, case: Case, contender: Contender, options: Options) -> int | None:
    """Peak memory of one call in bytes; ``None`` for a limit, which is no contender, and for an attempt.

    Raises:
        RuntimeError: a process that failed; the message contains the last line of its errors.
    """
    if contender.limit or contender.attempt:
        return None
    if options.device == "cuda":
        return peak_on_gpu(contender)
    # For one of our contenders no peer is imported, because that takes longer than the work.
    ours = contender.name.startswith("cpvt_det")
    peers = {} if ours else {name: path and str(path) for name, path in options.peers.items()}
    words = json.dumps({"suite": suite, "case": case.name, "contender": contender.name, **asdict(options), "peers": peers})
    command = [sys.executable, "-m", "benchmarks.memory", words]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(command, cwd=ROOT, env=plain | GIVE_BACK, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise RuntimeError(f"peak memory of {contender.name} in {case.name}: {reason}")
    return int(done.stdout.strip().splitlines()[-1])


def peak_on_gpu(contender: Contender) -> int:
    """Peak memory of the call alone; the inputs exist before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contender.call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, contender: str) -> int:
    """In a new process: the peak of one call above the memory of the process before it."""
    if case.warm is not None:
        _named(case.warm(), contender).call()
    chosen = _named(case.build(), contender)
    gc.collect()
    trim_heap()
    reset_peak()
    before = resident()
    output = chosen.call()
    return output.peak_bytes if isinstance(output, CommandRun) else max(0, peak() - before)


def _named(work: Work, name: str) -> Contender:
    return next(contender for contender in work.contenders if contender.name == name)


def main() -> None:
    words = json.loads(sys.argv[1])
    suite, case, contender = (words.pop(name) for name in ("suite", "case", "contender"))
    words["peers"] = {name: path and Path(path) for name, path in words["peers"].items()}
    options = Options(**words)
    with fixed_threads(options.threads):
        print(measure(find_case(find_suite(suite).cases(options), case), contender))


if __name__ == "__main__":
    main()
