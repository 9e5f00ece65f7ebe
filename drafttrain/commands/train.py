"""`drafttrain train`: one of the recipes, in this process."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from drafttrain.config.base import ConfigError
from drafttrain.config.reading import recipe_file


def run_recipe(recipe: str, arguments: Sequence[str]) -> None:
    """Run a recipe as `accelerate launch recipes/train_NAME.py ARGUMENTS` would.

    recipe: see `find_recipe`. Ends with the recipe's own exit code. Raises ConfigError.
    """
    file = find_recipe(recipe)
    if file.suffix == ".yaml":
        file, arguments = script_of(file), ["--config", str(file), *arguments]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    module.main(arguments, name="drafttrain")


def find_recipe(recipe: str) -> Path:
    """A script or a YAML file of settings, by its path or its name: quickstart is
    recipes/quickstart.yaml, spec-drafter is recipes/train_spec_drafter.py. Raises ConfigError."""
    name, recipes = recipe.replace("-", "_"), Path("recipes")
    places = [Path(recipe), recipes / f"{name}.yaml", recipes / f"train_{name}.py"]
    for place in map(recipe_file, [*places, recipes / f"{name}.py"]):
        if place.suffix in (".yaml", ".py") and place.is_file():
            return place
    folder = recipe_file(recipes / "train_spec_drafter.py").parent
    scripts = [one.stem.removeprefix("train_") for one in folder.glob("train_*.py")]
    settings = [one.stem for one in folder.glob("*.yaml")]
    near = difflib.get_close_matches(name, scripts + settings, n=1)
    hint = "".join(f"did you mean {one.replace('_', '-')!r}? " for one in near)
    known = ", ".join(sorted(scripts)).replace("_", "-")
    raise ConfigError(f"no recipe {recipe!r}; {hint}give a YAML file of settings or one of {known}")


def script_of(file: Path) -> Path:
    """The script that a YAML file of settings is for: the first that its comments name.

    Raises ConfigError where they name none.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^#.*\brecipes/(train_\w+\.py)\b", text, re.MULTILINE)
    script = recipe_file(Path("recipes", found[1] if found else ""))
    if not script.is_file():
        raise ConfigError(
            f"no comment of {str(file)!r} names its script, as recipes/train_spec_drafter.py; "
            f"give both: `drafttrain train spec-drafter --config {file}`"
        )
    return script
