"""Tables of most likely successors: hand-computed counts, and the file."""

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import BigramsConfig
from drafttrain.data.bigrams import count_bigrams, read_bigrams, write_bigrams
from drafttrain.data.distill.distill import distill
from tests.data.distill.tiny_distill import rows_of, settings


def test_the_likeliest_successor_by_hand():
    """3 is followed by 5 twice, by 4 once; of 4's successors 3 and 5 the smaller wins; 5 ends."""
    table = count_bigrams([[3, 5], [3, 5], [3, 4, 3], [4, 5], []])
    assert table.tolist() == [-1, -1, -1, 5, 3, -1]
    with pytest.raises(ConfigError, match="no output holds a token"):
        count_bigrams([[], []])


def test_a_table_of_a_distillation_is_read_back(tiny_target, tmp_path):
    config = settings(tiny_target)
    distill(config)
    file = tmp_path / "tables" / "b.safetensors"
    write_bigrams(BigramsConfig(distilled=config.out, out=file))
    outputs = [row["target_ids"] for row in rows_of(config.out)]
    expected = count_bigrams(outputs).tolist()
    assert any(token >= 0 for token in expected)
    assert read_bigrams(str(file), 100) == expected + [-1] * (100 - len(expected))
    assert list(file.parent.glob("*.safetensors")) == [file]
    with pytest.raises(ConfigError, match="but the target has 2 tokens"):  # of another target
        read_bigrams(str(file), 2)
