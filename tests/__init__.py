"""Folders mirror drafttrain/; beside them benchmarks/, recipes/ and faults/ (broken-off runs).

conftest.py      one thread for each test process; tiny models and targets as fixtures
tiny_models.py   random models of every family       tiny_targets.py  tokenizer, sentences, folders
tiny_families.py further families                    comparing.py  weights exactly, numbers closely
tiny_drafters.py Spec-Drafters, block heads, copies  small_pair.py  pairs on disk for whole commands
decoding/        toys.py: targets, drafters as tables; enumeration.py: laws of output, exactly;
                 drafts.py: scripted drafts; paths.py: paths of trees; decoded.py: generate and the
                 loop; engine/fresh.py: rounds against passes without a cache
data/, training/ distill/tiny_distill.py, hidden/tiny_cache.py, training/tiny_runs.py
evaluation/      scripted.py: tiny pairs as eval loads them; reports.py: reports written by hand
export/pairs.py  exported pairs                     faults/forks.py  children that get signals
processes/       launching.py: recipes and commands in forked processes, to be killed or joined
refusals.py      wrong command lines, and the folder that they are given in
"""
