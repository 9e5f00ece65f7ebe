"""Settings: their classes, how they are read, and defaults from finished runs.

`inputs`, `decode`, `commands`, `recipes` and `policy` hold the settings classes; `kinds` and
`methods` the tables of methods. `reading` reads and checks settings from YAML and `key=value`;
`sweep` expands a method into several; `runs` finds finished runs and fills in settings that the
user left out. Nothing here imports torch.
"""
