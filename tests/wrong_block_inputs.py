"""Wrong inputs about block heads: another target, and what they cannot do."""

from __future__ import annotations

from tests.wrong_input_cases import CACHE, EVAL, EXPORT, HEADS, TUNE, WrongInput

TRAIN = "train_block_heads.py --config train_block_heads.yaml"
BLOCKS = f"{EVAL} --target target --drafter blocks"
BLOCK_HEADS = [
    WrongInput(f"{TRAIN} drafter.ffn_size=0", ("drafter.ffn_size = 0", "greater than 0")),
    WrongInput(f"{TRAIN} drafter.k=1", ("drafter.k = 1", "greater than or equal to 2")),
    WrongInput(f"{TRAIN} objective.position=3", ("'objective.position'", "'positions'")),
    WrongInput(f"{TRAIN} distill.out=x", ("distill.out", "top level")),
    WrongInput(
        f"{TRAIN} target.path=unknown",
        ("target.path = 'unknown'", "'gptj'", "cannot have block heads", "use a family"),
    ),
    WrongInput(
        f"{BLOCKS} --target wide", ("'blocks'", "40 tokens", "'wide' has 48", "train a drafter")
    ),
    WrongInput(
        f"{BLOCKS} --target llama",
        ("block heads of an encoder-decoder model", "'llama'", "decoder-only", "train block heads"),
    ),
    WrongInput(
        f"{BLOCKS} --drafter narrow-blocks",
        ("'narrow-blocks' (block heads) reads 8 numbers", "'target' has 16", "train block heads"),
    ),
    WrongInput(
        f"{BLOCKS} --drafter other-blocks",
        ("'other-blocks'", "'another-target' with other weights", "train heads for this target"),
        weights=True,
    ),
    WrongInput(
        f"{BLOCKS} --drafter broken-blocks",
        ("drafter 'broken-blocks'", "k = 1", "one more at least"),
    ),
    WrongInput(
        f"{BLOCKS} --tree opt-tree", ("'opt-tree'", "'blocks'", "draft chains", "leave the tree")
    ),
    WrongInput(
        f"{BLOCKS} --stop head --head head", ("no states that an acceptance head", "--stop fixed")
    ),
    WrongInput(
        f"{BLOCKS} --mode teacher-forced", ("'blocks'", "'block-heads' model", "--mode decode")
    ),
    WrongInput(
        f"{CACHE} --drafter blocks", ("no states that an acceptance head", "give a Spec-Drafter")
    ),
    WrongInput(
        f"{HEADS} target.path=target drafter=blocks",
        ("no states that an acceptance head", "give a Spec-Drafter"),
    ),
    WrongInput(
        f"{TUNE} --target target --drafter blocks",
        ("no states that an acceptance head", "give a Spec-Drafter"),
    ),
    WrongInput(
        f"{EXPORT} --drafter blocks", ("'blocks'", "hidden states", "export a Spec-Drafter")
    ),
]
