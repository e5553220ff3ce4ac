"""A real model under the real scheduler, in this process, with unreadable rows wherever possible.

Cache memory starts as NaN and a page turns to NaN again when it is freed, so a row that is read
before it was written, or after it was given back, ends in a token nobody expects.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from minidsa.attention.registry import choose
from minidsa.configs.engine import SchedulerConfig
from minidsa.kv_cache.cache import KvCache
from minidsa.kv_cache.host_tier import HostTier
from minidsa.kv_cache.pool import PagePool
from minidsa.kv_cache.storage import CacheStorage
from minidsa.model.checkpoint import read_config
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.loader import load_model
from minidsa.model.recorded_layers import RecordedLayers
from minidsa.model.runner import ModelRunner
from minidsa.scheduler.grammar import GrammarCompiler
from minidsa.scheduler.messages import RequestOutput, Submit, TokenLogprobs
from minidsa.scheduler.pipeline import Pipeline
from minidsa.scheduler.speculative import Speculation, new_speculation
from replays import Replays
from scheduler_fakes import PreemptingScheduler
from stepper import new_storage


@dataclass(frozen=True)
class Settings:
    """What must not change a single token."""

    pages: int = 256
    page_size: int = 8
    budget: int = 64
    seats: int = 32
    preempt_every: int = 0
    drafter: Literal["none", "mtp", "ngram"] = "none"
    num_drafts: int = 3
    max_model_len: int = 512
    reuse: bool = True
    host_pages: int = 0
    leads: bool = False
    recorded: bool = False


class NanPool(PagePool):
    """A pool whose freed pages cannot be read any more."""

    def __init__(self, num_pages: int, storage: CacheStorage, settle: Callable[[], None]) -> None:
        super().__init__(num_pages)
        self._settle = settle
        self._storage = storage

    def reclaim(self, page: int) -> None:
        super().reclaim(page)
        self._settle()
        size = self._storage.page_size
        rows = slice(page * size, (page + 1) * size)
        self._storage.latent_LSC[:, rows] = torch.nan
        for keys in self._storage.index_k:
            if keys is not None:
                keys[rows] = torch.nan


@functools.cache
def model_of(directory: Path, *, with_mtp: bool = False) -> DeepseekModel:
    config, device = read_config(directory), torch.device("cpu")
    model = load_model(directory, config, torch.float32, device, with_mtp=with_mtp)
    model.pack()
    return model


class ModelDriver:
    """One engine without its process: requests in, outputs out."""

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        speculation: Speculation | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        model = model_of(directory, with_mtp=settings.drafter == "mtp")
        config = model.config
        storage = new_storage(model, settings.pages + 1, settings.page_size)
        choice = choose(
            "torch",
            device_type="cpu",
            dtype=torch.float32,
            page_size=settings.page_size,
            has_indexer=config.indexer is not None,
        )
        backend = choice.build(storage, config.indexer.topk if config.indexer else None)
        recorded = RecordedLayers(model, backend, storage) if settings.recorded else None
        # Guesses have no place in steps that are started ahead.
        leads = settings.leads and settings.drafter != "mtp"
        self.replays = Replays(model, backend, storage, recorded) if leads else None
        self.runner = ModelRunner(model, backend, storage, self.replays, recorded=recorded)
        tier = None
        if settings.host_pages:
            page_bytes = sum(plane.nbytes for plane in storage.planes()) // (settings.pages + 1)
            tier = HostTier(storage, settings.host_pages * page_bytes)
        cache = KvCache(settings.pages, settings.page_size, settings.reuse, tier)
        # Whatever is to be kept of a page is copied before the page is made unreadable.
        cache.pool = NanPool(settings.pages, storage, cache.settle)
        limits = SchedulerConfig(
            max_num_seqs=settings.seats, max_num_batched_tokens=max(settings.budget, settings.seats)
        )
        if speculation is None:
            speculation = new_speculation(settings.drafter, settings.num_drafts, adaptive=False)
        self.scheduler = PreemptingScheduler(
            limits, cache, settings.max_model_len, config.vocab_size, speculation, grammars
        )
        self.scheduler.every = settings.preempt_every

    @property
    def num_ahead(self) -> int:
        """Steps that were started before the tokens in front of them were waited for."""
        return 0 if self.replays is None else self.replays.num_ahead

    def run(self, submits: Sequence[Submit], arrive: Mapping[int, int] | None = None) -> "Answers":
        """Serve all requests; arrive: the step at which request i comes, 0 if not given."""
        answers = Answers()
        waiting = sorted(enumerate(submits), key=lambda item: (arrive or {}).get(item[0], 0))
        steps, pipeline = 0, Pipeline(self.runner, self.scheduler)
        while waiting or self.scheduler.has_work:
            while waiting and (arrive or {}).get(waiting[0][0], 0) <= steps:
                self.scheduler.add(waiting.pop(0)[1])
            answers.take(pipeline.advance()[1])
            self.scheduler.check()
            steps += 1
        self.scheduler.check_idle()
        return answers


class Answers:
    """Ids and log-probabilities by request, how each ended, and all outputs as they came."""

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.ends: dict[str, RequestOutput] = {}
        self.pieces: dict[str, list[RequestOutput]] = {}
        self.num_drafted = 0
        self.num_accepted = 0

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self.ids.setdefault(output.request_id, []).extend(output.token_ids)
            self.pieces.setdefault(output.request_id, []).append(output)
            self.num_drafted += output.num_drafted
            self.num_accepted += output.num_accepted
            scores = self.logprobs.setdefault(output.request_id, [])
            scores.extend([*(output.prompt_logprobs or []), *(output.logprobs or [])])
            if output.finish_reason is not None:
                self.ends[output.request_id] = output
