"""The benchmark that reads rows and nothing else really reads them."""

from typing import cast

import torch
from torch import Tensor

from benchmarks.reading import WAYS, reading


def test_every_way_reads_every_word_of_a_list():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (150, 41), generator=generator, dtype=torch.int32)
    slots = torch.randint(0, 149, (2, 2048), generator=generator).int()
    entries = list(reading(words.view(torch.uint8), slots))
    assert [entry.check() for entry in entries] == ["ok"] * len(WAYS)
    # The last word of a row that one list has once.
    slots[1, -1] = 149
    for (parts, _, _), entry in zip(WAYS, reading(words.view(torch.uint8), slots), strict=True):
        before = cast(Tensor, entry.run()).clone()
        words[149, 40] ^= 1 << 30
        changed = before ^ cast(Tensor, entry.run())
        assert changed[-1] == 1 << 30 and not changed[:-1].any() and len(changed) == 2 * parts
