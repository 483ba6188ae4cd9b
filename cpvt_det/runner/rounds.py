# SPDX-License-Identifier: Apache-2.0
"""Which processes belong together: those that one another see in the store, and no dead one of earlier.

torchrun's store may outlive the processes that it starts, with everything that they wrote into it, and its count of restarts is
each machine's own. So every process writes a token of its own. The first process calls a round with the tokens that it sees; each
process goes on only in a round with its own token, and only when all have confirmed the round.
"""

import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from cpvt_det.errors import ConfigError, RunStoppedError

JOIN = 600.0
"""Seconds that a process waits for the others at the start of a run; a node may load its programs from a slow disk."""
TICK = 0.1  # seconds between two looks into the store


class Member(NamedTuple):
    """A process of a run.

    Attributes:
        token: random text, of this process alone.
        host: name of its machine.
        pid: its process id there.
        agent: what identifies the torchrun that started it, and its machine; empty without one.
        world_size: number of processes that it expects.
    """

    token: str
    host: str
    pid: int
    agent: str
    world_size: int


class Round(NamedTuple):
    """Processes that have found each other.

    Attributes:
        store: store of this round alone, with ``beat/RANK`` and ``ended/RANK`` of every process, ``alarm`` and ``saved``.
        all_rounds: store of all rounds, where ``member/RANK`` is the process that came last.
        members: the processes, by rank.
    """

    store: dist.Store
    all_rounds: dist.Store
    members: list[Member]


def this_process(world_size: int) -> Member:
    """The calling process, with a new token."""
    host = socket.gethostname()
    # .../RUN_RANDOM/attempt_N/RANK/error.json: the second folder is made by each torchrun, once
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    agent = f"{host}:{attempt[2]}" if len(attempt) > 3 else ""
    return Member(uuid.uuid4().hex, host, os.getpid(), agent, world_size)


def join(store: dist.Store, rank: int, world_size: int, seconds: float = JOIN) -> Round:
    """Wait until all processes have joined the same round.

    Args:
        store: store that all processes reach; it may hold what processes of earlier rounds wrote.
        rank, world_size: index of this process, and number of processes.
        seconds: the longest time to wait.

    Raises:
        RunStoppedError: processes that did not come in time; another process in the place of this one.
        ConfigError: processes that expect different numbers of processes.
    """
    store, own = dist.PrefixStore("cpvt_det", store), this_process(world_size)
    store.set(f"member/{rank}", json.dumps(own))
    call = _Call(store, world_size) if rank == 0 else None
    end, confirmed = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        if call is not None:
            call.renew()
        name = store.get("round").decode() if store.check(["round"]) else ""
        inside = dist.PrefixStore(name, store)
        if name and name != confirmed and inside.check([f"token/{rank}"]) and inside.get(f"token/{rank}").decode() == own.token:
            inside.multi_set([f"ended/{rank}", f"beat/{rank}"], ["", "0"])
            confirmed = name
        if call is not None:
            call.begin_if_all_confirmed()
        if name and name == confirmed and inside.check(["go"]):
            return Round(inside, store, _members_of(inside))
        if token_of(store, rank) != own.token:
            raise RunStoppedError(f"process {rank} of {world_size} has been replaced by another; this one ends")
        time.sleep(TICK)
    who = call.missing() if call is not None else "process 0, or one that it waits for,"
    raise RunStoppedError(f"{who} did not join the {world_size} processes of the run within {seconds:.0f} s; the run ends")


def token_of(all_rounds: dist.Store, rank: int) -> str:
    """The token of the process that came last as the one of this rank."""
    return Member(*json.loads(all_rounds.get(f"member/{rank}"))).token


class _Call:
    """What the first process does: it calls a round with the processes it sees, and another one when these change."""

    def __init__(self, store: dist.Store, world_size: int):
        self.store = store
        self.ranks = range(world_size)
        self._called: list[str] = []
        self._round = store

    def renew(self) -> None:
        """Call another round if the processes are others than those of the last."""
        keys = [f"member/{rank}" for rank in self.ranks]
        if not self.store.check(keys):
            return
        members = [text.decode() for text in self.store.multi_get(keys)]
        if members == self._called:
            return
        name = uuid.uuid4().hex
        self._called, self._round = members, dist.PrefixStore(name, self.store)
        tokens = [Member(*json.loads(text)).token for text in members]
        self._round.multi_set(["alarm", "saved", "members"], ["", "-1", json.dumps(members)])
        self._round.multi_set([f"token/{rank}" for rank in self.ranks], tokens)
        self.store.set("round", name)

    def begin_if_all_confirmed(self) -> None:
        """Let the processes of the round go on, if all are here."""
        if self._called and self._round.check([f"beat/{rank}" for rank in self.ranks]):
            self._round.set("go", "")

    def missing(self) -> str:
        """The processes that are not here."""
        places = [(self._round, "beat")] if self._called else [(self.store, "member")]
        found = [str(rank) for store, key in places for rank in self.ranks if not store.check([f"{key}/{rank}"])]
        return f"process(es) {', '.join(found[:8])}{' and more' if len(found) > 8 else ''}"


def _members_of(store: dist.Store) -> list[Member]:
    members = [Member(*json.loads(text)) for text in json.loads(store.get("members"))]
    others = [rank for rank, member in enumerate(members) if member.world_size != len(members)]
    if others:
        raise ConfigError(
            f"process {others[0]} on {members[others[0]].host} expects {members[others[0]].world_size} processes and process 0 on "
            f"{members[0].host} expects {len(members)}; give all the same WORLD_SIZE"
        )
    return members
