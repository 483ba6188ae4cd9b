# SPDX-License-Identifier: Apache-2.0
"""The one way in which times are compared here: equal work first, then A B A B, and ratios of neighbours.

A machine is never quiet, so one contender's time is not set against another's of a minute ago: every round runs all
contenders one after the other, and a ratio is formed inside the round. The figure is the median over rounds.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.clocks import Clock, Command, Sample
from benchmarks.equal import difference


class UnequalWorkError(RuntimeError):
    """Contenders that do not compute the same; their times would not compare."""


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Args:
        name: as the table calls it.
        call: does the work once and returns its output, or a ``Command``.
        peer: somebody else's.
        tolerance: how far its output may lie from the first contender's, where that is not the work's own tolerance (bf16).
        limit: not a contender but what the machine could do at best; it has no output to compare.
        other_work: what it does otherwise than the baseline on purpose, so that its output is not compared; the report tells it.
        check: gives the output to compare, where the call that is timed cannot: without dropout, for one.
    """

    name: str
    call: Callable[[], Any]
    peer: bool = False
    tolerance: float | None = None
    limit: bool = False
    other_work: str = ""
    check: Callable[[], Any] | None = None

    @property
    def is_compared(self) -> bool:
        return not (self.limit or self.other_work)

    def output(self) -> Any:
        """What is compared with the baseline's."""
        return (self.check or self.call)()


@dataclass(frozen=True)
class Work:
    """One piece of work and everybody who does it.

    Args:
        contenders: the first is the baseline, with which outputs are compared and to whose time the ratios refer.
        tolerance: the largest difference of an output from the baseline's, relative to the baseline's largest value.
        left_out: contenders that do not take part, and why.
    """

    contenders: list[Contender]
    tolerance: float = 1e-5
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A work by name; its inputs are made when its turn comes, and go when it is done.

    Args:
        name: unique in its suite.
        about: what the table says of it, column by column.
        build: makes the inputs and the contenders.
        counts: bytes and operations of the work, counted on paper.
        memory: measure every contender's peak memory too.
        warm: makes the same contenders on a tiny input, so that what is loaded and compiled once is no part of a peak.
        left_out: why nobody does it here; empty for a case that runs.
    """

    name: str
    about: dict[str, Any]
    build: Callable[[], Work]
    counts: dict[str, float] = field(default_factory=dict)
    memory: bool = False
    warm: Callable[[], Work] | None = None
    left_out: str = ""


@dataclass(frozen=True)
class Plan:
    """How long to go on.

    Args:
        warm_up: calls of each contender that are not counted, beside the one that its output is checked on.
        rounds: at least so many.
        most_rounds: at most so many.
        seconds: go on for so long, if the rounds allow.
        sample_seconds: a sample repeats a short call until it lasts about so long.
        most_repeats: of a call in one sample.
    """

    warm_up: int = 1
    rounds: int = 3
    most_rounds: int = 25
    seconds: float = 5.0
    sample_seconds: float = 0.01
    most_repeats: int = 100


@dataclass(frozen=True)
class Spread:
    """The median, the quartiles and the ends of some figures."""

    median: float
    q1: float
    q3: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        """Raises: ValueError: no figures."""
        if not figures:
            raise ValueError("no figures to spread")
        q1, q3 = (float(x) for x in np.quantile(figures, (0.25, 0.75)))
        return cls(statistics.median(figures), q1, q3, min(figures), max(figures))


@dataclass(frozen=True)
class Row:
    """What came out for one contender.

    ``ratio_*``: how many times as fast as the baseline, by wall and by CPU time, paired by round; ``over_peer_*``: as the
    fastest peer. None where the clock tells no CPU time, or where there is no peer.
    """

    name: str
    peer: bool
    limit: bool
    difference: float | None
    repeats: int
    rounds: int
    wall: Spread
    cpu: Spread | None
    ratio_wall: Spread
    ratio_cpu: Spread | None
    over_peer_wall: Spread | None = None
    over_peer_cpu: Spread | None = None
    peak_bytes: int | None = None
    other_work: str = ""


def assert_equal_work(work: Work) -> dict[str, float]:
    """Run every contender once and compare its output with the baseline's, but for those that have none to compare.

    Returns:
        The difference by name, of those that were compared.

    Raises:
        UnequalWorkError: one that lies further off than it may.
    """
    expected = work.contenders[0].output()
    differences = {work.contenders[0].name: 0.0}
    for contender in work.contenders[1:]:
        output = contender.output()
        if not contender.is_compared:
            continue
        gap = differences[contender.name] = difference(output, expected)
        del output
        tolerance = work.tolerance if contender.tolerance is None else contender.tolerance
        if not gap <= tolerance:
            raise UnequalWorkError(
                f"{contender.name} differs from {work.contenders[0].name} by {gap:.2g} of the largest value, "
                f"more than {tolerance:.2g}: not the same work, so not timed"
            )
    return differences


def run_rounds(work: Work, plan: Plan, clock: Clock) -> tuple[dict[str, int], dict[str, list[Sample]]]:
    """Warm up, then time A B A B.

    Returns:
        By name: calls in one sample, and the samples, one a round.
    """
    repeats = {contender.name: 1 for contender in work.contenders}
    for _ in range(plan.warm_up):
        for contender in work.contenders:
            took = clock.time(contender.call, 1).wall
            wanted = math.ceil(plan.sample_seconds / took) if took > 0 else plan.most_repeats
            repeats[contender.name] = 1 if isinstance(contender.call, Command) else max(1, min(wanted, plan.most_repeats))
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in work.contenders}
    spent = 0.0
    for done in range(plan.most_rounds):
        if done >= plan.rounds and spent >= plan.seconds:
            break
        for contender in work.contenders:
            sample = clock.time(contender.call, repeats[contender.name])
            samples[contender.name].append(sample)
            spent += sample.wall * repeats[contender.name]
    return repeats, samples


def compare(work: Work, plan: Plan, clock: Clock) -> list[Row]:
    """Assert equal work, then time it.

    Returns:
        A row for each contender, in their order.

    Raises:
        UnequalWorkError: before anything is timed.
    """
    differences = assert_equal_work(work)
    repeats, samples = run_rounds(work, plan, clock)
    peers = [samples[contender.name] for contender in work.contenders if contender.peer]
    rows = []
    for contender in work.contenders:
        own = samples[contender.name]
        ratio_wall, ratio_cpu = ratios(samples[work.contenders[0].name], own)
        over_peer = [ratios(peer, own) for peer in peers]
        cpu = None if any(s.cpu is None for s in own) else Spread.of([s.cpu for s in own])
        rows.append(
            Row(
                name=contender.name,
                peer=contender.peer,
                limit=contender.limit,
                difference=differences.get(contender.name),
                repeats=repeats[contender.name],
                rounds=len(own),
                wall=Spread.of([s.wall for s in own]),
                cpu=cpu,
                ratio_wall=ratio_wall,
                ratio_cpu=ratio_cpu,
                over_peer_wall=_least(wall for wall, _ in over_peer),
                over_peer_cpu=_least(cpu for _, cpu in over_peer),
                other_work=contender.other_work,
            )
        )
    return rows


def _least(spreads: Iterable[Spread | None]) -> Spread | None:
    """Against the fastest peer the ratio is least."""
    return min((spread for spread in spreads if spread is not None), key=lambda spread: spread.median, default=None)


def ratios(others: Sequence[Sample], own: Sequence[Sample]) -> tuple[Spread, Spread | None]:
    """How many times as fast as the other, round by round: by wall time, and by CPU time where both tell it."""
    pairs = list(zip(others, own, strict=True))
    wall = Spread.of([a.wall / b.wall for a, b in pairs])
    if any(s.cpu is None or s.cpu <= 0 for pair in pairs for s in pair):
        return wall, None
    return wall, Spread.of([a.cpu / b.cpu for a, b in pairs])
