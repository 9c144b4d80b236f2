"""The shape of the policy of slime_ranks.py, and a random EAGLE-3 drafter for it."""

import tiny_eagle3
import tiny_mimo
import torch

from megatron_rlspec.conversion.drafter_files import config_of_drafter
from megatron_rlspec.conversion.eagle3 import shapes
from megatron_rlspec.models.drafter_config import check_drafter_config

SHAPE = tiny_mimo.config(hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=64)
WORDS = torch.arange(1, 61, 3)


def write_drafter(folder):
    """Write the drafter, which reads both layers and drafts from every third word."""
    config = config_of_drafter(SHAPE, len(WORDS))
    typed = check_drafter_config(config, "the drafter")
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name: (1.0 if len(shape) == 1 else 0.0) + 0.1 * torch.randn(*shape, generator=generator)
        for name, shape in shapes(typed, len(typed.taps(SHAPE["num_hidden_layers"]))).items()
    }
    return tiny_eagle3.write(folder, config, tensors | tiny_eagle3.maps(WORDS, SHAPE["vocab_size"]))
