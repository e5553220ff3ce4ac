"""A model whose rows are canaries: it refuses to read a row that is not its request's own.

Before a step it is told whose works these are. It then holds everything against the tokens that the
request really has: the ids it is handed, every row behind the block table before and after the
step's rows are written. What it samples is a function of the digest that it read.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from canaries import POISON, Canaries, PoisoningPool, digest, digests
from minidsa.kv_cache.cache import KvCache
from minidsa.model.sequence import SequenceInput, SequenceOutput, num_accepted
from minidsa.scheduler.batch import Step, Work
from minidsa.scheduler.messages import Submit
from runners import AtOnce
from scheduler_fakes import Driver, score

VOCAB = 512


def choose(state: int) -> int:
    """The token that follows a digest."""
    return (state >> 20) % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """`count` outputs of a request that runs alone."""
    state, outputs = digests(prompt)[-1], []
    for _ in range(count):
        outputs.append(choose(state))
        state = digest(state, outputs[-1])
    return outputs


def domain_of(command: Submit) -> Hashable:
    """Who may share the rows of a request."""
    handling = command.handling
    if not handling.uses_cache:
        return command.request_id
    return handling.tenant, handling.cache_salt


@dataclass
class CanaryRunner(AtOnce):
    """`owners` are the requests of the coming step, each with the tokens it has by now."""

    canaries: Canaries
    owners: list[tuple[Hashable, list[int]]] = field(default_factory=list)

    def run(self, sequences: Sequence[SequenceInput], num_extends: int) -> list[SequenceOutput]:
        lengths = [len(sequence.token_ids) for sequence in sequences]
        assert len(set(lengths[num_extends:])) < 2, "decodes bring equally many tokens"
        assert len(sequences) == len(self.owners)
        for sequence, (domain, tokens) in zip(sequences, self.owners, strict=True):
            known = len(sequence.token_ids) - sequence.num_drafts
            start, stop = sequence.context_len, sequence.context_len + known
            assert list(sequence.token_ids[:known]) == tokens[start:stop], "foreign tokens"
            assert list(sequence.following_ids) == tokens[start + 1 : stop + 1]
            self._check(sequence, start, self.canaries.rows_of(domain, tokens))
        wanted = [self._write(*pair) for pair in zip(sequences, self.owners, strict=True)]
        # Again: nobody has written over the rows of another.
        for sequence, rows in zip(sequences, wanted, strict=True):
            self._check(sequence, len(rows), rows)
        return [self._output(*pair) for pair in zip(sequences, self.owners, strict=True)]

    def _check(self, sequence: SequenceInput, stop: int, rows) -> None:
        assert 0 not in sequence.pages, "page 0 belongs to nobody"
        self.canaries.check(sequence.pages, stop, rows)

    def _write(self, sequence: SequenceInput, owner: tuple[Hashable, list[int]]):
        domain, tokens = owner
        start = sequence.context_len
        rows = self.canaries.rows_of(domain, [*tokens[:start], *sequence.token_ids])
        self.canaries.write(sequence.pages, start, rows[start:])
        return rows

    def _output(self, sequence: SequenceInput, owner: tuple[Hashable, list[int]]) -> SequenceOutput:
        _, tokens = owner
        output = SequenceOutput()
        if (tops := sequence.num_prompt_logprobs) is not None:
            output.prompt_logprobs = [score(token, tops) for token in sequence.following_ids]
        if sequence.sample is None:
            return output
        seen = [*tokens[: sequence.context_len], *sequence.token_ids]
        known = len(seen) - sequence.num_drafts
        assert seen[:known] == tokens, "a token is sampled behind the newest one alone"
        sampled = [choose(state) for state in digests(seen)[known - 1 :]]
        output.token_ids = sampled[: num_accepted(sequence.draft_ids, sampled) + 1]
        output.draft_ids = self._guess(sequence, [*tokens, *output.token_ids])
        return output

    def _guess(self, sequence: SequenceInput, tokens: list[int]) -> list[int]:
        """The next tokens, every third of them wrong; all but the first leave a row that is void"""
        guesses: list[int] = []
        for i in range(sequence.num_to_draft):
            if i:
                void = self.canaries.rows_of("void", [0])
                void[:] = POISON
                self.canaries.write(sequence.pages, len(tokens) + i - 2, void)
            token = choose(digests(tokens + guesses)[-1])
            guesses.append(token if token % 3 else (token + 1) % VOCAB)
        return guesses


class CanaryDriver(Driver):
    """Runs a scheduler over canaries; `commands` are the requests that were taken in."""

    def __init__(
        self,
        *,
        pages: int,
        page_size: int,
        host_pages: int | None = None,
        poisons: bool = True,
        reuse: bool = True,
        **settings,
    ) -> None:
        self.canaries = Canaries(pages, page_size)
        tier = None if host_pages is None else self.canaries.tier(host_pages)
        cache = KvCache(pages, page_size, reuse, tier)
        if poisons:
            cache.pool = PoisoningPool(pages, self.canaries, tier)
        runner = CanaryRunner(self.canaries)
        super().__init__(runner=runner, cache=cache, **settings)
        self.commands: dict[str, Submit] = {}

    def add(self, *submits: Submit) -> None:
        super().add(*submits)
        self.commands |= {command.request_id: command for command in submits}

    def tokens(self, request_id: str) -> list[int]:
        """Prompt and outputs by now."""
        return [*self.commands[request_id].prompt_ids, *self.ids[request_id]]

    def check_rows(self) -> None:
        """Raise AssertionError unless the rows of every running request are its own."""
        for request in self.scheduler.running:
            name = request.request_id
            rows = self.canaries.rows_of(domain_of(self.commands[name]), self.tokens(name))
            self.canaries.check(request.table.pages, request.num_computed, rows)

    def _check_step(self, step: Step) -> None:
        super()._check_step(step)
        self.runner.owners = [self._owner(work) for work in step.work]

    def _owner(self, work: Work) -> tuple[Hashable, list[int]]:
        name = work.request.request_id
        tokens = self.tokens(name)
        if work.follows is not None:
            tokens.append(choose(digests(tokens)[-1]))
        return domain_of(self.commands[name]), tokens
