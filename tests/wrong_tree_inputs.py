"""Wrong inputs about draft trees."""

from __future__ import annotations

from tests.wrong_input_cases import CAUSAL, EVAL, GENERATE, WrongInput

SAMPLED = f"{CAUSAL} --temperature 1"
TREES = [
    WrongInput(f"{CAUSAL} --tree rsd-x", ("decode.tree.kind = 'rsd-x'", "'rsd-s', 'opt-tree'")),
    WrongInput(f"{CAUSAL} decode.tree.nodes=9", ("tree.nodes = 9", "'none'", "tree.kind=opt-tree")),
    WrongInput(
        f"{CAUSAL} --tree opt-tree decode.tree.width=3",
        ("tree.width = 3", "paths or rsd-s", "'opt-tree'", "leave it out"),
    ),
    WrongInput(f"{CAUSAL} --tree opt-tree decode.tree.nodes=0", ("nodes = 0", "greater than 0")),
    WrongInput(f"{SAMPLED} --tree rsd-c decode.tree.branching=3", ("branching = 3", "[3]")),
    WrongInput(f"{SAMPLED} --tree rsd-c decode.tree.branching=[]", ("branching = []", "at least")),
    WrongInput(
        f"{SAMPLED} --tree rsd-s decode.tree.width=50",
        ("rsd-s(50)", "50 siblings", "40 tokens", "narrower"),
    ),
    WrongInput(f"{CAUSAL} --tree rsd-s", ("'rsd-s'", "temperature 0", "tree.draft_temperature=1")),
    WrongInput(
        f"{CAUSAL} --tree binary decode.tree.draft_temperature=1",
        ("tree.draft_temperature = 1.0", "or rsd-s or opt-tree", "leave it out"),
    ),
    WrongInput(
        f"{CAUSAL} --tree opt-tree --drafter none",
        ("'opt-tree'", "'none'", "give a trained drafter"),
    ),
    WrongInput(
        f"{CAUSAL} --tree opt-tree --drafter max-gram",
        ("'opt-tree'", "'max-gram'", "give a trained drafter"),
    ),
    WrongInput(
        f"{CAUSAL} --target unknown --tree opt-tree", ("'gptj'", "positions", "draft chains")
    ),
    WrongInput(
        f"{CAUSAL} --drafter unknown --tree opt-tree", ("'gptj'", "positions", "draft chains")
    ),
    WrongInput(
        f"{SAMPLED} --tree rsd-s --verifier k-seq",
        ("'k-seq'", "without_replacement", "use recursive or target-walk"),
    ),
    WrongInput(
        f"{SAMPLED} --tree paths --verifier recursive",
        ("'recursive'", "iid", "use multi-round or k-seq or target-walk"),
    ),
    WrongInput(
        f"{SAMPLED} --tree opt-tree --verifier multi-round",
        ("'multi-round'", "deterministic", "use target-walk"),
    ),
    WrongInput(
        f"{SAMPLED} --tree binary --verifier rejection", ("takes chains", "use target-walk")
    ),
    WrongInput(f"{SAMPLED} --verifier recursive", ("'recursive'", "iid", "use rejection")),
    WrongInput(f"{CAUSAL} --tree opt-tree --stop entropy", ("'entropy'", "chains", "--stop fixed")),
    WrongInput(
        f"{CAUSAL} --tree opt-tree --stop head --head head", ("'head'", "chains", "--stop fixed")
    ),
    WrongInput(f"{CAUSAL} --stop gain", ("'gain'", "opt-tree", "'none'", "tree.kind=opt-tree")),
    WrongInput(f"{CAUSAL} --tree binary --stop gain", ("'gain'", "opt-tree", "'binary'")),
    WrongInput(
        f"{CAUSAL} --tree opt-tree decode.stop.delta=1.5",
        ("decode.stop.delta = 1.5", "less than 1"),
    ),
    WrongInput(f"{CAUSAL} --sweep delta=0.2", ("'gain'", "'none'", "tree.kind=opt-tree")),
    WrongInput(
        f"{CAUSAL} --tree opt-tree decode.tree.head=./absent",
        ("tree.head = './absent'", "give a head's folder"),
    ),
    WrongInput(
        f"{CAUSAL} --tree opt-tree decode.tree.head=head",
        ("tree.head = 'head'", "cache.state=drawn"),
    ),
    WrongInput(
        f"{SAMPLED} --tree paths decode.tree.drafters=small", ("drafters = 'small'", "[small]")
    ),
    WrongInput(
        f"{SAMPLED} --tree paths decode.tree.drafters=[shuffled]",
        ("'shuffled'", "token 4", "'w5'", "'w4'", "give"),
    ),
    WrongInput(
        f"{EVAL} --target target --drafter target --tree paths --temperature 1 "
        "decode.tree.drafters=[wide]",
        ("'wide'", "48 tokens", "40", "train"),
    ),
    WrongInput(
        f"{EVAL} --target target --drafter target --tree paths --temperature 1 "
        "decode.tree.drafters=[checkpoints/tiny/final]",
        ("tree.drafters = 'checkpoints/tiny/final'", "of kind spec-drafter", "give one"),
    ),
    WrongInput(
        f"{SAMPLED} --tree paths decode.tree.drafters=[small] --verifier k-seq",
        ("'k-seq'", "independent", "use multi-round or target-walk"),
    ),
    WrongInput(f"{CAUSAL} --tree sequoia", ("tree.by_rank", "rank_data.path=PROMPTS")),
    WrongInput(f"{GENERATE} --target llama --drafter small --tree sequoia", ("tree.by_rank",)),
    WrongInput(
        f"{CAUSAL} --tree sequoia decode.tree.by_rank=[0.9,0.3]", ("by_rank = [0.9, 0.3]", "sum")
    ),
    WrongInput(f"{CAUSAL} --tree sequoia decode.tree.by_rank=0.9", ("by_rank = 0.9", "[0.9]")),
    WrongInput(f"{CAUSAL} rank_data.path=texts.txt", ("rank_data", "leave it out")),
    WrongInput(
        f"{CAUSAL} --tree sequoia rank_data.path=absent.txt", ("rank_data.path = 'absent.txt'",)
    ),
    WrongInput(
        f"{EVAL} --mode teacher-forced --tree opt-tree", ("'opt-tree'", "chains", "--mode decode")
    ),
]
