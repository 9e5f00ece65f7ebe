"""Wrong inputs of every command and recipe: what must be refused, and what the answer must name.

Every command line is run in the folder that wrong_input_project.py makes.
"""

from __future__ import annotations

from tests.wrong_block_inputs import BLOCK_HEADS
from tests.wrong_cascade_inputs import CASCADES
from tests.wrong_input_cases import (
    CACHE,
    CAUSAL,
    DISTILL,
    EVAL,
    EXPORT,
    GENERATE,
    HEADS,
    SMALL,
    SPEC,
    TUNE,
    WrongInput,
)
from tests.wrong_tree_inputs import TREES

KEYS_AND_VALUES = [
    WrongInput(f"{DISTILL} sampling.max_new_token=9", ("max_new_token'", "'max_new_tokens'")),
    WrongInput(f"{DISTILL} num_beams=many", ("num_beams = 'many'", "integer")),
    WrongInput(f"{DISTILL} --method topk", ("method = 'topk'", "'greedy', 'beam' or 'sample'")),
    WrongInput(f"{DISTILL} shard_rows=0", ("shard_rows = 0", "greater than 0")),
    WrongInput(f"{DISTILL} sampling.top_p=1.5", ("sampling.top_p = 1.5", "less than or equal")),
    WrongInput(f"{DISTILL} --method sample", ("sampling.temperature", "=1.0", "method=greedy")),
    WrongInput(f"{DISTILL} --method beam num_beams=1", ("num_beams = 1", "num_beams=5")),
    WrongInput("drafttrain distill --out new data=texts.txt", ("data = 'texts.txt'", "data.path=")),
    WrongInput(
        "drafttrain distill target.path=t target.path.dtype=x", ("target.path = 't'", "leave")
    ),
    WrongInput(f"{DISTILL} seed", ("'seed'", "key=value")),
    WrongInput(f"{DISTILL} method=[", ("method=[", "YAML")),
    WrongInput(f"{DISTILL} --config torn.yaml", ("torn.yaml", "line 2", "YAML")),
    WrongInput(f"{DISTILL} --config list.yaml", ("list.yaml", "list", "mapping")),
    WrongInput(f"{DISTILL} --config latin.yaml", ("latin.yaml", "save it as UTF-8")),
    WrongInput(f"{DISTILL} --config absent.yaml", ("absent.yaml", "existing YAML file")),
    WrongInput("drafttrain distill --target target --data texts.txt", ("'out'", "out=VALUE")),
    WrongInput("drafttrain distil", ("'distil'", "Did you mean 'distill'?")),
    WrongInput("drafttrain distill --dat texts.txt", ("--dat", "--data")),
    WrongInput(f"{CACHE} --mixing 1.5", ("mixing = '1.5'", "less than")),
    WrongInput(f"{CACHE} --dtype int8", ("dtype = 'int8'", "'float16'")),
    WrongInput(f"{CACHE} mix=2", ("'mix'", "'mixes'")),
    WrongInput(f"{EVAL} --k ten", ("decode.stop.k = 'ten'", "integer")),
    WrongInput(f"{EVAL} --mode fast", ("mode = 'fast'", "'teacher-forced'")),
    WrongInput(f"{EVAL} decode.stop.kk=3", ("decode.stop.kk", "'k'")),
    WrongInput(f"{EVAL} --sweep gama=1", ("'gama'", "known: k, h")),
    WrongInput(f"{EVAL} --sweep k", ("sweep 'k'", "k=5,10")),
    WrongInput(f"{EVAL} --sweep k=0,5", ("k=0", "greater than 0")),
    WrongInput(f"{CAUSAL} --head head --h 1.5", ("decode.stop.h = '1.5'", "less than 1")),
    WrongInput(f"{CAUSAL} --stop head --h 0", ("decode.stop.h = '0'", "greater than 0")),
    WrongInput(f"{EVAL} --report report.txt", ("'report.txt'", ".json")),
    WrongInput(f"{EVAL} --report rows.jsonl/report.json", ("rows.jsonl", "is a file")),
    WrongInput(f"{GENERATE} --temperature -1", ("temperature = '-1'", "greater than or equal")),
    WrongInput(f"{GENERATE} --show-rounds --json", ("--json", "--show-rounds")),
    WrongInput(f"{TUNE} h=[0.5,1.5]", ("h", "1.5", "between 0 and 1")),
    WrongInput(f"{TUNE} lengths=[]", ("lengths", "at least")),
    WrongInput(f"{TUNE} replicate=2", ("'replicate'", "'replicates'")),
    WrongInput(f"{EXPORT} forse=true", ("'forse'", "'force'")),
    WrongInput(f"{EXPORT} --h 1.5", ("h = '1.5'", "less than 1")),
    WrongInput("drafttrain export --drafter small", ("'out'", "out=VALUE")),
    WrongInput(f"{SPEC} train.lerning_rate=1", ("lerning_rate", "'learning_rate'")),
    WrongInput(
        f"{SPEC} drafter.decoder_layers=0", ("drafter.decoder_layers = 0", "greater than 0")
    ),
    WrongInput(f"{SPEC} distill.out=x", ("distill.out", "top level")),
    WrongInput(f"{SPEC} distill.num_beam=3", ("'distill.num_beam'", "'num_beams'")),
    WrongInput(
        f"{SPEC} train.adam_betas=[0.9]", ("train.adam_betas = [0.9]", "value 2 is missing")
    ),
    WrongInput(f"{HEADS} heads.depths=[]", ("heads.depths", "one value")),
    WrongInput(f"{HEADS} heads.depths=[-1]", ("heads.depths.0 = -1", "greater than or equal to 0")),
    WrongInput(f"{HEADS} train.precision=bf16", ("train.precision = 'bf16'", "fp32")),
    WrongInput(f"{HEADS} cache.mixs=2", ("'cache.mixs'", "'mixes'")),
    WrongInput(f"{SMALL} model.model_type=lama", ("model.model_type = 'lama'", "'llama'")),
    WrongInput(f"{SMALL} model.hidden_sise=8", ("model.hidden_sise", "'hidden_size'")),
    WrongInput(f"{SMALL} model.hidden_size=15", ("model", "15", "2")),
    WrongInput(f"{SMALL} model=llama", ("model = 'llama'", "model.NAME=VALUE")),
]

DATA = [
    WrongInput(f"{DISTILL} --data absent.txt", ("data.path = 'absent.txt'", "no such file", ";")),
    WrongInput(f"{DISTILL} --data empty.txt", ("data.path = 'empty.txt'", "empty")),
    WrongInput(f"{DISTILL} --data nothing", ("data.path = 'nothing'", ";")),
    WrongInput(f"{DISTILL} --data picture.png", ("'picture.png'", ".jsonl")),
    WrongInput(f"{DISTILL} --data torn.txt.gz", ("'torn.txt.gz'", "gz", "repack")),
    WrongInput(f"{DISTILL} --data broken.jsonl", ("'broken.jsonl'", "line 2", ";")),
    WrongInput(f"{DISTILL} --data table.csv", ("'table.csv'", "data.input_column", "question")),
    WrongInput(f"{DISTILL} --data numbers.jsonl", ("column 'text'", "data.input_column")),
    WrongInput(
        f"{DISTILL} --data table.csv data.input_column=questions",
        ("data.input_column = 'questions'", "give one of: question, answer"),
    ),
    WrongInput(f"{DISTILL} data.reference_path=three.txt", ("2 lines", "3", "line-aligned")),
    WrongInput(f"{DISTILL} data.split=test", ("data.split = 'test'", "leave it out")),
    WrongInput(f"{DISTILL} data.skip=2", ("data.skip = 2", "2 rows")),
    WrongInput(f"{DISTILL} data.splices=3", ("data.splices = 3", "2 inputs", "data.splices=0")),
    WrongInput(
        f"{DISTILL} 'data.where={{kind: a}}'", ("data.where", "'kind'", "give one of: text")
    ),
    WrongInput(f"{DISTILL} data.chat=true", ("chats", "encoder-decoder", "leave data.chat out")),
    WrongInput(f"{DISTILL} --data chats.jsonl", ("chats", "encoder-decoder", "data.input_column")),
    WrongInput(f"{GENERATE} --text ''", ("input 1 is empty", "leave it out")),
    WrongInput(f"{GENERATE} --data rows.jsonl", ("--text and --data", "give one")),
    WrongInput("drafttrain generate", ("standard input is empty", "--text")),
    WrongInput("drafttrain generate --data gap.txt", ("input 1 is empty", "leave it out")),
    WrongInput(f"{TUNE} --data empty.txt", ("data.path = 'empty.txt'", "empty")),
    WrongInput(f"{TUNE} --report-data absent.txt", ("report_data.path = 'absent.txt'",)),
    WrongInput(f"{SPEC} data.path=absent.txt", ("data.path = 'absent.txt'", "no such file")),
    WrongInput(f"{SPEC} held_out.path=empty.txt", ("held_out.path = 'empty.txt'", "empty")),
    WrongInput(f"{HEADS} held_out.path=absent.txt", ("held_out.path = 'absent.txt'",)),
    WrongInput(
        f"{SMALL} data.path=texts.txt 'model={{model_type: marian}}'",
        ("no references", "data.reference_column"),
    ),
    WrongInput(f"{SMALL} max_tokens=1", ("max_tokens = 1", "'rows.jsonl'", "larger")),
]

MODELS = [
    WrongInput(f"{DISTILL} --target ./absent", ("target.path = './absent'", "existing")),
    WrongInput(f"{DISTILL} --target nothing", ("'nothing'", "config.json", "save_pretrained")),
    WrongInput(f"{DISTILL} --target garbled", ("target.path = 'garbled'", "JSON", "give")),
    WrongInput(f"{DISTILL} --target vision", ("'vision'", "'vit'", "T5")),
    WrongInput(f"{DISTILL} --target head", ("'acceptance-head'", "language model")),
    WrongInput(f"{DISTILL} --target untokenized", ("'untokenized'", "tokenizer", "beside")),
    WrongInput(f"{DISTILL} --target pickled", ("'pickled'", "pytorch_model.bin", "safetensors")),
    WrongInput(f"{DISTILL} --target moved", ("'moved'", "'../target/model.safetensors'", ";")),
    WrongInput(
        f"{DISTILL} --target half", ("'half'", "not fully covered", "copy them again"), weights=True
    ),
    WrongInput(f"{DISTILL} --target coded", ("'coded'", "target.trust_remote_code=true")),
    WrongInput(f"{DISTILL} --target org/absent", ("'org/absent'", ";")),
    WrongInput(f"{DISTILL} target.device=gpu", ("target.device = 'gpu'", "cuda")),
    WrongInput(f"{DISTILL} target.device=cuda:99", ("target.device = 'cuda:99'", "cpu")),
    WrongInput(f"{DISTILL} target.dtype=int8", ("target.dtype = 'int8'", "'float32'")),
    WrongInput(
        f"{DISTILL} sampling.max_new_tokens=999",
        ("sampling.max_new_tokens = 999", "sampling.max_new_tokens=256"),
    ),
    WrongInput(f"{EVAL} --drafter ./absent --target target", ("'./absent'", "existing")),
    WrongInput(f"{EVAL} --drafter ./absent", ("'./absent'", "--target")),
    WrongInput(f"{EVAL} --target wide --drafter target", ("40 tokens", "48", "train")),
    WrongInput(f"{EVAL} --target llama --drafter target", ("'target'", "decoder-only", "give")),
    WrongInput(f"{EVAL} --target llama --drafter checkpoints/tiny", ("Spec-Drafter", "give")),
    WrongInput(f"{EVAL} --target llama --drafter shuffled", ("token 4", "'w5'", "'w4'", "give")),
    WrongInput(
        f"{EVAL} --target llama --drafter moved", ("'moved'", "'../target/model.safetensors'")
    ),
    WrongInput(f"{EVAL} --target target --drafter pickled", ("pytorch_model.bin", "safetensors")),
    WrongInput(
        f"{EVAL} --target target --drafter vision", ("'vision'", "block heads or a language")
    ),
    WrongInput(f"{EVAL} --target target --drafter coded", ("'coded'", "code", ";")),
    WrongInput(f"{EVAL}", ("no finished run", "train_spec_drafter.py"), place="nothing"),
    WrongInput(f"{TUNE} --heads small", ("'small'", "no acceptance head", "give")),
    WrongInput("drafttrain tune", ("no finished run of heads", "--heads"), place="nothing"),
    WrongInput("drafttrain tune --heads head", ("target", "target.path=")),
    WrongInput(f"{TUNE} --drafter target", ("'target'", "decoder-only")),
    WrongInput(f"{SPEC} target.path=llama", ("target.path = 'llama'", "encoder-decoder", "T5")),
    WrongInput(f"{SPEC} target.path=untokenized", ("'untokenized'", "tokenizer")),
    WrongInput(f"{SPEC} target.path=pickled", ("'pickled'", "pytorch_model.bin", "safetensors")),
    WrongInput(f"{HEADS} drafter=target", ("'target'", "decoder-only", "give")),
    WrongInput(f"{HEADS} drafter=shuffled", ("token 4", "'w5'", "'w4'", "give")),
    WrongInput(f"{HEADS} drafter=./absent", ("'./absent'", "existing")),
    WrongInput(f"{SMALL} tokenizer=./absent", ("tokenizer = './absent'", "no such folder", "give")),
    WrongInput(f"{SMALL} teacher.path=target", ("teacher.path = 'target'", "model_type")),
    WrongInput(
        f"{SMALL} teacher.path=llama tokenizer=shuffled",
        ("tokenizer = 'shuffled'", "token 4", "'w5'", "'w4'", "give"),
    ),
]

PAIRINGS = [
    WrongInput(f"{CAUSAL} --stop fixed --h 0.5", ("stop.h = 0.5", "--stop head")),
    WrongInput(f"{CAUSAL} --stop entropy --k 4", ("stop.k = 4", "--stop fixed")),
    WrongInput(f"{CAUSAL} --stop head --k 4", ("stop.k = 4", "--stop fixed")),
    WrongInput(f"{CAUSAL} --stop head", ("'small'", "--head FOLDER")),
    WrongInput(f"{CAUSAL} --stop head --head ./absent", ("stop.head = './absent'", "give")),
    WrongInput(f"{CAUSAL} --stop head --head small", ("'small'", "'llama'", "acceptance head")),
    WrongInput(f"{CAUSAL} --stop head --head heads", ("2 heads", "D0-w6, D1-w6", "one head")),
    WrongInput(f"{CAUSAL} --stop head --head narrow-head", ("'narrow-head'", "8", "16", "train")),
    WrongInput(
        f"{CAUSAL} --stop head --head other-head",
        ("'other-head'", "'another-drafter'", "give the drafter"),
        weights=True,
    ),
    WrongInput(
        f"{CAUSAL} --stop confidence --temperature 1",
        ("confidence", "temperature is 1.0", "temperature 0"),
    ),
    WrongInput(f"{EVAL} --drafter none --target target --stop entropy", ("'none'", "--stop")),
    WrongInput(f"{EVAL} --drafter max-gram --target target --stop head", ("'max-gram'", "--stop")),
    WrongInput(f"{CAUSAL} decode.bigrams=b.safetensors", ("bigrams", "'max-gram'", "leave it out")),
    WrongInput(
        f"{EVAL} --drafter max-gram --target target decode.bigrams=absent.safetensors",
        ("'absent.safetensors'", "no such file", "drafttrain bigrams"),
    ),
    WrongInput(
        f"{EVAL} --drafter max-gram --target target decode.bigrams=rows.jsonl",
        ("'rows.jsonl'", "no table", "drafttrain bigrams"),
    ),
    WrongInput("drafttrain bigrams --distilled shards --out table.json", ("out", ".safetensors")),
    WrongInput(
        "drafttrain bigrams --distilled absent --out new.safetensors", ("'absent'", "distill")
    ),
    WrongInput(f"{EVAL} --beta 3", ("beta = 3", "--verifier spec-verification")),
    WrongInput(f"{EVAL} --verifier greedy --temperature 1", ("greedy", "temperature", ";")),
    WrongInput(
        f"{EVAL} --verifier spec-verification --temperature 1",
        ("spec-verification", "temperature", ";"),
    ),
    WrongInput(f"{EVAL} --mode teacher-forced --temperature 1", ("temperature", "--mode decode")),
    WrongInput(f"{EVAL} --mode teacher-forced --k 9", ("k = 9", "k = 4", "--mode decode")),
    WrongInput(f"{CAUSAL} --mode teacher-forced", ("'small'", "a Spec-Drafter", "--mode decode")),
    WrongInput(f"{CACHE} blocks_per_row=2", ("blocks_per_row = 2", "leave it out")),
    WrongInput(f"{CACHE} --target wide", ("48", "40 tokens", ";")),
    WrongInput(f"{TUNE} sampling.temperature=0.5", ("sampling.temperature", "0.5", "leave")),
    WrongInput(f"{EXPORT} --h 0.5", ("h = 0.5", "--head")),
    WrongInput(f"{EXPORT} --head head --heads heads", ("--head and --heads", "one")),
    WrongInput(f"{EXPORT} --head narrow-head", ("'narrow-head'", "8", "16")),
    WrongInput(f"{EXPORT} --head other-head", ("'other-head'", "'another-drafter'"), weights=True),
    WrongInput(f"{EXPORT} --heads heads", ("'heads'", "policy.json", "drafttrain tune")),
    WrongInput(f"{EXPORT} --heads heads policy=no-h.json", ("no-h.json", "add h")),
    WrongInput(
        f"{EXPORT} --heads heads policy=steep.json", ("steep.json", "h", "less than 1", "tune")
    ),
    WrongInput(f"{EXPORT} --heads heads policy=other.json", ("'D9-w9'", "D0-w6, D1-w6", "--head")),
    WrongInput(f"{EXPORT} --heads heads policy=elsewhere.json", ("'../../small'", "D0-w6")),
    WrongInput(f"{EXPORT} --head head policy=other.json", ("'D9-w9'", "'D1-w6'", "--policy")),
]

PLACES = [
    WrongInput(f"{DISTILL} --out texts.txt", ("out = 'texts.txt'", "is a file", "folder")),
    WrongInput(
        f"{DISTILL} --out shards --data rows.jsonl --method beam",
        ("shards/manifest.json", "method", "'greedy'", "'beam'", "out="),
        weights=True,
    ),
    WrongInput(
        f"{DISTILL} --out shards --data three.txt sampling.max_new_tokens=8",
        ("shards/manifest.json", "'three.txt'", "out="),
        weights=True,
    ),
    WrongInput(f"{DISTILL} --out cache", ("cache/manifest.json", "another folder")),
    WrongInput(f"{CACHE} --distilled ./absent", ("'absent'", "drafttrain distill --out")),
    WrongInput(f"{CACHE} --distilled cache", ("cache/manifest.json", "distil")),
    WrongInput(f"{CACHE} --distilled unfinished", ("'unfinished'", "drafttrain distill")),
    WrongInput(f"{CACHE} --out shards", ("'shards'", "one of its own")),
    WrongInput(
        f"{CACHE} --out cache seed=7",
        ("cache/manifest.json", "seed = 0", "7", "out="),
        weights=True,
    ),
    WrongInput(f"{SPEC} run=begun", ("run = 'begun'", "run=ANOTHER_FOLDER")),
    WrongInput(f"{SPEC} run=texts.txt", ("run = 'texts.txt'", "is a file")),
    WrongInput(f"{HEADS} run=begun", ("run = 'begun'", "run=ANOTHER_FOLDER")),
    WrongInput(f"{SMALL} run=texts.txt", ("run = 'texts.txt'", "is a file")),
    WrongInput(f"{SMALL} run=begun", ("run = 'begun'", "run=ANOTHER_FOLDER")),
    WrongInput(f"{EXPORT} --out exported", ("'exported'", "--force")),
    WrongInput(f"{EXPORT} --out shards", ("'shards'", "no earlier export", "new folder")),
    WrongInput(f"{EXPORT} --out my-eagle3", ("my-eagle3'", "another name")),
    WrongInput(f"{EXPORT} --report absent.json", ("'absent.json'", "drafttrain eval --report")),
    WrongInput(f"{EXPORT} --report texts.txt", ("'texts.txt'", "no JSON", "report.json")),
    WrongInput(f"{EXPORT} --report facts.json", ("facts.json", "drafttrain eval")),
]

GROUPS: dict[str, list[WrongInput]] = {
    "Keys and values": KEYS_AND_VALUES,
    "Data": DATA,
    "Models, tokenizers and drafters": MODELS,
    "Stop policies, heads, verifiers and modes that do not go together": PAIRINGS,
    "Draft trees, and methods compared at a depth or budget": TREES,
    "Cascades of drafters": CASCADES,
    "Block heads": BLOCK_HEADS,
    "Folders and files that are there already, or belong to something else": PLACES,
}
WRONG_INPUTS = [case for cases in GROUPS.values() for case in cases]
