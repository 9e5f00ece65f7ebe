"""`drafttrain train`: runs a recipe in this process."""

import difflib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from drafttrain.config.base import ConfigError
from drafttrain.config.reading import recipe_file


def run_recipe(recipe: str, arguments: Sequence[str]) -> None:
    """Runs a recipe (see `find_recipe`) as `accelerate launch recipes/train_NAME.py` would.

    Exits with its exit code. Raises ConfigError for an unknown recipe or two settings files.
    """
    file = find_recipe(recipe)
    if file.suffix == ".yaml":
        if any(word.partition("=")[0] == "--config" for word in arguments):
            raise ConfigError(f"{file} is given, but --config is given too; give one of the two")
        file, arguments = script_of(file), ["--config", str(file), *arguments]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    module.main(arguments, name="drafttrain")


def find_recipe(recipe: str) -> Path:
    """Returns the script or settings file (YAML) of a path or a name; else raises ConfigError.

    quickstart is recipes/quickstart.yaml, spec-drafter is recipes/train_spec_drafter.py.
    """
    name, recipes = recipe.replace("-", "_"), Path("recipes")
    candidates = [Path(recipe), recipes / f"{name}.yaml", recipes / f"train_{name}.py"]
    for file in map(recipe_file, [*candidates, recipes / f"{name}.py"]):
        if file.suffix in (".yaml", ".py") and file.is_file():
            return file
    folder = recipe_file(recipes / "train_spec_drafter.py").parent
    scripts = [file.stem.removeprefix("train_") for file in folder.glob("train_*.py")]
    settings = [file.stem for file in folder.glob("*.yaml")]
    near = difflib.get_close_matches(name, scripts + settings, n=1)
    hint = "".join(f"did you mean {stem.replace('_', '-')!r}? " for stem in near)
    known = ", ".join(sorted(scripts)).replace("_", "-")
    raise ConfigError(f"no recipe {recipe!r}; {hint}give a YAML settings file or one of {known}")


def script_of(file: Path) -> Path:
    """Returns the script of a YAML settings file: the first one that its comments name.

    Raises ConfigError if they name none.
    """
    text = file.read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^#.*\brecipes/(train_\w+\.py)\b", text, re.MULTILINE)
    script = recipe_file(Path("recipes", match[1] if match else ""))
    if not script.is_file():
        raise ConfigError(
            f"no comment in {str(file)!r} names its script, such as recipes/train_spec_drafter.py; "
            f"give both: `drafttrain train spec-drafter --config {file}`"
        )
    return script
