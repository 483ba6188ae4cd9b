#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""All comparisons of docs/parity.md: predictions, losses, matchings and gradients of ours and of five independent code bases.

``python benchmarks/parity.py --peer detr=PATH --peer deformable_detr=PATH --peer detrex=PATH --peer detectron2=PATH``, with the
paths of checkouts; about ten minutes on one core. A peer without a path is left out. transformers and timm are compared by the
tests, which this script runs.
"""

import fnmatch
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.clocks import fixed_threads
from benchmarks.machine import machine, versions
from benchmarks.parity_models import Peer, build_ours, build_peer, draw_batch, draw_weights, in_dtype, to_dtype
from benchmarks.parity_outcomes import Gap, Outcome, compare, our_outcome, their_outcome
from benchmarks.parity_tables import Figure, look_up, summary, write_record, written_into
from benchmarks.parity_variants import Variant, variants
from benchmarks.peers import find_peers, peer_versions
from cpvt_det.cli import common_options, report_errors

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {
    "detr": "facebookresearch/detr",
    "deformable_detr": "fundamentalvision/Deformable-DETR",
    "detrex": "detrex",
    "transformers": "transformers",
    "timm": "timm",
}
"""Peers, and headings of their sections in docs/parity.md."""
CODES = {"detr": "official", "deformable_detr": "official", "detrex": "detrex"}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
LIMITS = {"float64": 1e-11, "float32": 1e-4}
"""Largest relative differences due to rounding; for gradients ten times that. Larger ones, or another matching, are failures."""
OUTPUT = Path("output/benchmarks/parity")
PARITY_TESTS = {
    "transformers": ("tests/whole/test_parity_transformers.py", "tests/whole/test_parity_deformable_transformers.py"),
    "timm": ("tests/whole/test_parity_timm.py",),
}
"""Peers that tests compare, if they are installed."""
PRINTED = re.compile(r"^\.?\| ([^|]+) \| ([^|]+) \| (\S+) \| (\S+) \|$", re.MULTILINE)


def outcomes(variant: Variant, peer: Peer) -> tuple[dict[str, tuple[Outcome, Outcome]], int]:
    """The outcomes of our and a peer's detector by dtype, for one batch and the same weights; and how many tensors were loaded."""
    classes, divisor = (80 if variant.peer == "detrex" else 91), (32 if variant.peer == "detr" else 64)
    drawn = draw_batch(variant.sizes, classes, divisor)
    draw_weights(peer, in_dtype(*drawn, torch.float32)[0])
    detector, criterion, loaded = build_ours(variant, peer.module.state_dict(), peer.source)
    found = {}
    for name in ("float64",) if variant.own_constants else DTYPES:
        dtype = DTYPES[name]
        batch, targets = in_dtype(*drawn, dtype)
        to_dtype(peer, dtype)
        found[name] = our_outcome(detector.to(dtype), criterion, batch, targets), their_outcome(peer, batch, targets)
    return found, loaded


def measure(variant: Variant, folders: Mapping[str, Path | None]) -> Iterator[Figure]:
    """All figures of one model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found, loaded = outcomes(variant, build_peer(variant, folders))
    section, model = SECTIONS[variant.peer], {"model": variant.name}
    for dtype, (ours, theirs) in found.items():
        labels = {**model, "dtype": dtype}
        for column, gap in compare(ours, theirs).items():
            yield Figure(section, labels, column, gap.value, gap.shape, gap.relative, _is_deliberate(variant, column))
        for loss, values in theirs.losses.items() if variant.peer == "detr" else ():  # the only section with a table of these
            for layer, gap in enumerate(map(Gap.of, ours.losses[loss], values)):
                yield Figure(section, {**labels, "loss": loss}, f"layer {layer}", gap.value, gap.shape, gap.relative)
        for column, value in _sizes(theirs, loaded).items():
            yield Figure(section, labels, column, value)
    for number, code in enumerate(("ours", CODES[variant.peer]) if "float32" in found else ()):
        gaps = compare(found["float32"][number], found["float64"][number])
        for column in ("logits", "boxes", "total", "gradient norm", "any gradient"):
            yield Figure(section, {**model, "code": code}, column, gaps[column].value, gaps[column].shape, gaps[column].relative)


def _is_deliberate(variant: Variant, column: str) -> bool:
    lacking = variant.lacks_padded_proposals and column in ("loss_ce_enc", "total", "gradient norm", "any gradient")
    constants = variant.own_constants and (column.startswith("loss_giou") or column in ("total", "gradient norm", "any gradient"))
    return lacking or constants


def _sizes(theirs: Outcome, loaded: int) -> dict[str, float]:
    """Figures to compare the differences with.

    The spreads are those of the last layer's boxes: if all queries or images had the same boxes, the comparison would prove little.
    """
    boxes = theirs.predictions.boxes[-1]  # (B, Q, 4)
    return {
        "largest logit": float(theirs.predictions.logits.abs().max()),
        "total loss": float(theirs.total),
        "norm of all gradients": float(theirs.gradient_norm),
        "tensors loaded": loaded,
        "with gradient": len(theirs.gradients),
        "spread over queries": float(boxes.std(1).mean()),
        "spread over images": float(boxes.std(0).mean()),
    }


def measure_by_tests(peer: str, threads: int) -> list[Figure]:
    """The figures that a peer's parity tests print.

    Raises:
        ClickException: tests that fail.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *PARITY_TESTS[peer]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_THREADS": str(threads)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException("the parity tests failed:\n" + done.stdout[-3000:] + done.stderr[-1000:])
    found = []
    for model, what, gap, largest in PRINTED.findall(done.stdout):
        value, scale, labels = float(gap), float(largest), {"model": model, "what": what}
        found.append(Figure(SECTIONS[peer], labels, "difference", value, [], value / scale if scale else 0.0))
        found.append(Figure(SECTIONS[peer], labels, "largest value", scale))
    return found


def beyond(figures: Sequence[Figure]) -> list[Figure]:
    """Differences that are larger than rounding and not deliberate."""
    judged = [f for f in figures if f.relative is not None and not f.deliberate and not {"code", "loss"} & f.labels.keys()]
    return [f for f in judged if not f.relative <= LIMITS[f.dtype] * (10 if "gradient" in f.column else 1)]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--peer", "given", multiple=True, metavar="NAME=PATH", help="Checkout to compare with: detr, deformable_detr, detrex."
)
@click.option("--model", "pattern", default="*", show_default=True, help='Models "PEER: NAME" to compare, such as "detr: *DC5*".')
@click.option("--threads", default=1, show_default=True, help="Threads of both models.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("output/benchmarks/parity"),
    show_default=True,
    help="Results, without suffix.",
)
@click.option("--write-docs", is_flag=True, help="Write the figures to the tables of docs/parity.md.")
@common_options
@report_errors
def main(given: tuple[str, ...], pattern: str, threads: int, output: Path, write_docs: bool) -> None:
    """Compare our models with independent code bases, and write OUTPUT.json and OUTPUT.md."""
    peers = find_peers([text.partition("=")[0].replace("-", "_") + "".join(text.partition("=")[1:]) for text in given])
    left_out = {SECTIONS[name]: f"no checkout was given: --peer {name}=PATH" for name in CODES if name not in peers}
    figures: list[Figure] = []
    with fixed_threads(threads):
        for variant in variants():
            name = f"{variant.peer}: {variant.name}"
            if variant.peer in peers and fnmatch.fnmatchcase(name, pattern):
                click.echo(name, err=True)
                figures += measure(variant, peers)
        for peer in PARITY_TESTS:
            if not importlib.util.find_spec(peer):
                left_out[peer] = "not installed"
            elif fnmatch.fnmatchcase(peer, pattern):
                click.echo(peer, err=True)
                figures += measure_by_tests(peer, threads)
    document = ROOT / "docs" / "parity.md"
    look_up(figures, document.read_text(encoding="utf-8"))
    words = [f"--peer {name}=PATH" for name, folder in peers.items() if folder is not None]
    words += [f"--model '{pattern}'"] if pattern != "*" else []
    command = " ".join(["python benchmarks/parity.py", *words, f"--threads {threads}"])
    peers |= {peer: None for peer in PARITY_TESTS if peer not in left_out}
    about = {"command": command, "machine": machine("cpu"), "versions": versions() | peer_versions(peers)}
    write_record(output, figures, about, left_out)
    if write_docs:
        document.write_text(written_into(figures, document.read_text(encoding="utf-8")), encoding="utf-8")
    click.echo(summary(figures))
    for name, why in left_out.items():
        click.echo(f"left out: {name}: {why}")
    if found := beyond(figures):
        lines = [f"{figure.peer}: {', '.join(figure.labels.values())}: {figure.column} {figure.text}" for figure in found]
        raise click.ClickException("differences larger than rounding:\n" + "\n".join(lines))


if __name__ == "__main__":
    main(prog_name="benchmarks/parity.py")
