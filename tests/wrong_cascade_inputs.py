"""Wrong inputs about cascades of drafters."""

from __future__ import annotations

from tests.wrong_input_cases import CAUSAL, EVAL, GENERATE, WrongInput

SEARCH = (
    "drafttrain tune-cascade --target llama --drafter small --cascade max-gram --data rows.jsonl"
)
COPIED = f"{CAUSAL} --cascade max-gram"
CASCADES = [
    WrongInput(f"{CAUSAL} --increments 5/10", ("'decode.cascade.drafters' is missing",)),
    WrongInput(
        f"{COPIED} --increments 5,3/4,10/10",
        ("increments '5,3/4,10/10'", "small, max-gram", "2 rows, of 2, 1 numbers"),
    ),
    WrongInput(f"{COPIED} --increments 5/10", ("increments '5/10'", "2 rows, of 2, 1 numbers")),
    WrongInput(f"{COPIED} --increments=-1,0/10", ("increments.0.0 = '-1'", "or equal to 0")),
    WrongInput(f"{COPIED} --increments 5,x/10", ("increments.0.1 = 'x'", "valid integer")),
    WrongInput(f"{COPIED} --increments 0,0/10", ("'0,0/10'", "asks for no token", "1 or more")),
    WrongInput(f"{COPIED} --leniency 0.5", ("leniency = '0.5'", "or equal to 1")),
    WrongInput(
        f"{COPIED} --leniency 2", ("leniency = 2.0", "reviews another model's tokens", "leave it")
    ),
    WrongInput(
        f"{COPIED} decode.verifier.leniency=2",
        ("leniency of the target's own review", "inside cascades only", "cascade.leniency"),
    ),
    WrongInput(
        f"{CAUSAL} --cascade shuffled,max-gram",
        ("'shuffled'", "different tokenizers", "give one of the target's family"),
    ),
    WrongInput(
        f"{CAUSAL} --cascade wide,max-gram", ("'wide'", "an encoder-decoder", "decoder-only")
    ),
    WrongInput(
        f"{EVAL} --target target --drafter wide --cascade max-gram",
        ("vocabulary of 48 tokens", "40", "train a drafter for this target"),
    ),
    WrongInput(f"{CAUSAL} --cascade max-gram,small", ("'max-gram'", "smallest there is")),
    WrongInput(f"{CAUSAL} --cascade none", ("'none' drafts nothing",)),
    WrongInput(f"{CAUSAL} --cascade small,max-gram", ("'small' is twice", "once")),
    WrongInput(f"{COPIED} --k 5", ("adds up to (5)", "leave --k and --stop out")),
    WrongInput(f"{COPIED} --stop entropy", ("adds up to (5)", "leave --k and --stop out")),
    WrongInput(f"{COPIED} --tree opt-tree", ("'opt-tree'", "a cascade drafts chains")),
    WrongInput(f"{COPIED} --mode teacher-forced", ("a cascade is asked for", "--mode decode")),
    WrongInput(f"{COPIED} --sweep k=2,4", ("leave --k and --stop out",)),
    WrongInput(
        f"{CAUSAL} 'others.a={{drafter: max-gram, sampling: {{temperature: 1}}}}'",
        ("others.a.sampling", "decode.sampling", "leave it out"),
    ),
    WrongInput(
        f"{CAUSAL} --mode teacher-forced others.a.drafter=max-gram",
        ("others = a are decoded", "--mode decode"),
    ),
    WrongInput(
        f"{CAUSAL} others.a.drafter=max-gram others.b.drafter=max-gram "
        "others.b.bigrams=b.safetensors",
        ("'b.safetensors' and None", "one table, or none"),
    ),
    WrongInput(f"{CAUSAL} others.a.drafter=none", ("others.a.drafter = 'none'", "in any case")),
    WrongInput(f"{CAUSAL} others.a.drafter=./absent", ("'./absent'", "existing")),
    WrongInput(f"{GENERATE} --target llama --drafter none --cascade max-gram", ("'none' drafts",)),
    WrongInput(
        "drafttrain tune-cascade --target llama --drafter small --data rows.jsonl",
        ("'cascade' is missing", "cascade=VALUE"),
    ),
    WrongInput(f"{SEARCH} --leniency 0.5", ("leniency.0 = '0.5'", "or equal to 1")),
    WrongInput(f"{SEARCH} --leniency 1,2", ("leniency = 2.0", "reviews another model's tokens")),
    WrongInput(f"{SEARCH} --out rows.jsonl", ("out = 'rows.jsonl'", "ending in .yaml")),
    WrongInput(f"{SEARCH} --drafter none", ("'none' drafts nothing",)),
    WrongInput(f"{SEARCH} --data absent.jsonl", ("'absent.jsonl'",)),
    WrongInput(f"{SEARCH} candidates=1", ("candidates = 1", "or equal to 2")),
    WrongInput(f"{SEARCH} --cascade shuffled", ("'shuffled'", "different tokenizers")),
]
