"""Invalid command lines end with one line that names field, value and remedy, and write nothing."""

import errno
import os

import pytest
import typer

from drafttrain.cli import main
from drafttrain.commands.shell import run_command
from drafttrain.config.base import ConfigError
from tests.refusals import check_refusal, isolated

COMMANDS = ("distill", "cache", "eval", "tune", "generate", "export")
DISTILL = "drafttrain distill --target target --data texts.txt --out new"
SERVED = "drafttrain distill --target llama --data texts.txt --out new --server"
CONVERT = "drafttrain convert --model"
CACHE = "drafttrain cache --target target --drafter target --distilled shards --out new"
EVAL = "drafttrain eval --data rows.jsonl"
CAUSAL = f"{EVAL} --target llama --drafter small"
SAMPLED = f"{CAUSAL} --temperature 1"
PATHS = "--tree paths decode.tree.drafters"
FORCED = f"{CAUSAL} --mode teacher-forced"
ENTROPY = "'others={x: {drafter: small, stop: {kind: entropy}}}'"
TWICE = "'others={small k=4 greedy: {drafter: small, stop: {k: 1}}}'"
GENERATE = "drafttrain generate --target llama --drafter small --text w5"
TUNE = "drafttrain tune --heads heads"
ALONE = "drafttrain tune --target llama --drafter small --data rows.jsonl"
EXPORT = "drafttrain export --drafter small --out new"

SETTINGS = {
    f"{DISTILL} --method sample": ("sampling.temperature", "=1.0", "method=greedy"),
    "drafttrain train quickstrat": ("did you mean 'quickstart'?",),
    "drafttrain train nothing.yaml": ("one of acceptance-head, ",),
    "drafttrain train quickstart train.sed=1": ("did you mean 'train.seed'?",),
    "drafttrain train spec-drafter --config recipes/none.yaml": ("no settings file",),
    "drafttrain distil": ("'distil'", "Did you mean 'distill'?"),
    f"{CAUSAL} --head head --h 1.5": ("decode.stop.h = '1.5'", "less than 1"),
    f"{GENERATE} --show-rounds --json": ("--json", "--show-rounds"),
    "drafttrain export --drafter small": ("'out' is missing",),
    f"{TUNE} sweep.hh=[1]": ("sweep.hh", "'h'"),
    f"{CAUSAL} --verifier spec-verification --tau inf": ("verifier.tau = 'inf'", "finite number"),
    f"{CAUSAL} --sweep k=2 --sweep k=4": ("sweep.k is given twice", "k=5,10"),
    f"{CAUSAL} --sweep k=2 sweep.k=4": ("sweep.k = 4, but its option is 2", "one of the two"),
    f"{EXPORT} verifier.kind=recursive": ("verifier.kind = 'recursive'", "give one of: rejection"),
}
INPUTS = {
    f"{DISTILL} --data broken.jsonl": ("'broken.jsonl'", "no JSON", "row 0", ";"),
    f"{DISTILL} --data table.csv": ("'table.csv'", "data.input_column", "question"),
    f"{DISTILL} --target untokenized": ("'untokenized'", "tokenizer", "in its folder"),
    f"{DISTILL} --target pickled": ("'pickled'", "pytorch_model.bin", "drafttrain convert"),
    f"{DISTILL} --target half": ("'half'", "not fully covered", "copy it again"),
    f"{DISTILL} --target coded": ("'coded'", "target.trust_remote_code=true"),
    f"{DISTILL} target.device=cuda:99": ("target.device = 'cuda:99'", "cpu"),
    f"{DISTILL} sampling.max_new_tokens=999": ("max_new_tokens = 999", "max_new_tokens=256"),
    f"{DISTILL} data.config_name=de-en": ("data.config_name = 'de-en'", "remove it"),
    f"{DISTILL} --server http://127.0.0.1:1": ("encoder-decoder model", "leave --server out"),
    f"{DISTILL} --backend server": ("server.url is not set", "give --server"),
    f"{SERVED} http://127.0.0.1:1": ("server http://127.0.0.1:1/v1: Connection error",),
    f"{SERVED} ftp://host": ("server.url must be an address",),
    f"{CONVERT} picled --out new": ("did you mean 'pickled'?",),
    f"{CONVERT} pickled --out small": ("out = 'small' exists",),
    f"{CONVERT} llama --out new": ("no pickled weights",),
    f"{DISTILL} target.revision=main": ("'target' is a local folder", "'main'", "leave"),
    f"{CACHE} --drafter checkpoints/tiny/final": ("a Spec-Drafter", "stop.kind=cumulative"),
    f"{CACHE} mixing=0.3": ("mixing = 0.3", "state=token"),
    f"{CACHE} --drafter vit": ("'vit' model", "cannot draft"),
    f"{CACHE} --drafter llama": ("is a decoder-only model", "encoder-decoder"),
    f"{CACHE} --distilled none": ("holds no manifest.json", "drafttrain distill"),
    f"{CACHE} --out texts.txt": ("is a file", "give a folder"),
    f"{CACHE} --out shards": ("is the folder of the outputs",),
    f"{CAUSAL} --data chats.jsonl": ("chat template", "'llama'", "data.input_column"),
    f"{CAUSAL} --data chats.jsonl --target target --drafter target": ("one text a row", "name"),
    f"{ALONE} --data chats.jsonl": ("chat template", "'llama'", "data.input_column"),
    f"{ALONE} --report-data chats.jsonl": ("chat template", "'llama'", "data.input_column"),
    f"{EVAL} --target wide --drafter target": ("40 tokens", "48", "train"),
    f"{EVAL} --target llama --drafter shuffled": ("token 4", "'w5'", "'w4'", "give"),
    f"{EVAL} --target llama --drafter small bleu_tokenizer=klingon": ("'klingon'", "13a", "give"),
    f"{EVAL} --target llama --drafter small bleu_tokenizer=ja-mecab": ("'ja-mecab'", "give one of"),
    f"{CAUSAL} --batch-size 1,999": ("batch_sizes = 999", "inputs", "or smaller batches"),
    f"{GENERATE} --data rows.jsonl": ("--text and --data", "give one"),
    f"{TUNE} --drafter target": ("'target'", "decoder-only"),
    f"{ALONE} --report-data texts.txt --batch-size 9": ("batch_sizes = 9", "smaller batches"),
    f"{ALONE} trees=sequoia": ("tree.by_rank is missing", "sequoia"),
    f"{ALONE} --sweep entropy={','.join(map(str, range(1, 40)))}": ("at most 40", "trees=[]"),
    f"{ALONE} --sweep h=0.5": ("sweep.h is given, but not tried", "leave it out"),
    f"{ALONE} --sweep nodes=4 trees=[]": ("sweep.nodes is given, but not tried", "leave it out"),
    f"{ALONE} --sweep entropy=-1": ("decode.stop.entropy = -1", "greater than 0"),
    f"{ALONE} candidates.x.drafter=llama": ("candidates.x.drafter", "leave it out"),
    f"{ALONE} 'candidates={{k=2: {{stop: {{k: 3}}}}}}'": ("candidates.k=2 has the name of",),
}
PAIRINGS = {
    f"{EVAL} --target target --drafter llama": ("is a decoder-only model ('llama')", "'target'"),
    f"{EVAL} --target llama --drafter target": ("is an encoder-decoder model ('marian')",),
    f"{EVAL} --target llama --drafter checkpoints/tiny": ("is a Spec-Drafter for",),
    f"{EVAL} --target llama --drafter mamba": ("'mamba' model", "decoded speculatively"),
    f"{EVAL} --target mamba --drafter none": ("'mamba' model", "decoded speculatively"),
    f"{EVAL} --target llama --drafter vit": ("'vit' model", "cannot draft"),
    f"{EVAL} --target llama --drafter shards": ("holds no config.json",),
    f"{SAMPLED} {PATHS}=[checkpoints/tiny/final]": ("tree.drafters = ", "is a Spec-Drafter"),
    f"{SAMPLED} {PATHS}=[target]": ("is an encoder-decoder model",),
    f"{SAMPLED} {PATHS}=[absent]": ("'absent'", "no such folder"),
    f"{CAUSAL} --stop head --k 3": ("stop.k = 3 is for fixed only",),
    f"{CAUSAL} decode.stop.max_draft=8": ("stop.max_draft = 8 is for head or entropy",),
    f"{SAMPLED} --stop confidence": ("temperature is 1", "its own value"),
    f"{EVAL} --target llama --drafter none --stop entropy": ("chains of a Spec-Drafter",),
    f"{CAUSAL} --stop head": ("no folder acceptance_head", "add --head"),
    f"{CAUSAL} --stop head --head absent": ("'absent'", "no such folder"),
    f"{CAUSAL} --stop head --head small": ("'llama' model, not an acceptance head",),
    f"{DISTILL} --backend engine --method beam": ("method = 'beam'", "backend=transformers"),
    f"{DISTILL} --out shards --data rows.jsonl --method beam": (
        "shards/manifest.json",
        "method",
        "'greedy'",
        "'beam'",
        "out=",
    ),
    f"{SAMPLED} --verifier greedy": ("greedy", "temperature", ";"),
    f"{CAUSAL} --drafter max-gram baselines=generate,assisted": (
        "'assisted'",
        "drafter = 'max-gram'",
        "others.NAME.drafter=MODEL",
    ),
    f"{CAUSAL} --mode teacher-forced --batch-size 4": ("batch_sizes", "--mode decode"),
    f"{CAUSAL} --mode teacher-forced --stop confidence": ("'confidence'", "--mode decode"),
    f"{FORCED} --tree opt-tree": ("tree.kind = 'opt-tree'", "--mode decode"),
    f"{FORCED} --verifier block": ("verifier.kind = 'block'", "--mode decode"),
    f"{FORCED} --cascade max-gram": ("cascade", "--mode decode"),
    f"{FORCED} {ENTROPY}": ("others.x.stop.kind = 'entropy'", "--mode decode"),
    f"{FORCED} others.x.drafter=narrow-blocks": ("others.x.drafter", "--mode decode"),
    f"{FORCED} others.x.drafter=none": ("others.x.drafter = 'none'", "give a drafter"),
    f"{CAUSAL} --cascade max-gram --increments 5,3/4,10/10": ("2 rows, of 2, 1 numbers",),
    f"{CAUSAL} --cascade shuffled,max-gram": (
        "'shuffled'",
        "different tokenizers",
        "give one of the target's family",
    ),
    f"{EVAL} --target target --drafter narrow-blocks": (
        "'narrow-blocks' (block heads) reads hidden states of size 8",
        "'target' have size 16",
        "train block heads for this target",
    ),
}
TREES = {
    f"{SAMPLED} decode.tree.width=3": ("tree.width = 3 is for paths or rsd-s only, but tree",),
    f"{SAMPLED} --tree rsd-s decode.tree.nodes=9": ("tree.nodes = 9 is for opt-tree or binary",),
    f"{SAMPLED} --tree binary decode.tree.draft_temperature=1": ("temperature = 1.0 is for",),
    f"{SAMPLED} --tree opt-tree --drafter none": ("can only draft chains;", "or give a"),
    f"{CAUSAL} --tree paths": ("at temperature 0 all samples are equal",),
    f"{SAMPLED} --tree rsd-s decode.tree.width=41": ("has 41 siblings", "has 40 tokens"),
    f"{SAMPLED} --tree sequoia decode.tree.by_rank=[0.7,0.4]": ("sum to 1 at most",),
    f"{SAMPLED} --tree opt-tree --stop entropy": ("'entropy' reads", "use stop.kind=fixed or gain"),
    f"{SAMPLED} --tree binary --stop gain": ("gain' reads", ", or opt-tree"),
    f"{SAMPLED} --tree paths --verifier recursive": ("use multi-round or k-seq",),
    f"{SAMPLED} --tree opt-tree --verifier rejection": ("deterministic trees", "target-walk"),
    f"{SAMPLED} {PATHS}=[llama] --verifier k-seq": ("not valid for independent", "target-walk"),
    f"{SAMPLED} --verifier recursive": ("not valid for iid chains", "use rejection"),
}
RUN = "drafttrain eval"
"""Evaluates the newest run, a Spec-Drafter, on its held-out rows."""
RUNS = {
    f"{RUN} --drafter ./absent --target target": ("--data",),
    f"{RUN} --drafter ./absent --target target --data rows.jsonl": ("'./absent'", "no such folder"),
    f"{RUN} --drafter ./absent": ("./absent", "no such folder", "--target"),
    f"{RUN} --target ./absent --drafter checkpoints/tiny": ("--data",),
    f"{RUN} --report report.txt": ("report.txt", ".json"),
    f"{RUN} --stop head --head head": ("'head'", "'spec-drafter'", "stop.kind=", "cumulative"),
    f"{RUN} --report rows.jsonl/report.json": ("'rows.jsonl'", "Not a directory", "give another"),
    f"{RUN} --beta 3": ("beta = 3", "--verifier spec-verification"),
    f"{RUN} 'others={{x: {{drafter: checkpoints/tiny, stop: {{k: 9}}}}}}' --mode teacher-forced": (
        "others.x.stop.k = 9",
        "--mode decode",
    ),
    f"{RUN} --mode teacher-forced --k 9": ("k = 9", "--mode decode"),
    "drafttrain generate --text ' '": ("row 0: empty",),
}
PLACES = {
    f"{CACHE} --distilled unfinished": ("'unfinished'", "drafttrain distill"),
    f"{EXPORT} --target shuffled": ("'small'", "'shuffled'", "different tokenizers"),
    f"{EXPORT} --head none": ("head = 'none'", "no such folder"),
    f"{EXPORT} --report no.json": ("no.json", "no such file"),
    f"{EXPORT} --report texts.txt": ("texts.txt", "is no report of"),
    f"{EXPORT} --out texts.txt": ("texts.txt", "is no earlier export"),
    f"{EXPORT} --out exported": ("'exported'", "--force"),
    f"{EXPORT} hub=user/eagle3-x": ("hub = 'user/eagle3-x'", "vLLM would mistake"),
    f"{EXPORT} check=target": ("add --target MODEL",),
    f"{EXPORT} --target lama check=target": ("'lama'", "no such folder", "did you mean 'llama'"),
    f"{EXPORT} --target lama check=drafter": ("'lama'", "no such folder"),  # its rows are read
    f"{CAUSAL} --report /proc/report.json": ("report = ", "/proc"),
    f"{CAUSAL} --report llama/config.json": ("report = ", "llama/config.json"),
    f"{ALONE} --report llama/config.json": ("report = ", "llama/config.json"),
    "drafttrain bigrams --distilled shards --out table.json": ("out", ".safetensors"),
}
READ_FIRST = {
    f"{CONVERT} pickled --out new": ("'pickled'", "are damaged, or hold more than tensors"),
    f"{FORCED} --sweep k=2,4 {TWICE}": ("small k=4 greedy", "give each once"),
    f"{CACHE} --out cache seed=7": ("cache/manifest.json", "seed = 0", "7", "out="),
    f"{CAUSAL} --stop head --head other-head": ("'other-head'", "'another-drafter'", "give the"),
}
"""Errors that can only be found after weights are read."""
REFUSED = SETTINGS | INPUTS | PAIRINGS | TREES | RUNS | PLACES


@pytest.mark.parametrize("line", REFUSED)
def test_wrong_input_ends_in_one_line_before_weights_are_read(refusal_project, line):
    check_refusal(refusal_project, line, REFUSED[line])


@pytest.mark.parametrize("line", READ_FIRST)
def test_wrong_weights_and_other_settings_end_in_one_line(refusal_project, line):
    check_refusal(refusal_project, line, READ_FIRST[line], weights=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_debug_shows_the_traceback(refusal_project, command):
    with isolated(), pytest.raises(ConfigError, match=r"torn\.yaml is not valid YAML"):
        main([command, "--debug", "--config", "torn.yaml"])


def test_a_folder_that_cannot_be_written_is_one_line_with_the_remedy(tmp_path, capsys):
    def write() -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "run"))

    command = typer.Typer()
    command.command()(write)
    with pytest.raises(SystemExit) as ended:
        run_command(command, "drafttrain", [])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "run") in line and "give another folder" in line
