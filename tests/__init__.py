"""Folders mirror drafttrain/; beside them benchmarks/, recipes/ and faults/ (broken-off runs).

conftest.py      one thread for each test process; tiny models and targets as fixtures
tiny_models.py   random models of every family       tiny_targets.py  tokenizer, sentences, folders
tiny_drafters.py Spec-Drafters, block heads, copies  comparing.py  weights exactly, numbers closely
decoding/        toys.py: targets, drafters as tables; enumeration.py: laws of output, exactly;
                 drafts.py: half-right drafts; decoded.py: generate and the loop; trees/growing.py;
                 engine/fresh.py: prefill without a cache; drafters/toy_blocks.py
data/, training/ distill/tiny_distill.py, hidden/tiny_cache.py, training/tiny_runs.py
evaluation/      scripted.py: drafts with a known score; stops/replays.py, cascades/replays.py
export/pairs.py  exported pairs                     faults/forks.py  children that get signals
processes/       launching.py: recipes and commands in forked processes, to be killed or joined
refusals/        wrong command lines: project.py makes the folder they are given in
"""
