"""Cached rows in fp8: the two byte layouts, with plain torch to write and read them.

Index keys: a page of P tokens is P * D bytes of e4m3 values, row after row, and then P fp32 scales:
8448 bytes for 64 rows of 128. A reader that expects each scale behind its row reads noise.

Latent rows: C bytes of e4m3 latent, one fp32 scale for each 128 of them, R bf16 elements of the
rotated key, which is not quantised: 656 bytes for DeepSeek-V3.2's C = 512, R = 64.

A number is value * scale, with scale = max(amax, 1e-4) / 448 or the next power of two ("ue8m0",
stored as fp32 all the same). The classes' `write` and `read` are the twins of the fused writes and
of what the attention kernels read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
AMAX_FLOOR = 1e-4
# Elements of a latent that share a scale.
BLOCK = 128


def quantise(rows: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """e4m3 values [..., D] and fp32 scales [...] of rows [..., D] in any float dtype."""
    rows = rows.float()
    scale = rows.abs().amax(dim=-1).clamp_min(AMAX_FLOOR) / FP8_MAX
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (rows / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return values.to(FP8), scale


@dataclass(frozen=True)
class IndexPages:
    """One layer's index pages: uint8 [N, P * (D + 4)], each page contiguous, P * (D + 4) % 16 = 0.

    values_NPD: e4m3 view. scales_NP: fp32 view.
    """

    pages_NX: Tensor
    page_size: int

    @property
    def width(self) -> int:
        return self.pages_NX.shape[1] // self.page_size - 4

    @property
    def values_NPD(self) -> Tensor:
        page, width = self.page_size, self.width
        return self.pages_NX.view(FP8)[:, : page * width].unflatten(1, (page, width))

    @property
    def scales_NP(self) -> Tensor:
        return self.pages_NX.view(torch.float32)[:, self.page_size * self.width // 4 :]

    def write(self, slots_T: Tensor, keys_TD: Tensor, *, power_of_two: bool = False) -> None:
        """Quantise keys into slots; a negative slot is skipped."""
        kept_T = slots_T >= 0
        values_TD, scales_T = quantise(keys_TD[kept_T], power_of_two=power_of_two)
        page_T, row_T = slots_T[kept_T] // self.page_size, slots_T[kept_T] % self.page_size
        self.values_NPD.view(torch.uint8)[page_T, row_T] = values_TD.view(torch.uint8)
        self.scales_NP[page_T, row_T] = scales_T

    def read(self, slots: Tensor) -> Tensor:
        """Keys in slots of any shape, fp32 [..., D]."""
        page, row = slots // self.page_size, slots % self.page_size
        values = self.values_NPD.view(torch.uint8)[page, row].view(FP8)
        return values.float() * self.scales_NP[page, row].unsqueeze(-1)


@dataclass(frozen=True)
class PlainIndexPages:
    """Index pages in the model's dtype, [N, P, D], where kernels take `IndexPages`: no scales."""

    values_NPD: Tensor
    scales_NP: None = None

    @property
    def page_size(self) -> int:
        return self.values_NPD.shape[1]

    @property
    def width(self) -> int:
        return self.values_NPD.shape[2]

    def read(self, slots: Tensor) -> Tensor:
        """As `IndexPages.read`."""
        return self.values_NPD.flatten(0, 1)[slots].float()


def new_index_pages(num_pages: int, page_size: int, width: int, device: torch.device) -> IndexPages:
    """Zeroed pages; raises ValueError where a page is no multiple of 16 bytes."""
    size = page_size * (width + 4)
    if size % 16:
        raise ValueError(f"a page of {page_size} rows of {width} takes {size} bytes, not 16 * n")
    pages_NX = torch.zeros(num_pages, size, dtype=torch.uint8, device=device)
    return IndexPages(pages_NX, page_size)


@dataclass(frozen=True)
class Fp8LatentRows:
    """One layer's quantised latent rows: uint8 [S, C + C / 32 + 2 R], C a multiple of 128.

    values_SC: e4m3. scales_SB: fp32, B = C / 128. rope_SR: bf16. All are views.
    """

    rows_SX: Tensor
    latent_width: int

    def __post_init__(self) -> None:
        if self.latent_width % BLOCK:
            raise ValueError(f"a latent in fp8 has 128 * n elements, not {self.latent_width}")

    @property
    def values_SC(self) -> Tensor:
        return self.rows_SX.view(FP8)[:, : self.latent_width]

    @property
    def scales_SB(self) -> Tensor:
        first = self.latent_width // 4
        return self.rows_SX.view(torch.float32)[:, first : first + self.latent_width // BLOCK]

    @property
    def rope_SR(self) -> Tensor:
        first = self.latent_width + self.latent_width // BLOCK * 4
        return self.rows_SX.view(torch.bfloat16)[:, first // 2 :]

    def write(
        self, slots_T: Tensor, latent_TC: Tensor, rope_TR: Tensor, *, power_of_two: bool = False
    ) -> None:
        """Quantise latents into slots, the rotated keys beside them; negative slots are skipped."""
        kept_T = slots_T >= 0
        slots_T = slots_T[kept_T]
        blocks_TBb = latent_TC[kept_T].unflatten(1, (-1, BLOCK))
        values_TBb, scales_TB = quantise(blocks_TBb, power_of_two=power_of_two)
        self.values_SC.view(torch.uint8)[slots_T] = values_TBb.flatten(1).view(torch.uint8)
        self.scales_SB[slots_T] = scales_TB
        self.rope_SR[slots_T] = rope_TR[kept_T].to(torch.bfloat16)

    def read(self, slots: Tensor) -> Tensor:
        """Rows in slots of any shape, fp32 [..., C + R]."""
        values = self.values_SC.view(torch.uint8)[slots].view(FP8).float()
        latent = values.unflatten(-1, (-1, BLOCK)) * self.scales_SB[slots].unsqueeze(-1)
        return torch.cat((latent.flatten(-2), self.rope_SR[slots].float()), dim=-1)


def new_fp8_latent_rows(
    slots: int, latent_width: int, rope_width: int, device: torch.device
) -> Fp8LatentRows:
    """Zeroed rows."""
    size = latent_width + latent_width // BLOCK * 4 + 2 * rope_width
    rows_SX = torch.zeros(slots, size, dtype=torch.uint8, device=device)
    return Fp8LatentRows(rows_SX, latent_width)
