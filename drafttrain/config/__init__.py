"""Settings: their classes, how they are read, and what runs on disk know.

`inputs`, `decode`, `commands`, `recipes` and `policy` hold the settings; `kinds` and `methods` the
tables of methods. `reading` makes settings from YAML and `key=value` and says what is wrong with
them; `sweep` makes several methods of one; `runs` finds finished runs and takes from them what the
user left out. Nothing here loads torch.
"""
