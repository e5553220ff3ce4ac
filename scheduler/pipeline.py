"""Steps one after the other, each handed to the device before the one in front of it is booked.

A decode's token need not be on the host for the layers of the next step to be formed: it is on the
device, where the next step reads it. Only what is chosen from them depends on more (penalties,
grammars, budgets), so a step has two halves: its layers are started, and its tokens are chosen once
all before them are booked. Wherever the runner says that a step leads, and the scheduler finds
nothing to decide, the layers of the step behind it are started as soon as its tokens are being
chosen; they are waited for, booked and sent while the device works, and so are the masks of the
next made. Everything else is one step at a time, and so is every step of a runner that never leads.

A request that turns out to have ended has a row computed too many, in a page that was its own:
nothing is chosen in it that anybody takes, and whoever gets the page writes to it later, in the
device's order as well.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..model.sequence import SequenceOutput, Started
from .batch import NOTHING, Step
from .launch import Runner, choose, finish, start
from .messages import RequestOutput
from .scheduler import Scheduler

Rescue = Callable[[Step, Exception], Sequence[SequenceOutput]]
"""Computes a step again whose computation raised, or raises."""


@dataclass(frozen=True)
class Flight:
    """A step that was started, at `began` seconds, or what came of the attempt."""

    step: Step
    began: float
    started: Started | Exception

    @property
    def leader(self) -> Started | None:
        """What the next step may be started behind, if it may."""
        if isinstance(self.started, Exception) or not self.started.leads:
            return None
        return self.started

    def chosen(self) -> "Flight":
        """The same with its tokens being chosen, or what came of that attempt."""
        if isinstance(self.started, Exception):
            return self
        try:
            choose(self.started, self.step)
        except Exception as error:
            return replace(self, started=error)
        return self

    def results(self) -> Sequence[SequenceOutput]:
        """Wait; raises what the computation raised."""
        if isinstance(self.started, Exception):
            raise self.started
        return finish(self.started, self.step)


class Pipeline:
    """Computes what the scheduler forms. rescue: raises by default."""

    def __init__(self, runner: Runner, scheduler: Scheduler, rescue: Rescue | None = None) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._rescue = rescue
        self._ahead: Flight | None = None
        self._ended = 0.0

    @property
    def is_ahead(self) -> bool:
        """Whether a step was started that `advance` did not return yet."""
        return self._ahead is not None and self._ahead.step.is_wanted

    def advance(self) -> tuple[Step, list[RequestOutput]]:
        """Compute and book the next step; false, with nothing done, if there is nothing to do."""
        flight = self._ahead if self.is_ahead else self._start(self._scheduler.schedule(), None)
        self._ahead = None
        if flight is None:
            return NOTHING, []
        flight = flight.chosen()
        if (leader := flight.leader) is not None:
            self._ahead = self._start(self._scheduler.schedule_behind(flight.step), leader)
        return flight.step, self._book(flight)

    def _start(self, step: Step, behind: Started | None) -> Flight | None:
        if not step:
            return None
        began = time.perf_counter()
        try:
            return Flight(step, began, start(self._runner, step, behind))
        except Exception as error:
            return Flight(step, began, error)

    def _book(self, flight: Flight) -> list[RequestOutput]:
        try:
            results = flight.results()
        except Exception as error:
            # What was started behind it went on from nothing.
            self._ahead = None
            if self._rescue is None:
                raise
            step = flight.step.of_running()
            return self._scheduler.commit(step, self._rescue(step, error))
        now = time.perf_counter()
        self._scheduler.observe(flight.step, now - max(flight.began, self._ended))
        self._ended = now
        return self._scheduler.commit(flight.step, results)
