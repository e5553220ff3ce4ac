"""A model with the widths of DeepSeek-V3.2's attention on a GPU: kernels against plain torch.

pytest -m gpu tests/kernels/test_v32_shape.py
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from checkpoints import t_v32
from minidsa.attention.registry import choose
from minidsa.configs.sampling import SamplingParams
from minidsa.model.checkpoint import read_config
from minidsa.model.config import parse_config
from minidsa.model.decode_graphs import DecodeGraphs
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.layers.fp8 import Fp8Linear
from minidsa.model.loader import check_checkpoint, load_weights
from minidsa.model.names import name_table
from minidsa.model.runner import ModelRunner
from minidsa.model.sequence import SampleInput, SequenceInput
from stepper import Stepper, new_storage

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PAGE, TOPK, PROMPT, STEPS = 64, 512, 1500, 32
# 128 heads over rows of 512 + 64, 64 index heads of 128, as in V3.2; fewer and narrower layers.
CONFIG = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 32,
    "vocab_size": 2048,
    "index_topk": TOPK,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
GREEDY = SamplingParams(max_tokens=STEPS, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def model() -> DeepseekModel:
    torch.manual_seed(0)
    made = DeepseekModel(parse_config(CONFIG), torch.bfloat16, CUDA)
    for name, entry in name_table(made).items():
        if entry.target.dim() == 1:
            entry.target.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            width = 1 if "embed" in name else entry.target.shape[-1]
            entry.target.normal_(0.0, width**-0.5)
    return made


def stepper(model: DeepseekModel, backend: str, is_fp8: bool) -> Stepper:
    storage = new_storage(model, 60, PAGE, is_fp8=is_fp8)
    choice = choose(
        backend, device_type="cuda", dtype=model.dtype, page_size=PAGE, has_indexer=True
    )
    return Stepper(model, choice.build(storage, TOPK), storage)


def prompt(model: DeepseekModel) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (PROMPT,), generator=generator).tolist()


def assert_agree(own: Tensor, leading: Tensor) -> None:
    """Greedy tokens are equal wherever the best two are further apart than backends differ."""
    own, leading = own.float(), leading.float()
    error = (own - leading).abs().amax(dim=1)
    assert own.isfinite().all() and error.median() < 0.1 * leading.std()
    best = leading.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * error
    assert clear.float().mean() > 0.3
    assert torch.equal(own.argmax(1)[clear], leading.argmax(1)[clear])


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("chunk", [PROMPT, 200])
def test_prompts_and_decodes_over_kernels_say_what_torch_says(model, is_fp8, chunk):
    leader, follower = (stepper(model, name, is_fp8) for name in ("torch", "triton"))
    leading = leader.prefill("a", prompt(model), PROMPT)
    assert_agree(follower.prefill("a", prompt(model), chunk), leading)
    first = int(leading[-1].argmax())
    tokens, logits = leader.greedy("a", first, STEPS)
    own = [follower.step([("a", [token])], 0) for token in (first, *tokens[:-1])]
    assert_agree(torch.cat(own), logits)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_replayed_steps_say_what_eager_ones_say(model, is_fp8):
    """Three requests of different lengths, two of them past the selection, by whole steps."""
    said = []
    for replays in (False, True):
        made = stepper(model, "triton", is_fp8)
        graphs = DecodeGraphs(model, made.backend, made.storage) if replays else None
        runner = ModelRunner(model, made.backend, made.storage, graphs)
        lengths = [PROMPT, 700, 300]
        pages = [list(range(1, 27)), list(range(27, 41)), list(range(41, 48))]
        tokens: list[list[int]] = [[], [], []]
        for i, length in enumerate(lengths):
            ids = prompt(model)[:length]
            sample = SampleInput(GREEDY, ids, [])
            [output] = runner.run([SequenceInput(ids, 0, pages[i], sample)], 1)
            tokens[i] += output.token_ids
        for step in range(STEPS):
            inputs = [
                SequenceInput([own[-1]], length + step, table, SampleInput(GREEDY, [1], own))
                for own, length, table in zip(tokens, lengths, pages, strict=True)
            ]
            for own, output in zip(tokens, runner.run(inputs, 0), strict=True):
                own += output.token_ids
        said.append(tokens)
    agree = sum(a == b for x, y in zip(*said, strict=True) for a, b in zip(x, y, strict=True))
    # One near tie that padding decides otherwise sends a request another way.
    assert agree > 0.9 * 3 * (STEPS + 1)


@pytest.fixture(scope="module")
def both() -> list[DeepseekModel]:
    """One checkpoint with its fp8 weights dequantised, and with them kept."""
    checkpoint = check_checkpoint(t_v32(), read_config(t_v32()))
    made = [load_weights(checkpoint, torch.bfloat16, CUDA, keeps_fp8=k) for k in (False, True)]
    assert [isinstance(m.layers[0].attention.down, Fp8Linear) for m in made] == [False, True]
    return made


def of_first_layer(model: DeepseekModel, tokens: int) -> Iterator[Tensor]:
    """What its first projection makes, the rows it leaves in the cache, and what it adds."""
    x_TD = torch.randn(tokens, 1024, generator=torch.Generator().manual_seed(2)).to(CUDA).bfloat16()
    made, layer = stepper(model, "triton", is_fp8=False), model.layers[0]
    yield layer.attention.down(layer.attention_norm(x_TD))
    plan = made.backend.plan(made.batch([("a", range(tokens))], 1))
    before_TD = x_TD.clone()
    delta_TD = layer(x_TD, None, model._step(plan, made.backend, made.storage))
    slots_T, (index_SD, *_) = plan.batch.slots_T, made.storage.index_k
    assert index_SD is not None
    yield made.storage.latent_LSC[0, slots_T]
    yield index_SD[slots_T]
    yield x_TD - before_TD + delta_TD


@pytest.mark.parametrize("tokens", [1, 64, 65, 500])
def test_a_layer_in_fp8_makes_what_the_dequantised_one_makes(both, tokens):
    """Up to the rounding of what is multiplied, a few hundredths of it each time.

    By our kernel, and from 65 tokens on by cuBLAS.
    """
    with torch.inference_mode():
        for plain, kept in zip(*(of_first_layer(model, tokens) for model in both), strict=True):
            assert plain.shape == kept.shape and kept.isfinite().all()
            error = (kept.float() - plain.float()).norm() / plain.float().norm()
            assert error < 0.1
