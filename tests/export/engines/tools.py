"""Stand-ins for llama.cpp's converter and quantizer, which say what they were asked."""

from __future__ import annotations

from pathlib import Path

CONVERTER = """
import sys
from pathlib import Path

if "--print-supported-models" in sys.argv:
    print("  - LlamaForCausalLM\\n  - Qwen2ForCausalLM", file=sys.stderr)
    raise SystemExit
folder, _, out, _, kind = sys.argv[1:]
assert (Path(folder) / "model.safetensors").is_file()
Path(out).write_bytes(b"GGUF " + kind.encode())
"""
QUANTIZER = """
import sys
from pathlib import Path

source, out, kind = sys.argv[1:]
Path(out).write_bytes(Path(source).read_bytes() + b" " + kind.encode())
"""
FAILING = 'import sys\nprint("loading")\nsys.exit("KeyError: this tokenizer is not known")\n'


def write_tool(file: Path, code: str) -> Path:
    file.write_text(code)
    return file
