"""What drafting costs at full size, counted on torch's meta device: no weights, no time."""

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Emu3TextConfig
from transformers.models.emu3.modeling_emu3 import Emu3TextModel

from draftgrid.heads.blocks import OffsetHead

IMAGE_CODES = 32768


def flops(call) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


def test_drafting_a_row_at_emu3_8b_costs_at_most_a_twentieth_of_the_forward_over_it() -> None:
    config = Emu3TextConfig()
    D, W = config.hidden_size, 90
    with torch.device("meta"):
        text = Emu3TextModel(config)
        head, lm_head = OffsetHead(2 * D, D, D), torch.nn.Linear(D, IMAGE_CODES, bias=False)
        row, cell = torch.zeros(1, W, D), torch.zeros(1, W, 2 * D)
        positions = torch.arange(W)[None]
        mask = torch.zeros(1, 1, W, W)
        forward = flops(lambda: lm_head(text(inputs_embeds=row, position_ids=positions, attention_mask=mask)[0]))
        draft = flops(lambda: lm_head(head(cell)))
    by_hand = 2 * W * (5 * D * D + D * IMAGE_CODES)
    assert draft == by_hand
    assert draft <= 0.05 * forward, f"{draft / forward:.3f}"
