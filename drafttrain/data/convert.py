"""Conversion of a model with pickled weights to a folder with safetensors.

The pickles are read with `weights_only`: PyTorch creates tensors only and runs no other code.
"""

import shutil
import sys
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.utils import WEIGHTS_INDEX_NAME

from drafttrain.config.base import ConfigError
from drafttrain.data.shards.writing import whole_folder
from drafttrain.models.loading import auto_class, first_line, is_language_model, read_config
from drafttrain.models.weight_files import OTHERS, PICKLES, other_weights, read_weights, shards_of

LEFT_OUT = (*PICKLES, *OTHERS, ".safetensors", ".index.json", "/config.json")
"""Suffixes of files that are not copied: those written again, and weights for other programs."""


def convert(model: str, out: Path, revision: str | None = None) -> None:
    """Writes a model (folder or Hub name) to the new folder `out`: weights as safetensors, with
    their dtype unchanged, and copies of all other files.

    The folder is renamed when complete. Raises ConfigError if `out` exists, if the model is not a
    language model, and if its pickles are damaged, outside its folder or hold more than tensors.
    """
    name = f"model {model!r}"
    if out.exists():
        raise ConfigError(f"out = {str(out)!r} exists; give the name of a new folder")
    config = read_config(model, name, revision)
    if not is_language_model(config):
        raise ConfigError(f"{name} is a {config.model_type!r} model, not a language model")
    folder = Path(model)
    if not folder.is_dir():
        try:
            ignored = [f"*{suffix}" for suffix in (*OTHERS, ".safetensors")]
            folder = Path(snapshot_download(model, revision=revision, ignore_patterns=ignored))
        except Exception as error:  # from the Hub, its libraries or the disk
            raise ConfigError(f"{name} cannot be downloaded ({first_line(error)})") from error
    if not any(file.endswith(PICKLES) for file in other_weights(folder)):
        raise ConfigError(f"{name} holds no pickled weights ({', '.join(PICKLES)})")
    if (index := folder / WEIGHTS_INDEX_NAME).is_file():
        shards_of(index, name, ".bin")
    config.dtype = None  # use the dtype of the weights
    safe = {"use_safetensors": False, "weights_only": True, "trust_remote_code": False}
    try:
        read = read_weights(auto_class(config), folder, name, config=config, dtype="auto", **safe)
    except ConfigError:
        raise
    except Exception as error:  # its class varies for objects other than tensors
        raise ConfigError(
            f"{name}: its pickled weights are damaged, or hold more than tensors, which could run "
            "code; give safetensors, or weights of an author that you trust"
        ) from error
    with whole_folder(out.absolute()) as part:
        read.save_pretrained(part)
        for file in folder.iterdir():
            if file.is_file() and not str(file).endswith(LEFT_OUT):
                shutil.copyfile(file, part / file.name)
    print(f"{out}: {read.num_parameters():,} parameters as safetensors", file=sys.stderr)
