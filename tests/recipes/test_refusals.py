"""Invalid settings of a recipe end with one line that names field, value and remedy."""

import pytest

from drafttrain.config.base import ConfigError
from tests.refusals import RECIPES, check_refusal, isolated

SPEC = "train_spec_drafter.py --config train_spec_drafter.yaml"
BLOCKS = "train_block_heads.py --config train_block_heads.yaml"
HEADS = "train_acceptance_head.py --config train_acceptance_head.yaml"
CAUSAL = "train_causal_drafter.py --config train_causal_drafter.yaml"
STATES = "train_state_drafter.py --config train_state_drafter.yaml"
SMALL = "train_target.py --config train_target.yaml"
WRONG = {
    f"{SPEC} train.lerning_rate=1": ("lerning_rate", "'train.learning_rate'"),
    f"{SPEC} target.path=llama": ("target.path = 'llama'", "encoder-decoder", "T5"),
    f"{SPEC} train.batch_tokens=1": ("train.batch_tokens = 1", "larger"),
    f"{SPEC} run=begun": ("run = 'begun'", "run=ANOTHER_FOLDER"),
    f"{SPEC} held_out.path=texts.txt": ("2 of 2 inputs of held_out", "'texts.txt'", "give others"),
    f"{SPEC} train.trackers=[wandb]": ("'wandb'", "not installed", "leave it out"),
    f"{SPEC} run=checkpoints/tiny train.max_steps=99": ("'checkpoints/tiny'", "run=ANOTHER_FOLDER"),
    f"{SPEC} drafter.prefix_attention=bidirectional": ("drafter.slots=paper",),
    f"{SPEC} drafter.slots=paper drafter.prefix_attention=bidirectional": (
        "objective.blocks = 2",
        "objective.blocks=1",
    ),
    f"{SPEC} drafter.overrides.d_model=8": ("drafter.initialise=none",),
    f"{SPEC} drafter.output_tokens=41": ("drafter.output_tokens = 41", "40 tokens", "fewer"),
    f"{BLOCKS} drafter.k=1": ("drafter.k = 1", "greater than or equal to 2"),
    f"{HEADS} heads.depths=[-1]": ("heads.depths.0 = -1", "greater than or equal to 0"),
    f"{HEADS} heads.depths=[]": ("heads.depths = []",),
    f"{HEADS} heads.rejection_weights=[6.0000001,6]": ("2 of them are 'D3-w6'", "but one"),
    f"{HEADS} cache.mixin=0.1": ("did you mean 'cache.mixing'",),
    f"{HEADS} cache.drafter=x": ("give it as drafter=",),
    f"{HEADS} train.precision=bf16": ("heads are trained in fp32",),
    f"{HEADS} drafter=shuffled": ("token 4", "'w5'", "'w4'", "give"),
    f"{CAUSAL} initialise.path=shuffled": ("token 4", "'w5'", "'w4'", "give"),
    f"{CAUSAL} initialise.layer=even": ("initialise.layer", "'initialise.layers'"),
    f"{CAUSAL} target.path=local initialise.layers=even": ("has local layers",),
    f"{CAUSAL} drafter.layers=6": ("drafter.layers = 6 is more than the target's 2",),
    f"{CAUSAL} initialise.layers=[0,5]": ("initialise.layers = [0, 5]", "0 to 1"),
    f"{CAUSAL} initialise.layers=[]": ("initialise.layers = []", "0 to 1"),
    f"{CAUSAL} initialise.layers=[0,1,1] drafter.layers=2": (
        "drafter.layers = 2",
        "lists 3",
        "out",
    ),
    f"{CAUSAL} initialise.path=target": ("not a decoder-only language model", "give one"),
    f"{CAUSAL} drafter.output_tokens=41": ("drafter.output_tokens = 41", "40 tokens", "fewer"),
    f"{CAUSAL} target.path=target": ("'target'", "encoder-decoder", "recipes/seq2seq.yaml"),
    f"{CAUSAL} objective.forward_kl=0": ("forward_kl", "are 0", "weight"),
    f"{CAUSAL} drafter.embeddings=target objective.frozen=[output]": ("embeddings=own",),
    f"{CAUSAL} drafter.embeddings=target initialise.path=small": ("has its own embeddings",),
    f"{CAUSAL} target.path=alibi objective.packed_tokens=9": ("'bloom'", "packed_tokens=null"),
    f"{CAUSAL} drafter.drafts=blocks initialise.path=alibi": ("'bloom'", "drafter.drafts=tokens"),
    f"{CAUSAL} drafter.drafts=blocks drafter.k=1": ("drafter.k = 1", "give 2 or more"),
    f"{CAUSAL} objective.kept=0.5": ("objective.kept = 0.5", "drafter.drafts=blocks"),
    f"{CAUSAL} objective.kept_floor=0.5": ("kept_floor = 0.5", "drafter.drafts=blocks"),
    f"{STATES} drafter.layers=[4]": ("drafter.layers = [4]", "layers of the target, 0 to 1"),
    f"{STATES} drafter.states=[7]": ("drafter.states = [7]", "layers of the target, 0 to 1"),
    f"{STATES} drafter.output_tokens=99": ("drafter.output_tokens = 99", "the target's 40"),
    f"{STATES} objective.forward_kl=0": ("so nothing is learned",),
    f"{STATES} target.path=unknown": ("cannot have a state drafter",),
    f"{SMALL} model.model_type=lama": ("model.model_type = 'lama'", "'llama'"),
    f"{SMALL} model.model_type=xlnet": ("'xlnet' attends to later tokens", "llama"),
    f"{SMALL} teacher.path=target": ("unlike model.model_type",),
    f"{SMALL} teacher.path=none": ("'none'", "no such folder"),
    f"{SMALL} max_tokens=1": ("max_tokens = 1", "'rows.jsonl'", "larger"),
    f"{SMALL} max_tokens=9 held_out.path=long.txt": ("max_tokens = 9", "'long.txt'", "larger"),
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_settings_end_in_one_line_before_weights_are_read(refusal_project, line):
    check_refusal(refusal_project, line, WRONG[line])


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_names_debug_which_shows_the_traceback(refusal_project, capsys, recipe):
    with pytest.raises(SystemExit) as ended:
        RECIPES[recipe](["--help"])
    assert ended.value.code == 0
    assert "--debug" in capsys.readouterr().out
    with isolated(), pytest.raises(ConfigError, match=r"torn\.yaml is not valid YAML"):
        RECIPES[recipe](["--debug", "--config", "torn.yaml"])
