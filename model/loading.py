"""From settings to a checkpoint on its device, ready to compute.

The order is the order of cost: everything that can refuse a start without reading a weight comes
first, then the weights, and the cache takes what is left.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..attention.registry import Choice, choose
from ..configs.engine import EngineConfig
from ..configs.engine_info import EngineInfo
from ..configs.machine import detect, free_bytes
from ..configs.resolve import resolve_cache, resolve_drafts, resolve_run
from ..kv_cache.cache import KvCache
from ..kv_cache.storage import CacheStorage
from .checkpoint import read_config
from .config import ModelConfig
from .deepseek import DeepseekModel
from .loader import has_mtp_layer, load_model
from .names import name_table
from .runner import ModelRunner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedEngine:
    """A runner, the books of its cache, and what there is to say about both."""

    runner: ModelRunner
    kv_cache: KvCache
    info: EngineInfo


def load_engine(config: EngineConfig) -> LoadedEngine:
    """Load `config.model`; raises ValueError with one line for whatever cannot be served."""
    directory = Path(config.model)
    model_config = read_config(directory)
    run = resolve_run(config, detect(torch.cuda.is_available()), model_config.dtype or "bfloat16")
    choice = _choose_backend(run.config, model_config)
    drafts = resolve_drafts(run.config, has_mtp_layer(directory, model_config))
    with_mtp = drafts.config.speculative.method == "mtp"
    torch.set_num_threads(_chosen(run.config.num_threads))
    device = torch.device(run.config.device)
    model = load_model(directory, model_config, DTYPES[run.config.dtype], device, with_mtp=with_mtp)
    size = _size(model)
    # Before the cache is sized: packing takes memory of its own.
    model.pack()
    layout = model_config.cache_layout(with_mtp=with_mtp)
    bytes_per_token = layout.bytes_per_token(model.dtype.itemsize)
    cache = resolve_cache(
        drafts.config, model_config.max_position_embeddings, bytes_per_token, _free_bytes(device)
    )
    notes = [*run.notes, choice.reason, *drafts.notes, *cache.notes]
    return _assemble(cache.config, model, size, choice, notes)


def _choose_backend(config: EngineConfig, model_config: ModelConfig) -> Choice:
    return choose(
        config.attention_backend,
        device_type=config.device,
        dtype=DTYPES[config.dtype],
        page_size=_chosen(config.cache.page_size),
        has_indexer=model_config.indexer is not None,
    )


def _size(model: DeepseekModel) -> tuple[int, int]:
    """Parameters and bytes of a model's weights, as long as they are not packed."""
    weights = [entry.target for entry in name_table(model).values()]
    return sum(w.numel() for w in weights), sum(w.nbytes for w in weights)


def _assemble(
    config: EngineConfig,
    model: DeepseekModel,
    size: tuple[int, int],
    choice: Choice,
    notes: list[str],
) -> LoadedEngine:
    num_parameters, weight_bytes = size
    layout = model.config.cache_layout(with_mtp=model.mtp is not None)
    indexer = model.config.indexer
    page_size, num_pages = _chosen(config.cache.page_size), _chosen(config.cache.num_pages)
    # One page more than can be handed out: page 0 is where padding writes.
    storage = CacheStorage(layout, num_pages + 1, page_size, model.dtype, model.device)
    backend = choice.build(storage, None if indexer is None else indexer.topk)
    kv_cache = KvCache(num_pages, page_size)
    info = EngineInfo(
        model_type=model.config.model_type,
        vocab_size=model.config.vocab_size,
        max_model_len=_chosen(config.max_model_len),
        eos_token_ids=list(model.config.eos_token_ids),
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        dtype=config.dtype,
        device=config.device,
        attention_backend=backend.name,
        page_size=page_size,
        num_cache_tokens=kv_cache.num_tokens,
        cache_bytes_per_token=layout.bytes_per_token(model.dtype.itemsize),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=_chosen(config.scheduler.max_num_batched_tokens),
        speculative=_drafter(config),
        num_speculative_tokens=_chosen(config.speculative.num_tokens),
        notes=notes,
    )
    return LoadedEngine(ModelRunner(model, backend, storage), kv_cache, info)


def _drafter(config: EngineConfig) -> Literal["none", "mtp", "ngram"]:
    method = config.speculative.method
    if method == "auto":
        raise ValueError("the speculative method was left open: resolve it first")
    return method


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_bytes()


def _chosen(value: int | None) -> int:
    """A setting that `resolve` has filled in."""
    if value is None:
        raise ValueError("a setting was left open: resolve it first")
    return value
