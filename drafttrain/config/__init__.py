"""Settings: their classes, how they are read, and defaults from finished runs.

`kinds` and `methods` are the tables of methods. Nothing here imports torch.
"""
