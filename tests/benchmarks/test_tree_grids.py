"""The trees compared at equal depth and budget, as listed in RSD's Appendix C.3."""

import pytest

from benchmarks.tree_grids import METHODS, expand_methods
from drafttrain.build.drafts import tree_settings
from drafttrain.build.pairing import method_stop
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.reading import validate_settings


def decode(temperature: float = 1.0, **groups: dict) -> DecodeConfig:
    values = {"drafter": "small", "sampling": {"temperature": temperature, "top_k": 50}}
    return validate_settings(DecodeConfig, values | groups)


def beams(found: list[DecodeConfig]) -> list[tuple[int, int]]:
    return [(config.tree.width, config.stop.k) for config in found]


@pytest.mark.parametrize(
    ("method", "kind", "verifier", "at_depth_5", "at_budget_30"),
    [
        ("spectr", "paths", "k-seq", [(6, 5), (12, 5)], [(5, 6), (6, 5)]),
        ("specinfer", "paths", "multi-round", [(6, 5), (12, 5)], [(5, 6), (6, 5)]),
        ("rsd-s", "rsd-s", "auto", [(6, 5), (12, 5)], [(5, 6), (6, 5)]),
        ("rsd-c", "rsd-c", "auto", [(2,) * 5, (6,) + (1,) * 4, (12,) + (1,) * 4],
         [(2,) * 4, (5,) + (1,) * 5, (6,) + (1,) * 4]),
    ],
)  # fmt: skip
def test_trees_are_the_papers(method, kind, verifier, at_depth_5, at_budget_30):
    """RSD, Appendix C.3: paths or beams with their length, or branching factors of RSD-C."""
    for given, expected in (([5], []), at_depth_5), (([], [30]), at_budget_30):
        found = expand_methods(decode(), [method], *given)
        assert {(config.tree.kind, config.verifier.kind) for config in found} == {(kind, verifier)}
        trees = [config.tree.branching for config in found] if kind == "rsd-c" else beams(found)
        assert trees == expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [6, 10, 14, 21, 30])
def test_every_tree_of_a_budget_has_just_as_many_tokens(method, budget):
    found = expand_methods(decode(), [method], [], [budget])
    assert found
    for config in found:
        assert tree_settings(config.tree, method_stop(config).k)["nodes"] == budget


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("depth", [2, 3, 4, 5])
def test_every_tree_of_a_depth_is_as_deep_and_no_larger_than_rsd_cs_binary_one(method, depth):
    for config in expand_methods(decode(), [method], [depth], []):
        facts = tree_settings(config.tree, config.stop.k)
        assert facts["depth"] == depth
        assert facts["nodes"] <= 2 ** (depth + 1) - 2


def test_several_drafters_share_as_many_paths_as_one_has():
    given = decode(tree={"drafters": ("other",)})
    found = expand_methods(given, ["specinfer"], [2, 5], [6])
    assert beams(found) == [(1, 2), (3, 5), (6, 5), (1, 3)]
    for config in found:
        assert config.tree.drafters == ("other",)
    assert tree_settings(found[0].tree, 2)["nodes"] == 4  # two drafters, one path each
    [first, *_] = expand_methods(given, ["spectr"], [2], [])
    assert first.tree.drafters == ()
    with pytest.raises(ConfigError, match="depth = 4: 2 drafters cannot share 5 or 7 paths evenly"):
        expand_methods(given, ["specinfer"], [4], [])


@pytest.mark.parametrize(
    ("methods", "depths", "budgets", "message"),
    [
        (["rsd-s"], [6], [], "depth = 6: .* no rsd-s trees of this depth; use 2, 3, 4, 5"),
        (["rsd-c"], [], [7], "budget = 7: .* no rsd-c trees of this budget; use 6, 10, 14, 21, 30"),
    ],
)
def test_settings_that_methods_do_not_share_are_refused(methods, depths, budgets, message):
    with pytest.raises(ConfigError, match=message):
        expand_methods(decode(), methods, depths, budgets)
