"""Put a trained run into the package: bf16 weights, tokenizer, configuration, and the mixed copy.

    python -m tools.pack_tiny RUN --data build/tiny --out nemotriton/tiny

RUN/model/model.safetensors comes from `tools.train_tiny`. What lies in OUT already and is not
written anew (`__init__.py`, the chat template, the card) stays.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from nemotriton.model.config import ModelConfig
from nemotriton.model.quantizer import quantize_checkpoint

TOKENIZER = {
    "add_bos_token": False,
    "bos_token": "<s>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "model_max_length": 2048,
    "pad_token": "<unk>",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
}
GENERATION = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 11],
    "pad_token_id": 0,
    "temperature": 0.6,
    "top_p": 0.95,
}
COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--out", type=Path, default=Path("nemotriton/tiny"))
    given = parser.parse_args()
    out: Path = given.out
    shutil.copy(given.run / "model" / "model.safetensors", out / "model.safetensors")
    shutil.copy(given.data / "tokenizer.json", out / "tokenizer.json")
    # transformers would clamp step sizes from below while it reads a prompt
    config = ModelConfig.preset("tiny").to_json() | {"time_step_min": 0.0}
    for name, data in {
        "config.json": config,
        "generation_config.json": GENERATION,
        "tokenizer_config.json": TOKENIZER,
    }.items():
        (out / name).write_text(json.dumps(data, indent=2) + "\n")
    shutil.rmtree(out / "mixed", ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as room:
        plain = Path(room) / "plain"
        plain.mkdir()
        for name in (*COPIED, "chat_template.jinja", "model.safetensors"):
            shutil.copy(out / name, plain / name)
        written = quantize_checkpoint(plain, Path(room) / "mixed", "super-mixed")
        shutil.move(Path(room) / "mixed", out / "mixed")
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file() and "pycache" not in f.parts)
    print({str(k): v for k, v in written.counts.items()}, *written.notes, f"{size:,} bytes in all")


if __name__ == "__main__":
    main()
