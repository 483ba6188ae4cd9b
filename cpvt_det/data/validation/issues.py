# SPDX-License-Identifier: Apache-2.0
"""Issues that are found when data is checked, grouped and counted, with the first examples of each kind."""

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from cpvt_det.common.errors import DataError, DataFaultsError

EXAMPLES = 20
"""Number of examples stored for each kind of issue; any others are only counted, unless all are requested."""
POLICIES = ("error", "drop")
"""Values of ``DATASETS.ON_BAD``."""


@dataclass
class Group:
    """Issues of one kind.

    Attributes:
        count: number of issues.
        examples: place and description of the first issues.
    """

    count: int = 0
    examples: list[str] = field(default_factory=list)


Groups = dict[str, Group]
"""Heading -> group."""


class Issues:
    """Issues of one source.

    Args:
        source: name of the source, such as a data set with its JSON; empty if each issue names its own.
        examples: largest number of examples stored for each kind of issue, infinity for all.

    Attributes:
        errors: issues that always stop a run.
        faults: images and boxes that are left out with ``DATASETS.ON_BAD drop``, and that stop a run otherwise.
        infos: issues that a rule always corrects; they are counted, but never stop a run.
    """

    def __init__(self, source: str = "", examples: float = EXAMPLES):
        self.source = source
        self.examples = int(min(examples, sys.maxsize))
        self.errors: Groups = {}
        self.faults: Groups = {}
        self.infos: Groups = {}

    def add_error(self, heading: str, where: str) -> None:
        """Add an issue that always stops a run."""
        self._add(self.errors, heading, where)

    def add_fault(self, heading: str, where: str) -> None:
        """Add an image or a box that must be left out."""
        self._add(self.faults, heading, where)

    def add_info(self, heading: str, where: str) -> None:
        """Add an issue that is only counted."""
        self._add(self.infos, heading, where)

    def count_info(self, heading: str, number: int) -> None:
        """Add to the count of a kind of issue that already has its examples, or has none."""
        self.infos.setdefault(heading, Group()).count += number

    def _add(self, groups: Groups, heading: str, where: str) -> None:
        group = groups.setdefault(heading, Group())
        group.count += 1
        if len(group.examples) < self.examples:
            # Names in JSON may contain line breaks and invalid characters.
            group.examples.append("".join(one if one.isprintable() else repr(one)[1:-1] for one in where))

    def add(self, others: "Issues") -> None:
        """Add the issues of another part of the same source."""
        for name in ("errors", "faults", "infos"):
            groups = getattr(self, name)
            for heading, other in getattr(others, name).items():
                group = groups.setdefault(heading, Group())
                group.count += other.count
                group.examples = [*group.examples, *other.examples][: self.examples]

    def to_json(self) -> dict[str, Any]:
        """All issues, in values that JSON can hold."""
        kinds = {"errors": self.errors, "faults": self.faults, "infos": self.infos}
        return {name: {heading: asdict(group) for heading, group in groups.items()} for name, groups in kinds.items()}

    @classmethod
    def from_json(cls, found: dict[str, Any], source: str = "", examples: float = EXAMPLES) -> "Issues":
        """The issues of a source, from the result of :meth:`to_json`."""
        issues = cls(source, examples)
        for name, groups in found.items():
            setattr(issues, name, {heading: Group(**group) for heading, group in groups.items()})
        return issues

    def has_errors(self, on_bad: str) -> bool:
        """Whether a run must stop under this policy, one of ``POLICIES``."""
        return bool(self.errors) or (on_bad == "error" and bool(self.faults))

    def counts(self) -> dict[str, int]:
        """Heading -> number of issues, for the log."""
        return {heading: group.count for groups in (self.errors, self.faults, self.infos) for heading, group in groups.items()}

    def lines(self, *parts: Groups) -> list[str]:
        """Lines with the source, headings and examples of the given groups; no lines if there are no groups."""
        lines = [f"{self.source}:"] if self.source and any(parts) else []
        for heading, group in (item for groups in parts for item in groups.items()):
            lines += [f"  {heading}: {group.count}", *(f"    {example}" for example in group.examples)]
            lines += [f"    and {group.count - len(group.examples)} more"] if group.count > len(group.examples) > 0 else []
        return lines


@dataclass
class Looked:
    """The result of checking many image files of a data set; it contains nothing about images without issues.

    Attributes:
        issues: issues that were found.
        faulty: ids of the images that must be left out.
        may_pass: whether another check may have a different result even if no file changes.
    """

    issues: Issues
    faulty: list[int] = field(default_factory=list)
    may_pass: bool = False

    def add(self, others: "Looked") -> None:
        """Add what was found in another part of the images."""
        self.issues.add(others.issues)
        self.faulty += others.faulty
        self.may_pass |= others.may_pass


def require_no_errors(found: Iterable[Issues], on_bad: str) -> None:
    """Refuse data with faults, and list all of them in one message.

    Args:
        found: issues of all data sets.
        on_bad: one of ``POLICIES``.

    Raises:
        DataError: there is a single fault; the message has one line.
        DataFaultsError: there are several faults. The message is a line of advice, followed by one line per fault.
    """
    bad = [issues for issues in found if issues.has_errors(on_bad)]
    if not bad:
        return
    kinds = [(issues, *item) for issues in bad for item in [*issues.errors.items(), *issues.faults.items()]]
    if sum(group.count for *_, group in kinds) == 1:
        ((issues, heading, group),) = kinds
        raise DataError(": ".join(part for part in (issues.source, heading, group.examples[0]) if part) + _advice(bad))
    lines = [line for issues in bad for line in issues.lines(issues.errors, issues.faults)]
    raise DataFaultsError("\n".join([summary(bad), *lines]))


def summary(found: Iterable[Issues]) -> str:
    """The number of faults, and advice on how to continue."""
    found = list(found)
    number = sum(group.count for one in found for groups in (one.errors, one.faults) for group in groups.values())
    return f"{number} fault{'s' * (number != 1)} in the data{_advice(found)}"


def _advice(found: Iterable[Issues]) -> str:
    return "" if any(one.errors for one in found) else "; DATASETS.ON_BAD drop leaves out these images and boxes"
