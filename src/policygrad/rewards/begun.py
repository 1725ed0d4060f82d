"""A scoring that begins before its completions are all there: those that are over are judged while others are still drawn.

There is no thread in it: whoever draws looks in from time to time, which takes what workers have said and hands out what is there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from policygrad.errors import RewardError
from policygrad.rewards.calls import Judgement
from policygrad.rewards.dispatch import Dispatcher, Report
from policygrad.rewards.slots import Work


class Begun:
    """What is judged so far of `count` completions, by place. `plan(completions, places)`: the work that these places are."""

    def __init__(
        self, count: int, dispatcher: Dispatcher, plan: Callable[[Sequence[str], Sequence[int]], list[Work]]
    ) -> None:
        self._dispatcher, self._plan = dispatcher, plan
        self._completions = [""] * count
        self._told: list[int] = []  # places that have one
        self._waiting: list[int] = []
        self._queue = deque[Work]()
        self._said: list[tuple[int, tuple[int, ...], list[Judgement]]] = []
        self._lock = threading.RLock()  # not to hang where an interrupt has left it held
        self._open = True
        self._error: RewardError | None = None

    def look(self, completions: Mapping[int, str]) -> None:
        """These are over too, by place. It never waits, and it raises nothing that `take` will not."""
        with self._lock:
            if not self._open:
                return
            for place, completion in completions.items():
                self._completions[place] = completion
            self._told += completions
            self._waiting += completions
            try:
                if self._waiting and not self._queue:  # what has waited together goes in larger chunks
                    self._queue += self._plan(self._completions, self._waiting)
                    self._waiting = []
                self._dispatcher.turn(self._queue, lambda *said: self._said.append(said))
            except RewardError as error:
                self._error, self._open = error, False

    def close(self) -> None:
        """Nothing more is begun: what draws may have been interrupted, and still look in."""
        with self._lock:
            self._open = False

    def take(self, completions: Sequence[str], report: Report) -> tuple[list[int], list[Work], int]:
        """(places that nobody was asked about, work that was not handed out, judgements that are there), and those are reported.

        Raises:
            RewardError: a worker cannot load a function.
        """
        self.close()
        if self._error is not None:
            raise self._error
        if any(self._completions[place] != completions[place] for place in self._told):  # they were changed afterwards
            self._dispatcher.drop()
            return list(range(len(completions))), [], 0
        for said in self._said:
            report(*said)
        rest = sorted({*range(len(completions))}.difference(self._told).union(self._waiting))
        return rest, list(self._queue), sum(len(places) for _, places, _ in self._said)
