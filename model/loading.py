"""From settings to a checkpoint on its device, ready to compute.

The order is the order of cost: everything that can refuse a start without reading a weight comes
first, then the weights, and the cache takes what is left.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..attention.registry import Choice, choose
from ..attention.sparse.dsa import DsaBackend
from ..attention.sparse.selection_counts import SelectionCounts
from ..configs.engine import EngineConfig
from ..configs.engine_info import EngineInfo, MtpLayerUse, StartPlan
from ..configs.machine import detect, free_bytes
from ..configs.quantities import shown_bytes
from ..configs.resolve import resolve_cache, resolve_drafts, resolve_run
from ..configs.setting_error import SettingError
from ..kv_cache.cache import KvCache
from ..kv_cache.host_tier import HostTier
from ..kv_cache.storage import CacheStorage
from .checkpoint import read_config
from .config import ModelConfig
from .decode_graphs import CudaCapture, DecodeGraphs
from .deepseek import DeepseekModel
from .dummy_weights import dummy_checkpoint, random_model
from .layer_graphs import LayerGraphs
from .layers.fp8 import multiplies_fp8
from .loader import CheckedCheckpoint, check_checkpoint, has_mtp_layer, load_weights
from .memory_plan import MemoryPlan, cache_layout, plan_memory
from .progress import progress_bar
from .recorded_layers import RecordedLayers
from .runner import ModelRunner
from .weight_sizes import total, weight_sizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLD_SECONDS = 0.1  # that weights take at least, if their speed is to be told


@dataclass(frozen=True)
class LoadedEngine:
    """A runner, the books of its cache, and what there is to say about both."""

    runner: ModelRunner
    kv_cache: KvCache
    info: EngineInfo

    @property
    def selection(self) -> SelectionCounts | None:
        """What sparse attention counts; None where there is none."""
        backend = self.runner.backend
        return backend.clock.counts if isinstance(backend, DsaBackend) else None

    def prepare(self, alive: Callable[[], None] = lambda: None) -> None:
        """Capture what will be replayed, which takes seconds; alive: called after each shape.

        Without this shapes are captured as they come up.
        """
        if self.runner.graphs is None:
            return
        info = self.info
        drafts = info.num_speculative_tokens if info.speculative != "none" else 0
        shapes = self.runner.prepare(info.max_num_seqs, drafts, info.max_model_len)
        with progress_bar("graphs") as bar:
            for shape in shapes:
                alive()
                bar.set_postfix_str(shape)
                bar.update()
        alive()


@dataclass(frozen=True)
class CheckedStart:
    """Settings, a checkpoint and a backend that fit each other; nothing is loaded yet.

    config: from `resolve_run`. keeps_fp8: products take their weights in fp8. notes: the choices
    made so far.
    """

    config: EngineConfig
    checkpoint: CheckedCheckpoint
    choice: Choice
    memory: MemoryPlan
    keeps_fp8: bool
    notes: tuple[str, ...]

    @property
    def plan(self) -> StartPlan:
        model = self.checkpoint.config
        return StartPlan(model.model_type, model.vocab_size, self.memory.lines())

    def load(self, alive: Callable[[], None] = lambda: None) -> LoadedEngine:
        """Read the weights and take the memory of the cache; `alive` is called at every progress.

        Raises ValueError with one line for a damaged weight or a cache that does not fit.
        """
        config, memory = self.config, self.memory
        torch.set_num_threads(_chosen(config.num_threads))
        device = torch.device(config.device)
        dtype = DTYPES[config.dtype]
        began = time.monotonic()
        model = self._weights(dtype, device, alive)
        notes = [*self.notes, *_told_speed(self.checkpoint, time.monotonic() - began)]
        # Before the cache is sized: packing takes memory of its own.
        model.pack(alive)
        alive()
        cache = resolve_cache(
            config,
            model.config.max_position_embeddings,
            memory.latent_bytes_per_token + memory.index_bytes_per_token,
            _free_bytes(device),
            memory.step_bytes,
        )
        notes += cache.notes
        return _assemble(cache.config, model, self.choice, notes, self.checkpoint.mtp_layer)

    def _weights(
        self, dtype: torch.dtype, device: torch.device, alive: Callable[[], None]
    ) -> DeepseekModel:
        found, config = self.checkpoint, self.config
        if config.load_format == "dummy":
            return random_model(
                found.config,
                dtype,
                device,
                config.seed,
                alive,
                with_mtp=found.mtp_layer == "loaded",
                keeps_fp8=self.keeps_fp8,
            )
        return load_weights(found, dtype, device, alive, keeps_fp8=self.keeps_fp8)


def check_start(config: EngineConfig) -> CheckedStart:
    """Check everything that can be checked without reading a weight, the cheapest first.

    Raises SettingError for a setting and ValueError for a checkpoint that cannot be served.
    """
    directory = Path(config.model)
    model_config = read_config(directory)
    run = resolve_run(config, detect(torch.cuda.is_available()), model_config.dtype or "bfloat16")
    choice = _choose_backend(run.config, model_config)
    dummy = config.load_format == "dummy"
    if dummy and config.cache.session_dir is not None:
        raise SettingError("session_dir saves rows, and those of load_format dummy mean nothing")
    has_mtp = model_config.num_mtp_layers > 0 if dummy else has_mtp_layer(directory, model_config)
    drafts = resolve_drafts(run.config, has_mtp)
    with_mtp = drafts.config.speculative.method == "mtp"
    check = dummy_checkpoint if dummy else check_checkpoint
    checkpoint = check(directory, model_config, with_mtp=with_mtp)
    free = _free_bytes(torch.device(run.config.device))
    device = torch.device(run.config.device)
    could = multiplies_fp8(device) and run.config.dtype != "float32"
    fp8 = could and checkpoint.all_fp8
    memory = plan_memory(checkpoint.config, drafts.config, free, with_mtp=with_mtp, keeps_fp8=fp8)
    notes = [*run.notes, choice.reason, *drafts.notes, *checkpoint.notes]
    if checkpoint.config.quantised:
        kept = "kept in fp8" if fp8 else f"dequantised to {run.config.dtype}"
        why = f": {checkpoint.first_plain} is not in fp8" if could and not fp8 else ""
        notes.append(f"fp8 weights are {kept}{why}")
    return CheckedStart(drafts.config, checkpoint, choice, memory, fp8, tuple(notes))


def _told_speed(checkpoint: CheckedCheckpoint, seconds: float) -> list[str]:
    """A note about reading the weights; none for what was read before anybody looked."""
    size = sum(info.nbytes for info in checkpoint.tensors.values())
    if seconds < TOLD_SECONDS or not size:
        return []
    return [
        f"{shown_bytes(size)} of weights read in {seconds:.1f} s ({size / seconds / 1e9:.2g} GB/s)"
    ]


def _choose_backend(config: EngineConfig, model_config: ModelConfig) -> Choice:
    try:
        return choose(
            config.attention_backend,
            device_type=config.device,
            dtype=DTYPES[config.dtype],
            page_size=_chosen(config.cache.page_size),
            has_indexer=model_config.indexer is not None,
        )
    except ValueError as error:
        raise SettingError(str(error)) from error


def _assemble(
    config: EngineConfig,
    model: DeepseekModel,
    choice: Choice,
    notes: list[str],
    mtp_layer: MtpLayerUse,
) -> LoadedEngine:
    size = total(weight_sizes(model.config, with_mtp=model.mtp is not None))
    layout = cache_layout(model.config, config, with_mtp=model.mtp is not None)
    indexer = model.config.indexer
    page_size, num_pages = _chosen(config.cache.page_size), _chosen(config.cache.num_pages)
    # One page more than can be handed out: page 0 is where padding writes.
    storage = CacheStorage(layout, num_pages + 1, page_size, model.dtype, model.device)
    backend = choice.build(storage, None if indexer is None else indexer.topk)
    tier = _host_tier(storage, config.cache.host_bytes, notes)
    kv_cache = KvCache(num_pages, page_size, config.cache.prefix_reuse, tier)
    info = EngineInfo(
        model_type=model.config.model_type,
        vocab_size=model.config.vocab_size,
        max_model_len=_chosen(config.max_model_len),
        eos_token_ids=list(model.config.eos_token_ids),
        num_parameters=size.parameters,
        weight_bytes=size.nbytes(model.dtype.itemsize, keeps_fp8=model.keeps_fp8),
        dtype=config.dtype,
        device=config.device,
        attention_backend=backend.name,
        page_size=page_size,
        num_cache_tokens=kv_cache.num_tokens,
        cache_bytes_per_token=layout.bytes_per_token(model.dtype.itemsize),
        cache_dtype="fp8" if layout.is_fp8 else config.dtype,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=_chosen(config.scheduler.max_num_batched_tokens),
        max_prefill_tokens=_chosen(config.scheduler.max_prefill_tokens),
        speculative=_drafter(config),
        num_speculative_tokens=_chosen(config.speculative.num_tokens),
        notes=notes,
        mtp_layer=mtp_layer,
        index_topk=None if indexer is None else indexer.topk,
    )
    graphs = layer_graphs = None
    if backend.replayable and not config.enforce_eager:
        capture, context = CudaCapture(), (model, backend, storage)
        graphs = DecodeGraphs(*context, capture)
        layer_graphs = LayerGraphs(*context, info.max_num_batched_tokens, capture)
        notes.append(
            "steps are replayed as CUDA graphs, the usual ones captured before the first request"
        )
    recorded = None
    if model.device.type == "cpu" and not config.enforce_eager:
        recorded = RecordedLayers(model, backend, storage)
        if recorded.most_tokens:
            notes.append(f"steps of up to {recorded.most_tokens} tokens run recorded layers")
    runner = ModelRunner(model, backend, storage, graphs, layer_graphs, recorded)
    return LoadedEngine(runner, kv_cache, info)


def _drafter(config: EngineConfig) -> Literal["none", "mtp", "ngram"]:
    method = config.speculative.method
    if method == "auto":
        raise ValueError("the speculative method was left open: resolve it first")
    return method


def _host_tier(storage: CacheStorage, num_bytes: int, notes: list[str]) -> HostTier | None:
    if not num_bytes:
        return None
    if num_bytes > free_bytes():
        raise SettingError(f"host_bytes is {num_bytes}; {free_bytes()} bytes of memory are free")
    tier = HostTier(storage, num_bytes)
    notes.append(f"host tier of {tier.num_pages} pages: host_bytes is {num_bytes}")
    return tier


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()


def _chosen(value: int | None) -> int:
    """A setting that `resolve` has filled in."""
    if value is None:
        raise ValueError("a setting was left open: resolve it first")
    return value
