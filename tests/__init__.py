"""Tests. Folders mirror drafttrain/, plus benchmarks/, recipes/ and faults/ (interrupted runs).

conftest.py      one thread per test process; fixtures with tiny models and targets
tiny_models.py   random models of each family        tiny_targets.py  tokenizer, sentences, folders
tiny_families.py further families                    comparing.py  equality of weights and numbers
tiny_drafters.py Spec-Drafters, block heads, copies  small_pair.py  pairs on disk for whole commands
decoding/        toys.py: targets and drafters as tables; enumeration.py: exact output
                 distributions; drafts.py: scripted drafts; paths.py: paths of trees; decoded.py:
                 generate and the loop; engine/fresh.py: rounds compared with uncached passes
data/, training/ distill/tiny_distill.py, hidden/tiny_cache.py, training/tiny_runs.py
evaluation/      scripted.py: tiny pairs as eval loads them; reports.py: hand-written reports
export/pairs.py  pairs that conftest.py exports      faults/kills.py  runs killed at random points
processes/       launching.py: recipes and commands in forked processes, to be killed or joined
refusals.py      invalid command lines, and the project folder in which they run
"""
