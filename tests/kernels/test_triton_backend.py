"""The triton backend, alone and below the sparse one, against the definition.

In fp32 everywhere: interpreted without a GPU, compiled with one.
"""

import pytest
import torch

from attention_bed import TOPK, Bed, Chunk, assert_close
from checkpoints import t_cpu
from kernel_bed import DEVICE
from minidsa.attention.dense.torch_ref import TorchDenseBackend
from minidsa.attention.dense.triton import TritonDenseBackend
from minidsa.attention.sparse.dsa import DsaBackend
from minidsa.model.checkpoint import read_config
from minidsa.model.loader import load_model
from stepper import Stepper, new_storage

PER_KEY = 4 * 3 * (8 + 6)


def bed_of(*lengths: int, **kwargs) -> Bed:
    bed = Bed(device=DEVICE, **kwargs)
    for i, length in enumerate(lengths):
        bed.add(f"r{i}", length)
    return bed


def ends(*lengths: int, width: int = 1) -> list[Chunk]:
    return [Chunk(f"r{i}", length - width, length) for i, length in enumerate(lengths)]


@pytest.mark.parametrize(("page_size", "width"), [(1, 1), (4, 1), (16, 3), (64, 2)])
def test_decode_and_verify(page_size, width):
    lengths = (width, 64, 30, 130)
    bed = bed_of(*lengths, page_size=page_size)
    chunks = ends(*lengths, width=width)
    assert_close(bed.step(TritonDenseBackend(bed.storage), chunks), bed.expected(chunks))


@pytest.mark.parametrize("start", [0, 1, 60, 127, 128, 129])
def test_prefill_around_a_block_of_tokens(start):
    bed = bed_of(140)
    chunks = [Chunk("r0", start, 140)]
    assert_close(bed.step(TritonDenseBackend(bed.storage), chunks, 1), bed.expected(chunks))


@pytest.mark.parametrize("keys", [1000, 64, 23])
def test_ragged_prefill_in_rounds_of_keys(keys):
    """Prefixes of 0, 1 and many rounds together; a round may hold pieces of several requests."""
    bed = bed_of(150, 20, 30, 40)
    chunks = [Chunk("r0", 130, 150), Chunk("r1", 0, 20), Chunk("r2", 29, 30), Chunk("r3", 1, 40)]
    backend = TritonDenseBackend(bed.storage, workspace_bytes=keys * PER_KEY)
    assert_close(bed.step(backend, chunks, 4), bed.expected(chunks))


def test_prompts_beside_decodes():
    bed = bed_of(40, 20, 60)
    chunks = [Chunk("r0", 30, 40), Chunk("r1", 19, 20), Chunk("r2", 59, 60)]
    assert_close(bed.step(TritonDenseBackend(bed.storage), chunks, 1), bed.expected(chunks))


def test_a_plan_is_refreshed_in_place():
    bed = bed_of(80, 80)
    backend = TritonDenseBackend(bed.storage)
    plan = backend.plan(bed.batch(ends(70, 80), 0, table_width=20))
    bed.attend(backend, plan, ends(70, 80))
    table = plan.block_table_BP
    for lengths in ((71, 12), (3, 80)):
        again = backend.plan(bed.batch(ends(*lengths), 0, table_width=20), out=plan)
        assert again is plan and plan.block_table_BP is table
        assert_close(bed.attend(backend, plan, ends(*lengths)), bed.expected(ends(*lengths)))
    with pytest.raises(ValueError, match="make a new plan"):
        backend.plan(bed.batch(ends(3, 5, width=2), 0, table_width=20), out=plan)
    with pytest.raises(TypeError, match="a TritonPlan is expected"):
        backend.plan(plan.batch, out=TorchDenseBackend(bed.storage).plan(plan.batch))


def test_padding_requests_get_zeros():
    bed = bed_of(30)
    batch = bed.batch([Chunk("r0", 28, 30), Chunk("r0", 0, 2)], 0)
    object.__setattr__(batch, "context_lens", (28, -2))
    backend = TritonDenseBackend(bed.storage)
    chunks = [Chunk("r0", 28, 30), Chunk("r0", 0, 2)]
    out = bed.attend(backend, backend.plan(batch), chunks)
    assert_close(out[:2], bed.expected(chunks[:1]))
    assert not out[2:].any()


@pytest.mark.parametrize("mode", ["auto", "sparse"])
@pytest.mark.parametrize("width", [1, 3])
def test_selected_rows_are_attended_to_in_place(mode, width):
    lengths = (width, TOPK, TOPK + 1, 90)
    bed = bed_of(*lengths)
    dense = TritonDenseBackend(bed.storage)
    backend = DsaBackend(dense, bed.storage, TOPK, mode=mode, check_selections=True)
    assert backend.name == "dsa over triton"
    chunks = ends(*lengths, width=width)
    assert_close(bed.step(backend, chunks), bed.expected(chunks, TOPK))


def test_prompts_select_in_place():
    bed = bed_of(40, 10, 60)
    backend = DsaBackend(TritonDenseBackend(bed.storage), bed.storage, TOPK)
    chunks = [Chunk("r0", 5, 40), Chunk("r1", 0, 10), Chunk("r2", 59, 60)]
    assert_close(bed.step(backend, chunks, 2), bed.expected(chunks, TOPK))


def test_a_whole_model_says_the_same_as_over_torch():
    """A prompt in chunks past the selection, then tokens: logits near, ids equal."""
    directory = t_cpu()
    config = read_config(directory)
    model = load_model(directory, config, torch.float32, DEVICE)
    assert config.indexer is not None
    said = []
    for backend in (TorchDenseBackend, TritonDenseBackend):
        storage = new_storage(model, 20, 8)
        sparse = DsaBackend(backend(storage), storage, config.indexer.topk)
        stepper = Stepper(model, sparse, storage)
        prompt_logits = stepper.prefill("a", list(range(3, 24)), 9)
        tokens, logits = stepper.greedy("a", int(prompt_logits[-1].argmax()), 3)
        said.append((tokens, torch.cat((prompt_logits, logits)).cpu()))
    assert said[0][0] == said[1][0]
    assert_close(said[1][1], said[0][1])


def test_no_tokens():
    bed = bed_of(8)
    backend = TritonDenseBackend(bed.storage)
    plan = backend.plan(bed.batch([Chunk("r0", 0, 8)], 1))
    q = bed.query([Chunk("r0", 0, 8)], 0).rows(0, 0)
    assert backend.decode(bed.layers[0], q, plan).shape == (0, 3, 6)
    assert torch.is_tensor(plan.block_table_BP)
