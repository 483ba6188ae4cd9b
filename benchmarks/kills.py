# SPDX-License-Identifier: Apache-2.0
"""Random kills over two machines on the loopback: how many leave no trace in the final weights.

Run as::

    python benchmarks/kills.py --output benchmarks/results/kills.json
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


@click.command(help=__doc__.partition("\n")[0])
@click.option("--kills", default=20, show_default=True, help="Number of kills in all.")
@click.option("--each", default=5, show_default=True, help="Number of kills of one run.")
@click.option("--seed", default=0, show_default=True, help="Seed of what is killed, and when.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file of the record.")
def main(kills: int, each: int, seed: int, output: Path | None) -> None:
    """Kill runs, start again what was killed, and compare each run's end with that of a run that is left alone."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from faults.random_kills import kill_again_and_again

    from cpvt_det.study.origin import describe_origin

    command = f"python benchmarks/kills.py --kills {kills} --each {each} --seed {seed}"
    found = {"command": command, **describe_origin(), "kills": 0, "without_trace": 0, "steps_lost": 0, "longest_seconds": 0.0}
    found["runs"], draw = [], random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(kills // each):
            start, run = time.monotonic(), {"killed": [], "equal": False}
            try:
                killed, run["equal"] = kill_again_and_again(each, Path(temporary) / str(number), draw)
                run["killed"] = [kill._asdict() for kill in killed]
            except Exception as error:  # a run that did not come to its end counts, too
                run["error"] = f"{type(error).__name__}: {error}"[-2000:]
            found["kills"] += each
            found["without_trace"] += each * run["equal"]
            found["steps_lost"] += sum(max(0, kill["before"] - kill["resumed"]) for kill in run["killed"])
            found["longest_seconds"] = max([found["longest_seconds"], *(kill["seconds"] for kill in run["killed"])])
            found["runs"].append({**run, "seconds": round(time.monotonic() - start)})
            if output:
                output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    click.echo(
        f"{found['without_trace']} of {found['kills']} left no trace; {found['steps_lost']} steps lost; "
        f"at most {found['longest_seconds']} s until the run went on or ended"
    )


if __name__ == "__main__":
    main()
