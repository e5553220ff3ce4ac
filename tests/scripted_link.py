"""The other end of an engine's channel, for an engine in the process of the test."""

from minidsa.scheduler.messages import Command, Outputs, Shutdown


class ScriptedLink:
    """Hands over commands turn by turn, then Shutdown once the engine is idle; keeps the events."""

    def __init__(self, turns, idle_turns=2):
        self.turns = list(turns)
        self.idle_turns = idle_turns
        self.events = []
        self.timeouts = []

    def receive(self, timeout: float) -> list[Command]:
        self.timeouts.append(timeout)
        if self.turns:
            return self.turns.pop(0)
        if timeout > 0:
            self.idle_turns -= 1
        return [] if self.idle_turns >= 0 else [Shutdown()]

    def send(self, event):
        self.events.append(event)

    def outputs(self, request_id=None):
        return [
            output
            for event in self.events
            if isinstance(event, Outputs)
            for output in event.outputs
            if request_id in (None, output.request_id)
        ]

    def ids(self, request_id):
        return [token for output in self.outputs(request_id) for token in output.token_ids]

    def ends(self):
        return {o.request_id: o for o in self.outputs() if o.finish_reason is not None}


class CountingWatchdog:
    def __init__(self):
        self.restarts = 0

    def restart(self):
        self.restarts += 1
