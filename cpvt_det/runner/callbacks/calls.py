# SPDX-License-Identifier: Apache-2.0
"""Config -> callbacks, and the calls of one run: in the first process, whose wish to stop all processes follow."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from fvcore.common.config import CfgNode

from cpvt_det import distributed
from cpvt_det.errors import BadInputError, ConfigError, RunStoppedError, config_errors, first_line
from cpvt_det.runner.callbacks import loggers  # noqa: F401, registers
from cpvt_det.runner.callbacks.contract import CALLBACK_REGISTRY, Callback, TrainingRun
from cpvt_det.runner.callbacks.early_stopping import build_early_stopping
from cpvt_det.tasks.task import Results

logger = logging.getLogger("cpvt_det")


def build_callbacks(cfg: CfgNode, tests: Sequence[Any], more: Sequence[Callback] = ()) -> list[Callback]:
    """Early stopping, the callbacks that ``CALLBACKS`` names, and more.

    Args:
        cfg: config of the run.
        tests: test sets of the run.
        more: callbacks given in Python.

    Raises:
        ConfigError: an entry that is not one, a name or an option that is unknown, a package that is missing, or
            ``SOLVER.EARLY_STOPPING`` that cannot be used.
        TypeError: something in ``more`` that is no callback.
    """
    callbacks: list[Callback] = build_early_stopping(cfg, tests)
    for entry in cfg.CALLBACKS:
        parts = list(entry) if isinstance(entry, (list, tuple)) else [entry]
        if [type(part) for part in parts] not in ([str], [str, dict]):
            raise ConfigError(f"CALLBACKS must contain names, or entries [name, {{option: value}}], got {entry!r}")
        name, *options = parts
        with config_errors(f"CALLBACKS {name}"):
            callbacks.append(CALLBACK_REGISTRY.build(name, {}, *options))
    for callback in (*callbacks, *more):
        if not isinstance(callback, Callback):
            raise TypeError(f"a callback must be an instance of cpvt_det.runner.callbacks.Callback, got {callback!r}")
    return [*callbacks, *more]


class RunCallbacks:
    """The callbacks of one run; entered before its first step, left when it has ended. Every process calls its methods.

    Args:
        callbacks: callbacks, called in this order.
        run: the run.

    Attributes:
        is_over: whether a callback wants the run to end; the same in every process.
    """

    def __init__(self, callbacks: Sequence[Callback], run: TrainingRun):
        self.run = run
        self.is_over = False
        self._callbacks = list(callbacks) if distributed.rank() == 0 else []
        self._started: list[Callback] = []
        self._failed: list[Callback] = []

    def __enter__(self) -> "RunCallbacks":
        try:
            for callback in self._callbacks:
                self._started.append(callback)
                self._start(callback)
        except BaseException as error:
            self._failed.append(self._started.pop())
            self._end(error)
            raise
        self._agree(self.run.start - 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *more: object) -> None:
        self._end(error)

    def ends_before(self, iteration: int) -> bool:
        """Whether a callback ends the run before this iteration; a new run takes one step, to have something to evaluate."""
        return self.is_over and iteration > 0

    def step(self, iteration: int, scalars: dict[str, float]) -> None:
        """Call ``on_step`` of all callbacks."""
        self._call("on_step", iteration, scalars)
        self._agree(iteration)

    def evaluation(self, iteration: int, results: Results) -> None:
        """Call ``on_evaluation`` of all callbacks."""
        self._call("on_evaluation", iteration, results)
        self._agree(iteration)

    def _start(self, callback: Callback) -> None:
        try:
            callback.on_start(self.run)
        except (BadInputError, RunStoppedError):
            raise
        except Exception as error:  # a user's callback may raise anything
            name = _name_of(callback)
            raise ConfigError(
                f"{name}.on_start failed: {type(error).__name__}: {first_line(error)}; to train without it, take it from CALLBACKS"
            ) from error

    def _end(self, error: BaseException | None) -> None:
        """Call ``on_end`` of all that were started: one that failed may have something to close, and has been reported."""
        for callback in self._failed:
            with contextlib.suppress(Exception):
                callback.on_end(self.run, error)
        self._failed.clear()
        self._call("on_end", error)
        self._started.clear()

    def _call(self, event: str, *arguments: Any) -> None:
        for callback in list(self._started):
            try:
                getattr(callback, event)(self.run, *arguments)
            except RunStoppedError:
                raise
            except Exception as error:  # a user's callback may raise anything
                self._started.remove(callback)
                self._failed.append(callback)
                logger.warning(
                    "%s.%s failed; the callback is left out until the end: %s: %s",
                    *(_name_of(callback), event, type(error).__name__, first_line(error)),
                )

    def _agree(self, iteration: int) -> None:
        """Follow the first process, and log once why the run ends."""
        before, self.is_over = self.is_over, bool(distributed.all_reduce_max(int(bool(self.run.reason))))
        if self.run.reason and not before:
            logger.info("Early stop after iteration %d: %s", iteration, self.run.reason)


def _name_of(callback: Callback) -> str:
    return type(callback).__name__
