# SPDX-License-Identifier: Apache-2.0
"""How all times are compared: check that the work is equal, then run contenders alternately, with ratios inside each round.

The load of a machine changes, so times that were measured minutes apart cannot be compared: every round runs all contenders one
after the other, and ratios are computed inside the round. The result is the median over rounds.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.clocks import Clock, Command, Sample
from benchmarks.equal import difference

ROUNDS = 7
"""Smallest number of rounds of a measurement of record: with three, the quartiles are hardly more than the extremes."""


class UnequalWorkError(RuntimeError):
    """Contenders with different outputs, whose times cannot be compared."""


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Args:
        name: name in the table.
        call: function that does the work once and returns its output, or a ``Command``.
        peer: True for an implementation of another project.
        tolerance: largest allowed difference from the baseline's output; ``None`` for the tolerance of the work.
        limit: True for a measurement of what the machine can do at best; it has no output to compare.
        other_work: description of an intended difference from the baseline, for the report; the output is then not compared.
        check: function that returns the output to compare, if the timed call cannot, for example because of dropout.
        attempt: True: an error or another output leaves this contender out, with the reason, and not the case; its peak memory is
            not measured, because it may be a compiler's.
    """

    name: str
    call: Callable[[], Any]
    peer: bool = False
    tolerance: float | None = None
    limit: bool = False
    other_work: str = ""
    check: Callable[[], Any] | None = None
    attempt: bool = False

    @property
    def is_compared(self) -> bool:
        return not (self.limit or self.other_work)

    def output(self) -> Any:
        """The output that is compared with the baseline's."""
        return (self.check or self.call)()


@dataclass(frozen=True)
class Work:
    """A piece of work and all contenders that do it.

    Args:
        contenders: contenders; the first one is the baseline for outputs and ratios.
        tolerance: largest allowed difference of an output from the baseline's, relative to the baseline's largest value.
        left_out: contenders that do not take part -> reason.
    """

    contenders: list[Contender]
    tolerance: float = 1e-5
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A named work, whose inputs exist only while it runs.

    Args:
        name: name, unique in its suite.
        about: description for the table, column -> text.
        build: function that makes the inputs and the contenders.
        counts: computed numbers of bytes and operations of the work.
        memory: True: measure the peak memory of every contender too.
        warm: function that makes the same contenders on a tiny input, so that loading and compiling do not count in the peak.
        left_out: reason for which the case does not run here; empty for a case that runs.
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
    """The length of a measurement.

    Args:
        warm_up: number of calls per contender that are not counted, beside the call that checks its output.
        rounds: smallest number of rounds.
        most_rounds: largest number of rounds.
        seconds: seconds after which no new round starts, within the limits on the number of rounds.
        sample_seconds: approximate length of a sample in seconds; a short call is repeated to reach it.
        most_repeats: largest number of calls in one sample.
    """

    warm_up: int = 1
    rounds: int = 3
    most_rounds: int = 25
    seconds: float = 5.0
    sample_seconds: float = 0.01
    most_repeats: int = 100


@dataclass(frozen=True)
class Spread:
    """The median, the quartiles, the smallest and the largest of some figures."""

    median: float
    q1: float
    q3: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        """Raises: ValueError: no figures."""
        if not figures:
            raise ValueError("expected at least one figure, got none")
        q1, q3 = (float(x) for x in np.quantile(figures, (0.25, 0.75)))
        return cls(statistics.median(figures), q1, q3, min(figures), max(figures))


@dataclass(frozen=True)
class Row:
    """The results of one contender.

    ``ratio_*``: how many times as fast as the baseline, by wall and by CPU time, paired by round; ``over_peer_*``: the same against
    the fastest peer. ``None`` if the clock does not measure CPU time, or if there is no peer.
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
    """Run every contender once and compare its output with the baseline's, if it has an output to compare.

    Returns:
        Name -> difference, for the contenders that were compared.

    Raises:
        UnequalWorkError: a difference above the tolerance.
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
                f"more than {tolerance:.2g}: the work is not the same, so it is not timed"
            )
    return differences


def without_failures(work: Work) -> Work:
    """The work without attempts that fail here, or whose outputs differ from the baseline's, each with its reason."""
    attempts = [contender for contender in work.contenders if contender.attempt]
    if not attempts:
        return work
    reasons: dict[str, str] = {}
    for contender in attempts:
        try:
            assert_equal_work(replace(work, contenders=[work.contenders[0], contender]))
        except Exception as error:  # of a compiler, any
            reasons[contender.name] = (str(error).strip() or type(error).__name__).splitlines()[0]
    left = [contender for contender in work.contenders if contender.name not in reasons]
    return replace(work, contenders=left, left_out=work.left_out | reasons)


def run_rounds(work: Work, plan: Plan, clock: Clock) -> tuple[dict[str, int], dict[str, list[Sample]]]:
    """Warm up, then time all contenders alternately.

    Returns:
        Name -> calls per sample, and name -> samples, one per round.
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
    """Check that the work is equal, then time it.

    Returns:
        A row for each contender, in their order.

    Raises:
        UnequalWorkError: contenders with different outputs; nothing is timed then.
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
    """The spread with the smallest median: that is the ratio to the fastest peer."""
    return min((spread for spread in spreads if spread is not None), key=lambda spread: spread.median, default=None)


def ratios(others: Sequence[Sample], own: Sequence[Sample]) -> tuple[Spread, Spread | None]:
    """How many times as fast as the other, round by round: by wall time, and by CPU time if it was measured for both."""
    pairs = list(zip(others, own, strict=True))
    wall = Spread.of([a.wall / b.wall for a, b in pairs])
    if any(s.cpu is None or s.cpu <= 0 for pair in pairs for s in pair):
        return wall, None
    return wall, Spread.of([a.cpu / b.cpu for a, b in pairs])
