# SPDX-License-Identifier: Apache-2.0
"""Registries of parts that can be chosen by name, from this package and from the user's own modules.

A user's module registers a part under a name. ``--import MODULE`` on the command line imports the module before the config is
read, in every process of a run. This is a flag and not a config key, because a YAML file may name parts but must not run code.
"""

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from fvcore.common.registry import Registry

from cpvt_det.common.errors import BadInputError, ConfigError, UnknownNameError, first_line

IMPORT_HINT = "a module that registers it is imported with --import MODULE"
INHERITED = "CPVT_DET_IMPORT"
"""Environment variable that passes the names of the imported modules to the processes that a command starts."""
Builder = TypeVar("Builder", bound=Callable[..., Any])


class PartRegistry(Registry):
    """Maps names to classes or functions that build a part; a subclass of fvcore's ``Registry``, which detectron2 uses.

    A part registered as ``timm/<name>`` stands for all names that begin with ``timm/``; its builder gets the rest as its first
    argument.

    Args:
        name: name of the registry, such as "POSITION".
        kind: what a part is called in messages, such as "position encoding".
        chosen: parameters of builders that are not options, because the program sets them itself.
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
        """The builder registered under a name.

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
        """The names of the keyword arguments of the builder that is registered under a name.

        Raises:
            UnknownNameError: a name that is not registered.
        """
        parameters = inspect.signature(self.find(name)).parameters.values()
        return {part.name for part in parameters if part.kind not in (part.VAR_POSITIONAL, part.VAR_KEYWORD)} - self._chosen

    def build(self, name: str, facts: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Any:
        """Build a part.

        Args:
            name: a registered name.
            facts: properties of the model by name. The builder gets only the properties that it has parameters for.
            options: settings of this part by name; the builder must accept all of them.

        Raises:
            UnknownNameError: a name that is not registered, or an option that the builder does not take.
            ConfigError: an option whose type differs from that of its default.
        """
        accepted = self.parameters(name)
        builder = self.with_options(name, options or {}, facts.keys())
        return builder(**{fact: value for fact, value in facts.items() if fact in accepted})

    def with_options(self, name: str, options: Mapping[str, Any] | None = None, known: Collection[str] = ()) -> Callable[..., Any]:
        """The builder registered under a name, with some of its keyword arguments set.

        Args:
            name: a registered name.
            options: values of keyword arguments; the builder must accept all of them.
            known: keyword arguments that are not options and that messages leave out.

        Raises:
            UnknownNameError: a name that is not registered, or an option that the builder does not take.
            ConfigError: an option whose type differs from that of its default.
        """
        if not options:
            return self.find(name)
        builder, accepted = self.find(name), self.parameters(name) - set(known)
        defaults = {part.name: part.default for part in inspect.signature(builder).parameters.values()}
        for option, value in options.items():
            if option not in accepted:
                takers = [other for other in self.names if option in self.parameters(other) - set(known)]
                way_out = f"it belongs to {', '.join(takers)}; leave it out, or set it to None" if takers else ""
                raise UnknownNameError(f"option of {self.kind} {name!r}", option, accepted, way_out)
            _require_kind(f"the option {option!r} of the {self.kind} {name!r}", value, defaults.get(option))
        return functools.partial(builder, **options)


def options_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """The options in a part's config node, as keyword arguments: its keys in lower case, except ``NAME`` and keys set to
    ``None``."""
    return {key.lower(): value for key, value in node.items() if key != "NAME" and value is not None}


def _require_kind(what: str, value: Any, default: Any) -> None:
    """Refuse a value whose type differs from the default's; a whole number is accepted for a float, and a list for a tuple. Without
    a default, or with a default of another type, any value is accepted.
    """
    kinds = {bool: bool, int: int, float: (int, float), str: str, list: (list, tuple), tuple: (list, tuple)}
    kind = kinds.get(type(default), object)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind in (int, (int, float))):
        raise ConfigError(f"{what} must be of type {type(default).__name__}, as its default {default!r}; got {value!r}")


def _family_of(name: str) -> str:
    """The name under which a part's family is registered, such as ``timm/<name>``. For a part without a family, this is the
    part's own name.
    """
    family, _, rest = name.partition("/")
    return f"{family}/<name>" if rest else name


def import_modules(names: Iterable[str]) -> None:
    """Import modules from Python's path or the current folder, in this process and in all processes that it starts later.

    Args:
        names: module names, as in ``my_parts`` or ``my_package.parts``.

    Raises:
        BadInputError: a module that cannot be imported.
    """
    names = list(names)
    if names and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a user's module may raise anything
            raise BadInputError(f"--import {name}: {type(error).__name__}: {first_line(error)}") from error
    known = os.environ.get(INHERITED, "").split()
    os.environ[INHERITED] = " ".join(dict.fromkeys([*known, *names]))


def import_words() -> str:
    """The ``--import`` options of this command, each with a leading space, to be added to commands that are suggested to the
    user. Empty if there are none.
    """
    return "".join(f" --import {name}" for name in os.environ.get(INHERITED, "").split())


def import_inherited() -> None:
    """Import the ``--import`` modules of a command in a process that it started."""
    import_modules(os.environ.get(INHERITED, "").split())
