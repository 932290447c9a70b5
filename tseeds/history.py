"""Which configuration and which snapshots each iteration of a run had: pure functions of the run's record.

A run follows one pipeline, whose values may change between iterations (``tseeds run --accept``, ``tseeds fork --set``).
run.json records every change with the first iteration that it applies to, so that the past stays what it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tseeds import config as configuration
from tseeds.config import Pipeline
from tseeds.errors import UserError
from tseeds.schedule import retained

Change = Mapping[str, Any]
"""iteration (the first that the change applies to), key ("section.key"), old, new (None: the default), at (time)."""

VERSION = "version."
"""Beginning of the key of an accepted change of a stage's version."""


class History:
    """The newest configuration, and how it was before.

    >>> config = configuration.parse({"policy": {"path": "p"}, "problems": {"path": "d"}, "snapshot": {"every": 2}})
    >>> history = History(config, [{"iteration": 5, "key": "snapshot.every", "old": 3, "new": 2}])
    >>> history.at(4).snapshot.every, history.at(5).snapshot.every
    (3, 2)
    >>> history.pool(9)  # 0 and 3 were taken every 3, 6 and 8 every 2
    [0, 3, 6, 8]
    """

    def __init__(self, config: Pipeline, changes: Sequence[Change] = ()) -> None:
        try:
            self.changes = sorted(changes, key=lambda c: c["iteration"])
            self._borders = sorted({int(c["iteration"]) for c in self.changes})
            keys = [c["key"].split(".", 1) for c in self.changes]
            assert all(len(k) == 2 for k in keys)
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError):
            raise UserError("run.json: damaged, its changes are not a list of {iteration, key, old, new}") from None
        self.config = config
        self._configs: dict[int, Pipeline] = {}
        self._alive: dict[int, list[list[int]]] = {}

    def at(self, iteration: int) -> Pipeline:
        """The configuration in force in an iteration (0: set-up): later changes undone."""
        segment = sum(border <= iteration for border in self._borders)
        if segment not in self._configs:
            undo = [c for c in self.changes if c["iteration"] > iteration and not c["key"].startswith(VERSION)]
            config = self.config
            if undo:
                data = config.model_dump(mode="json", exclude_none=True)
                for change in reversed(undo):
                    section, key = change["key"].split(".", 1)
                    if change.get("old") is None:
                        data.get(section, {}).pop(key, None)
                    else:
                        data.setdefault(section, {})[key] = change["old"]
                config = configuration.parse(data, "run.json")
            self._configs[segment] = config
        return self._configs[segment]

    def changes_until(self, iteration: int) -> list[Change]:
        """The changes that apply from ``iteration`` or an earlier one on, and those of versions."""
        return [c for c in self.changes if c["iteration"] <= iteration or c["key"].startswith(VERSION)]

    def version(self, stage: str, iteration: int, now: int) -> int:
        """The version of a stage that an iteration's artifacts may have: ``now``, or an older one that was accepted."""
        for change in self.changes:
            if change["key"] == VERSION + stage and change["iteration"] > iteration:
                return int(change["old"])
        return now

    def pool(self, iteration: int, *, snapshot_bytes: int = 0) -> list[int]:
        """Steps of the snapshots that may write seeds in an iteration, ascending; step 0 is always one of them.

        A pure function, so that it does not depend on when files were really deleted: a snapshot that left the pool never
        comes back. snapshot_bytes: size of one snapshot on disk, for the budget.
        """
        alive = self._alive.setdefault(snapshot_bytes, [[0]])
        while len(alive) < iteration:  # alive[s]: what retention has left when iteration s is over
            step = len(alive)
            config = self.at(step).snapshot
            taken = [*alive[-1], step] if step % config.every == 0 else alive[-1]
            kept = retained(config, taken, snapshot_bytes=snapshot_bytes)
            alive.append(alive[-1] if kept == alive[-1] else kept)  # one list for all iterations that share it
        return retained(self.at(iteration).snapshot, alive[iteration - 1], snapshot_bytes=snapshot_bytes)
