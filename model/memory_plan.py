"""The memory a start will use, said before anything is loaded.

Weights, cached rows, activations and logits follow from configuration and settings; `minidsa plan`
needs nothing else, and a start that would not fit is refused with the same numbers. No tensors.
"""

from dataclasses import dataclass

from ..configs.engine import EngineConfig
from ..configs.quantities import shown_bytes, shown_count
from ..configs.resolve import resolve_cache
from ..configs.setting_error import SettingError
from ..kv_cache.layout import RowLayout
from .config import ModelConfig
from .step_memory import activation_bytes, graph_bytes, logits_bytes, workspace_bytes
from .weight_sizes import packed_copies, total, weight_sizes

ITEM_BYTES = (("float32", 4), ("bfloat16", 2), ("float16", 2))


class DoesNotFit(ValueError):
    """The model cannot be served in this memory; one line with the numbers and what would fit."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each of `ranks` devices, for settings whose every choice is made.

    gpu: the kind that is planned for from afar; None: the device was asked. weights: by kind, the
    second form of the experts and the rope table included. cache and row bytes are those of all
    layers together.
    """

    config: EngineConfig
    ranks: int
    gpu: str | None
    notes: tuple[str, ...]
    free_bytes: int
    num_parameters: int
    weights: dict[str, int]
    keeps_fp8: bool
    latent_bytes_per_token: int
    index_bytes_per_token: int
    activations: int
    workspace: int
    logits: int
    graphs: int

    @property
    def step_bytes(self) -> int:
        """What a step takes of the memory that weights leave."""
        return self.activations + self.workspace + self.logits + self.graphs

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds."""
        cache = self.config.cache
        return (cache.num_pages or 0) * (cache.page_size or 0)

    @property
    def cache_bytes(self) -> int:
        # Page 0, where padding writes, is one more than can be handed out.
        tokens = self.num_tokens + (self.config.cache.page_size or 0)
        return tokens * (self.latent_bytes_per_token + self.index_bytes_per_token)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.step_bytes

    def lines(self) -> list[str]:
        """The plan for people."""
        config, cache = self.config, self.config.cache
        longest = config.max_model_len or 0
        step = config.scheduler.max_num_batched_tokens
        kinds = ", ".join(f"{kind} {shown_bytes(size)}" for kind, size in self.weights.items())
        return [
            f"memory: {shown_bytes(self.total_bytes)} of {shown_bytes(self.free_bytes)} "
            + _place(config, self.ranks, self.gpu),
            f"  weights {shown_bytes(self.weight_bytes)} in {_format(config, self.keeps_fp8)}, "
            f"{shown_count(self.num_parameters)} parameters ({kinds})",
            f"  cache {shown_bytes(self.cache_bytes)}: {self.num_tokens} tokens in "
            f"{cache.num_pages} pages of {cache.page_size}; a token takes "
            f"{self.latent_bytes_per_token} bytes of latent rows and "
            f"{self.index_bytes_per_token} bytes of index rows",
            f"  a step of {step} tokens: activations {shown_bytes(self.activations)}, attention's "
            f"workspace {shown_bytes(self.workspace)}, logits {shown_bytes(self.logits)}; graphs "
            f"{shown_bytes(self.graphs)}",
            f"  longest request {longest} tokens; {self.num_tokens // longest} of that length fit "
            f"at once, {config.scheduler.max_num_seqs} requests run at once",
        ]


def _place(config: EngineConfig, ranks: int, gpu: str | None) -> str:
    """Where the memory is. Of a GPU that is planned for from afar only the size is known."""
    if gpu is not None:
        return f"that CUDA leaves on {'one' if ranks == 1 else f'each of {ranks}'} {gpu}"
    return f"free on {config.device}" + (f", each of {ranks} devices" if ranks > 1 else "")


def cache_layout(model: ModelConfig, config: EngineConfig, *, with_mtp: bool) -> RowLayout:
    """Rows in the format that is asked for; raises SettingError where they cannot have it."""
    try:
        return model.cache_layout(with_mtp=with_mtp, is_fp8=config.cache.row_dtype == "fp8")
    except ValueError as error:
        raise SettingError(f"kv_cache_dtype is {config.cache.row_dtype}: {error}") from None


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    free_bytes: int,
    *,
    with_mtp: bool = False,
    keeps_fp8: bool = False,
    ranks: int = 1,
    gpu: str | None = None,
) -> MemoryPlan:
    """Plan for a config from `resolve_run`; free_bytes: of the device before anything is loaded.

    keeps_fp8: products take their weights in fp8. ranks: devices that share the model by tensor
    parallelism. gpu: as in MemoryPlan. Raises DoesNotFit, and SettingError for a setting that is
    the reason.
    """
    if ranks < 1 or model.num_heads % ranks:
        fitting = ", ".join(str(n) for n in range(1, 65) if model.num_heads % n == 0)
        raise SettingError(
            f"{ranks} devices cannot share {model.num_heads} attention heads evenly; "
            f"numbers that can: {fitting}"
        )
    item, device = dict(ITEM_BYTES)[config.dtype], config.device
    weights = _weights(model, item, device, with_mtp=with_mtp, ranks=ranks, keeps_fp8=keeps_fp8)
    layout = cache_layout(model, config, with_mtp=with_mtp)
    tokens = config.scheduler.max_num_batched_tokens or 1
    activations = activation_bytes(model, tokens, item, ranks)
    # Each draft of a request is verified in a row of its own.
    requests, width = config.scheduler.max_num_seqs, 1 + (config.speculative.num_tokens or 0)
    logits = logits_bytes(model, requests * width, item)
    replays = device == "cuda" and not config.enforce_eager
    graphs = graph_bytes(model, requests, width, tokens, item) if replays else 0
    token_bytes = layout.bytes_per_token(item)
    smallest_cache = 2 * (config.cache.page_size or 1) * token_bytes
    workspace = workspace_bytes(model, device)
    weight_bytes, step = sum(weights.values()), activations + workspace + logits + graphs
    left = free_bytes - weight_bytes
    if left < step + smallest_cache:
        weights_said = (
            weight_bytes,
            f"{shown_bytes(weight_bytes)} in {_format(config, keeps_fp8)}",
        )
        step_said = (activations, workspace + logits + graphs)
        room = f"{shown_bytes(free_bytes)} {_place(config, ranks, gpu)}"
        message = _shortfall(config, (left, room), weights_said, step_said, smallest_cache)
        # Where weights and a cache fit, it is the step that was set too large.
        raise DoesNotFit(message) if left < 2 * smallest_cache else SettingError(message)
    cache = resolve_cache(config, model.max_position_embeddings, token_bytes, left, step)
    sizes = weight_sizes(model, with_mtp=with_mtp)
    return MemoryPlan(
        config=cache.config,
        ranks=ranks,
        gpu=gpu,
        notes=cache.notes,
        free_bytes=free_bytes,
        num_parameters=total(sizes).parameters,
        weights=weights,
        keeps_fp8=keeps_fp8,
        latent_bytes_per_token=layout.latent_bytes_per_token(item),
        index_bytes_per_token=layout.index_bytes_per_token(item),
        activations=activations,
        workspace=workspace,
        logits=logits,
        graphs=graphs,
    )


def _weights(
    model: ModelConfig, item: int, device: str, *, with_mtp: bool, ranks: int, keeps_fp8: bool
) -> dict[str, int]:
    sizes = weight_sizes(model, with_mtp=with_mtp)
    weights = {kind: part.nbytes(item, ranks, keeps_fp8=keeps_fp8) for kind, part in sizes.items()}
    copies = packed_copies(model, with_mtp=with_mtp)
    if device == "cpu" and item == 4 and copies.parameters:
        weights["packed once more"] = copies.nbytes(item, ranks)
    weights["rope table"] = model.max_position_embeddings * (model.rope_dim // 2) * 8
    return weights


def _format(config: EngineConfig, keeps_fp8: bool) -> str:
    return f"{config.dtype}, products in fp8" if keeps_fp8 else config.dtype


def _shortfall(
    config: EngineConfig,
    memory: tuple[int, str],
    weights: tuple[int, str],
    step: tuple[int, int],
    cache: int,
) -> str:
    """memory: what the weights leave of it, and how to say all of it. weights: their bytes, and how
    to say that. step: activations, and what else it takes however many tokens it has."""
    left, room = memory
    tokens, (activations, rest) = config.scheduler.max_num_batched_tokens or 1, step
    needed = weights[0] + activations + rest + cache
    advice = f"it takes a device with {shown_bytes(needed)} free"
    fitting = tokens * (left - cache - rest) // activations
    if fitting > 0:
        advice += f", or max_num_batched_tokens of about {fitting}"
    return (
        f"the model does not fit: weights take {weights[1]}, a step of "
        f"{tokens} tokens {shown_bytes(activations + rest)} and the smallest cache "
        f"{shown_bytes(cache)}, more than the {room}; "
        f"{advice}"
    )
