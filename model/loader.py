"""From a checkpoint folder to a model: check everything first, then stream the weights in.

Strict both ways: every tensor the configuration implies must be there, and nothing else may be.
All of that is decided from headers, before memory for a single weight is taken.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..configs.engine_info import MtpLayerUse
from .checkpoint import CheckpointError, TensorInfo, read_headers
from .config import ModelConfig
from .deepseek import DeepseekModel
from .fp8 import FP8, SCALE_DTYPES, SCALE_SUFFIX, scale_shape
from .names import EMBEDDING, HEAD, Slice, layer_index, name_table, needed_shapes, unused_shapes
from .progress import progress_bar
from .upload import Uploader
from .weight_files import WeightFiles

logger = logging.getLogger(__name__)

PLAIN_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Of products that `Allocator.fp8_linear` and the experts make.
MAY_BE_FP8 = tuple(
    f"{name}.weight"
    for name in (
        *("q_proj", "q_a_proj", "indexer.wk", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
)
ROWS_AT_ONCE = 4096  # of two tensors that are compared

UNTIED = (
    "lm_head.weight is used: it differs from the embedding, although config.json has "
    "tie_word_embeddings = true"
)

Headers = Mapping[str, TensorInfo]


@dataclass(frozen=True)
class CheckedCheckpoint:
    """A checkpoint whose headers fit `config`. tensors: those to load, fp8 scales included.

    config: as given, but with a head of its own where the one in the file differs from the
    embedding that it should be tied to. notes: what there is to say about that, one sentence each.
    """

    directory: Path
    config: ModelConfig
    mtp_layer: MtpLayerUse
    tensors: dict[str, TensorInfo]
    notes: tuple[str, ...]

    @property
    def first_plain(self) -> str | None:
        """A weight that a product could take in fp8 and that is not stored so; None: all are.

        One such keeps all of them from staying in fp8. Quantised checkpoints are published whole,
        some products join several of these tensors, and a plan knows only the configuration.
        """
        for name, info in self.tensors.items():
            if name.endswith(MAY_BE_FP8) and info.dtype != FP8:
                return name
        return None

    @property
    def all_fp8(self) -> bool:
        """Whether every weight that a product could take in fp8 is stored so."""
        return self.config.quantised and self.first_plain is None


def check_checkpoint(
    directory: Path, config: ModelConfig, *, with_mtp: bool = False
) -> CheckedCheckpoint:
    """Compare the headers with what the configuration implies; reads no tensor but a tied head.

    Costs what the headers hold, whatever the configuration claims. Raises CheckpointError naming
    what is wrong.
    """
    found = read_headers(directory)
    needed: dict[str, tuple[int, ...]] = {}
    for name, shape in needed_shapes(config, with_mtp=with_mtp):
        if name not in found:
            raise CheckpointError(f"{directory}: tensor {name} is missing{_hint(name, config)}")
        _check_tensor(name, shape, found, config)
        needed[name] = shape
    others = [name for name in found if name not in needed]
    unused = unused_shapes(config, others)
    for name in others:
        if name.endswith(SCALE_SUFFIX):
            _check_scale(name, found[name], found)
        elif name in unused:
            _check_tensor(name, unused[name], found, config)
        else:
            file, hint = found[name].file, _hint(name, config)
            raise CheckpointError(f"{file}: unknown tensor {name}{hint}")
    notes: tuple[str, ...] = ()
    if HEAD in unused and not _equal(directory, found, EMBEDDING, HEAD):
        config, notes = dataclasses.replace(config, tie_word_embeddings=False), (UNTIED,)
        needed[HEAD] = unused[HEAD]
    kept = {n: info for n, info in found.items() if n.removesuffix(SCALE_SUFFIX) in needed}
    if len(kept) < len(found):
        first = next(name for name in found if name not in kept)
        logger.info("skipping %d tensors not used, such as %s", len(found) - len(kept), first)
    has_mtp = any((layer_index(name) or 0) >= config.num_layers for name in unused)
    mtp_layer = "loaded" if with_mtp else "unused" if has_mtp else "none"
    return CheckedCheckpoint(directory, config, mtp_layer, kept, notes)


def has_mtp_layer(directory: Path, config: ModelConfig) -> bool:
    """Whether the checkpoint holds the layer that guesses ahead, whatever its config.json says."""
    return f"model.layers.{config.num_layers}.eh_proj.weight" in read_headers(directory)


def load_model(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    with_mtp: bool = False,
) -> DeepseekModel:
    """Check a checkpoint and load it; raises CheckpointError."""
    return load_weights(check_checkpoint(directory, config, with_mtp=with_mtp), dtype, device)


def load_weights(
    checkpoint: CheckedCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    alive: Callable[[], None] = lambda: None,
    *,
    keeps_fp8: bool = False,
) -> DeepseekModel:
    """Allocate the model once and fill it.

    keeps_fp8: weights that products take in fp8 stay so; others are dequantised, like all without
    it. alive: called after each tensor. Raises CheckpointError for one that holds NaN or infinity.
    """
    model = DeepseekModel(
        checkpoint.config,
        dtype,
        device,
        with_mtp=checkpoint.mtp_layer == "loaded",
        keeps_fp8=keeps_fp8,
    )
    table = name_table(model)
    uploader = _uploader(device)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    with (
        WeightFiles(checkpoint.directory, checkpoint.tensors, uploader) as files,
        progress_bar("weights", total=total, unit="B", unit_scale=True) as bar,
    ):

        def place(name: str) -> str:
            _fill(table[name], name, files)
            _check_finite(name, checkpoint.tensors[name], table[name])
            return name

        for name in map(place, table) if uploader is None else uploader.each(place, table):
            bar.update(files.nbytes(name))
            alive()
    return model


def _uploader(device: torch.device) -> Uploader | None:
    """None where weights are copied within memory."""
    return Uploader(device) if device.type == "cuda" else None


def _equal(directory: Path, found: Headers, one: str, other: str) -> bool:
    """Whether two tensors of one shape hold the same values."""
    both = {n: info for n, info in found.items() if n.removesuffix(SCALE_SUFFIX) in (one, other)}
    with WeightFiles(directory, both) as files:
        rows = (files.read(name).split(ROWS_AT_ONCE) for name in (one, other))
        return all(torch.equal(a.float(), b.float()) for a, b in zip(*rows, strict=True))


def _check_tensor(name: str, shape: tuple[int, ...], found: Headers, config: ModelConfig) -> None:
    info = found[name]
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file}: {name} has shape {list(info.shape)}, the configuration "
            f"implies {list(shape)}"
        )
    declared = list(PLAIN_DTYPES.values()) if config.dtype is None else [PLAIN_DTYPES[config.dtype]]
    allowed = {"F32", *declared} | ({FP8} if config.quantised and len(shape) == 2 else set())
    if info.dtype not in allowed:
        raise CheckpointError(
            f"{info.file}: {name} has dtype {info.dtype}, expected {' or '.join(sorted(allowed))}"
        )
    if info.dtype == FP8 and name + SCALE_SUFFIX not in found:
        raise CheckpointError(f"{info.file}: {name} is fp8 and {name}{SCALE_SUFFIX} is missing")


def _check_scale(name: str, info: TensorInfo, found: Headers) -> None:
    weight = found.get(name.removesuffix(SCALE_SUFFIX))
    if weight is None or weight.dtype != FP8:
        raise CheckpointError(f"{info.file}: unknown tensor {name}: it scales no fp8 weight")
    if info.shape != scale_shape(weight.shape):
        raise CheckpointError(
            f"{info.file}: {name} has shape {list(info.shape)}, blocks of 128 x 128 "
            f"imply {list(scale_shape(weight.shape))}"
        )
    if info.dtype not in SCALE_DTYPES:
        raise CheckpointError(
            f"{info.file}: {name} has dtype {info.dtype}, expected {' or '.join(SCALE_DTYPES)}"
        )


def _hint(name: str, config: ModelConfig) -> str:
    """What the configuration says about the layer that a tensor would belong to."""
    if layer_index(name) is None:
        return ""
    experts = "" if config.moe is None else f", n_routed_experts = {config.moe.num_experts}"
    return f" (num_hidden_layers = {config.num_layers}{experts})"


def _fill(entry: Slice, name: str, files: WeightFiles) -> None:
    if entry.scales is None:
        entry.fill(files.read(name))
        return
    values, scales = files.read_fp8(name)
    entry.fill(values)
    entry.fill_scales(scales)


def _check_finite(name: str, info: TensorInfo, entry: Slice) -> None:
    """On the filled target, so that overflow of a conversion shows too."""
    if entry.scales is None:
        finite = torch.stack(torch.aminmax(entry.target)).isfinite().all()
    else:
        # e4m3 has one NaN, in both signs, and no infinity.
        finite = (entry.target.view(torch.uint8) & 0x7F != 0x7F).all()
        finite &= entry.scales.isfinite().all()
    if not bool(finite):
        raise CheckpointError(f"{info.file}: {name} holds NaN or infinity")
