"""A padded batch has the loss of its rows alone, computed by the model's own masks."""

import pytest
import torch

from drafttrain.data.batches.examples import PairCollator
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.training.objectives.language_modelling import LanguageModelling
from tests.comparing import close
from tests.tiny_families import FURTHER, TINY, any_family
from tests.tiny_models import tiny_seq2seq

ROWS = [(0, 0, list(range(4, 14)), [5, 6, 7, 1]), (0, 1, [*range(20, 28)], [8, 9, 10, 11, 12, 1])]


@pytest.mark.parametrize(
    "family", ["Gemma3Text", "opt", "XGLM", "Bloom", "m2m100", "led", "longt5", "t5gemma"]
)
def test_the_loss_of_a_batch_is_that_of_its_rows_alone(family):
    model = any_family(family) if family in (*FURTHER, *TINY) else tiny_seq2seq(family)
    texts = not model.config.is_encoder_decoder
    expected = torch.zeros(())
    for _, _, source, target in ROWS:
        if texts:
            source, target = source[:1], source[1:] + target
        [forced] = teacher_force(model, [source], [target])
        expected = expected - forced.logits.log_softmax(-1)[range(len(target)), target].sum()
    sums = LanguageModelling(model).eval()(PairCollator(0, joined=texts)(ROWS), 1.0)
    close(sums.loss, expected, 1e-5)
