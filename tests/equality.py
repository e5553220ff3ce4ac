"""Random ways to serve the same requests, and what each request answers when it is alone.

`Sweep.difference` serves some requests in one of these ways and compares ids, logprobs, ranks and
alternatives with the answers of engines that serve a single request each, to the last bit.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints import t_markov, t_tied, t_tied_dense
from minidsa.scheduler.messages import Submit, TokenLogprobs
from model_driver import Answers, ModelDriver, Settings
from scheduler_fakes import submit

BEDS = {"sparse": t_tied, "dense": t_tied_dense, "accepted drafts": t_markov}
"""Checkpoints with near-tied logits, and one whose drafts are right."""
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 24, 33, 48, 63, 64, 65, 90)
MOST_OUTPUTS = 12
# What the longest request and the page that a decode may need hold.
FEWEST_TOKENS = max(LENGTHS) + MOST_OUTPUTS + 1


def random_settings(rng: random.Random) -> Settings:
    """One point of the sweep. Whatever else must not change an answer becomes a line here."""
    page_size = rng.choice([1, 2, 3, 4, 8, 16, 64])
    tokens = FEWEST_TOKENS * rng.choice([1, 1, 2, 12])
    budget = rng.choice([1, 5, 7, 16, 33, 64, 100, 300])
    # Who is thrown out before its prompt was ever computed never ends.
    preempt_every = rng.choice([0, 0, 5, 9]) if budget >= 100 else 0
    return Settings(
        page_size=page_size,
        pages=-(-tokens // page_size) + 1,
        budget=budget,
        seats=rng.choice([1, 2, 3, 5, 8, 16, 32]),
        preempt_every=preempt_every,
        drafter=rng.choice(["none", "none", "ngram", "mtp"]),
        num_drafts=rng.choice([1, 2, 3, 5]),
        reuse=rng.random() < 0.8,
        host_pages=rng.choice([0, 2, 400 // page_size]),
        leads=rng.random() < 0.5,
        recorded=rng.random() < 0.5,
    )


def random_request(number: int) -> Submit:
    """Request `number`: greedy or sampled, each with scores, some with those of the prompt.

    Two of three begin as all others of them do, so that some find the rows of others.
    """
    rng = random.Random(number)
    prompt = [rng.randrange(80, 512) for _ in range(rng.choice(LENGTHS))]
    if number % 3:
        shared = random.Random(0).choices(range(80, 512), k=rng.choice(LENGTHS))
        prompt = [*shared, *prompt][: len(prompt)]
    scores = {"logprobs": rng.choice([0, 3]), "prompt_logprobs": rng.choice([None, None, 2])}
    command = submit(f"r{number}", prompt, rng.randrange(1, MOST_OUTPUTS + 1), **scores)
    if rng.random() < 0.5:
        return command
    fields = {f: getattr(command.params, f) for f in command.params.__struct_fields__}
    sampling = {"temperature": 1.0, "top_p": rng.choice([0.8, 1.0]), "seed": number}
    params = type(command.params)(**fields | sampling)
    return Submit(command.request_id, command.prompt_ids, params)


@dataclass
class Sweep:
    """A checkpoint, and the answers of single requests as far as they were needed.

    met: how often what the sweep is about has happened: tokens found in the cache, pages that came
    back from the host, preemptions, steps that were started ahead.
    """

    folder: Path
    num_requests: int = 60
    solo: dict[int, Answers] = field(default_factory=dict)
    met: Counter[str] = field(default_factory=Counter)

    def difference(self, seed: int) -> str | None:
        """Serve up to 12 requests in a random way, perhaps twice, the second time with the cache of
        the first; None if every answer is its own, else which.
        """
        rng = random.Random(seed)
        settings = random_settings(rng)
        numbers = rng.sample(range(self.num_requests), rng.randint(1, 12))
        arrive = {i: rng.randrange(20) for i in range(len(numbers))}
        driver = ModelDriver(self.folder, settings)
        for _ in range(rng.choice([1, 2, 2])):
            found = driver.run([random_request(number) for number in numbers], arrive)
            if (difference := self._compare(numbers, found)) is not None:
                return f"seed {seed}: {difference} under {settings}"
        stats = driver.scheduler.stats()
        self.met["cached tokens"] += stats.num_prefix_hits
        self.met["pages from the host"] += stats.num_host_loads
        self.met["preemptions"] += stats.num_preemptions
        self.met["steps ahead"] += driver.num_ahead
        return None

    def _compare(self, numbers: Sequence[int], found: Answers) -> str | None:
        for number in numbers:
            name, alone = f"r{number}", self._alone(number)
            if found.ids[name] != alone.ids[name]:
                return f"the ids of {name} differ"
            if bits(found.logprobs[name]) != bits(alone.logprobs[name]):
                return f"the logprobs of {name} differ"
        return None

    def _alone(self, number: int) -> Answers:
        if number not in self.solo:
            driver = ModelDriver(self.folder, Settings())
            self.solo[number] = driver.run([random_request(number)])
        return self.solo[number]


def bits(scores: list[TokenLogprobs]) -> list[tuple]:
    """All that is reported of each token; floats compare as they are."""
    return [(s.logprob, s.rank, s.top_ids, s.top_logprobs) for s in scores]
