"""Models of a published shape with random weights made on the device: speed needs no other."""

from typing import Any

import torch

from minidsa.model.config import parse_config
from minidsa.model.deepseek import DeepseekModel
from minidsa.model.names import name_table


def random_model(config: dict[str, Any], device: torch.device) -> DeepseekModel:
    """Products keep activations near 1, so that routing is spread; norms are 1 and biases 0."""
    keeps_fp8 = "quantization_config" in config
    model = DeepseekModel(parse_config(config), torch.bfloat16, device, keeps_fp8=keeps_fp8)
    for name, entry in name_table(model).items():
        target = entry.target
        if entry.scales is not None:
            # Bytes below 0x7F are the positive numbers; the top bit is the sign.
            raw = target.view(torch.uint8)
            raw.random_(0, 0x7F)
            raw |= torch.randint_like(raw, 0, 2) << 7
            # Every byte as likely as any other has a mean square of about 100^2.
            entry.scales.fill_(target.shape[-1] ** -0.5 / 100)
        elif target.dim() == 1:
            target.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            target.normal_(0.0, 1.0 if "embed" in name else target.shape[-1] ** -0.5)
    return model
