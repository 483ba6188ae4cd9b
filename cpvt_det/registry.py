# SPDX-License-Identifier: Apache-2.0
"""Registries of parts that can be chosen by name, from this package and from the user's own modules.

A user's module registers a part under a name; ``--import MODULE`` on the command line imports it before the config is read.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from fvcore.common.registry import Registry

from cpvt_det.errors import UnknownNameError

IMPORT_HINT = "a module that registers it is imported with --import MODULE"
Builder = TypeVar("Builder", bound=Callable[..., Any])


class PartRegistry(Registry):
    """Names -> classes or functions that build a part; a subclass of fvcore's ``Registry``, which detectron2 uses.

    A part registered as ``timm/<name>`` stands for all names that begin with ``timm/``; its builder gets the rest as its first
    argument.

    Args:
        name: name of the registry, such as "POSITION".
        kind: name of a part in messages, such as "position encoding".
        chosen: parameters of builders that the registry itself sets, and that are not options.
    """

    def __init__(self, name: str, kind: str, chosen: frozenset[str] = frozenset()):
        super().__init__(name)
        self.kind = kind
        self._chosen = chosen

    @property
    def names(self) -> list[str]:
        """The registered names, in the order of registration."""
        return [name for name, _ in self]

    def register_as(self, name: str) -> Callable[[Builder], Builder]:
        """Register a class or function under a name that need not be a Python identifier, such as ``sine+peg``."""

        def register(builder: Builder) -> Builder:
            self._do_register(name, builder)
            return builder

        return register

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or super().__contains__(_family_of(name))

    def find(self, name: str) -> Callable[..., Any]:
        """The builder of a name.

        Raises:
            UnknownNameError: a name that is not registered.
        """
        if name not in self:
            raise UnknownNameError(self.kind, name, self.names, IMPORT_HINT)
        family = _family_of(name)
        if "/" in name and super().__contains__(family):
            return functools.partial(self.get(family), name.partition("/")[2])
        return self.get(name)

    def parameters(self, name: str) -> set[str]:
        """The keywords that the builder of a name takes.

        Raises:
            UnknownNameError: a name that is not registered.
        """
        return set(inspect.signature(self.find(name)).parameters) - self._chosen

    def build(self, name: str, facts: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Any:
        """Build a part.

        Args:
            name: a registered name.
            facts: properties of the model by name; the builder gets those that it has parameters for.
            options: settings of this part by name; the builder must accept all of them.

        Raises:
            UnknownNameError: a name that is not registered, or an option that the builder does not take.
        """
        accepted = self.parameters(name)
        builder = self.with_options(name, options or {}, facts.keys())
        return builder(**{fact: value for fact, value in facts.items() if fact in accepted and fact not in (options or {})})

    def with_options(self, name: str, options: Mapping[str, Any] | None = None, known: Collection[str] = ()) -> Callable[..., Any]:
        """The builder of a name with some of its keywords set.

        Args:
            name: a registered name.
            options: values of keywords; the builder has to take all of them.
            known: keywords that are no options, which messages leave out.

        Raises:
            UnknownNameError: a name that is not registered, or an option that the builder does not take.
        """
        accepted = self.parameters(name)
        for option in options or {}:
            if option not in accepted:
                raise UnknownNameError(f"option of {self.kind} {name!r}", option, accepted - set(known))
        return functools.partial(self.find(name), **options) if options else self.find(name)


def _family_of(name: str) -> str:
    """The name that a family of parts is registered as, for the name of one."""
    family, _, rest = name.partition("/")
    return f"{family}/<name>" if rest else name
