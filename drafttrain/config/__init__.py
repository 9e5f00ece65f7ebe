"""What a user may set: the settings classes, how they are read, and what runs on disk know.

One module a subject: `inputs`, `decode`, `commands`, `recipes` and `policy` hold the settings,
`kinds`, `verifiers`, `stops` and `trees` the tables of what methods are made of. `reading` makes
settings from YAML and `key=value`, `wrong_settings` words what is wrong with them, `fields` looks
them up by name. `sweep` makes several methods of one; `runs` finds finished runs and `filling`
takes from them what the user left out. Nothing here loads torch: a wrong setting is answered at
once.
"""
