"""The figures of the embedded model's card: what it knows, does, and loses by every short cut.

    python -m tools.eval_tiny nemotriton/tiny --data build/tiny --only text,tasks,drafts,parts
    python -m tools.eval_tiny nemotriton/tiny --data build/tiny --only states --device cuda

    text     perplexity of held-out code and prose, also of mixed/, and evenness of the experts
    tasks    share of right answers by the prompt's length, through the engine, also of mixed/
    drafts   share of drafts accepted at each depth, greedily, behind held-out code
    parts    agreement of the first draft with the trunk, with parts of the MTP block taken out
    states   8,000 tokens sampled in every state format: what is the same as in fp32, and how likely
             the fp32 model finds the text

Figures are added to DIR/figures.json (--out), which tests and the card read.
"""

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemotriton import LLM, ModelConfig, SamplingParams
from nemotriton.audit.mtp import draft
from nemotriton.engine.loading import stored_weights
from nemotriton.kernels import STATE_FORMATS
from nemotriton.model.nemotron_h import NemotronH
from tools.tiny_measure import measure
from tools.tiny_tasks import TASKS, Symbols, examples

SECTIONS = ("text", "tasks", "drafts", "parts", "states")
LENGTHS = (64, 128, 256, 512, 1000)
WIDTH = 2048
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# Parts of the MTP block and the columns of a tensor that are set to zero to take them out.
_WIDTH = ModelConfig.preset("tiny").width
PARTS = {
    "embedding": ("mtp.layers.0.eh_proj.weight", slice(None, _WIDTH)),
    "hidden state": ("mtp.layers.0.eh_proj.weight", slice(_WIDTH, None)),
    "attention": ("mtp.layers.0.mixer.o_proj.weight", slice(None)),
    "routed experts": ("mtp.layers.1.mixer.fc2_latent_proj.weight", slice(None)),
    "shared expert": ("mtp.layers.1.mixer.shared_experts.down_proj.weight", slice(None)),
}


def windows(data: Path, part: str, count: int, width: int = WIDTH) -> list[list[int]]:
    """The first `count` windows of a held-out part."""
    with np.load(data / "text.npz") as text:
        ids = text[f"heldout_{part}"].astype(np.int64)
    count = min(count, len(ids) // width)
    return ids[: count * width].reshape(count, width).tolist()


def loss_of(llm: LLM, sequences: list[list[int]], start: int = 0) -> float:
    """Mean negative log-likelihood in nats of every token behind `start`."""
    total, tokens = 0.0, 0
    for ids in sequences:
        rows = llm.logits(ids)[start:-1].float().log_softmax(-1)
        target = torch.tensor(ids[start + 1 :], device=rows.device)
        total -= float(rows.gather(1, target[:, None]).sum())
        tokens += len(target)
    return total / tokens


def text(given: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, directory in copies(given.model):
        with LLM(directory, device=given.device, dtype=given.dtype) as llm:
            for part in ("code", "docs"):
                loss = loss_of(llm, windows(given.data, part, given.windows))
                found[f"{name}_{part}_perplexity"] = round(math.exp(loss), 4)
    model = trainable(given)
    with torch.no_grad():
        measured = measure(model, given.data, rows=4, most=given.windows)
    return found | {"expert_entropy": round(min(measured["code_experts"], 1.0), 4)}


def tasks(given: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    symbols = Symbols.read(given.data / "symbols.json")
    for name, directory in copies(given.model):
        record = found["right" if name == "bf16" else f"right_{name}"] = {}
        with LLM(directory, device=given.device, dtype=given.dtype) as llm:
            for task in TASKS:
                for length in LENGTHS:
                    pairs = examples(symbols, task, length, given.examples, seed=length)
                    marks = right(llm, pairs)
                    record[f"{task}_{length}"] = "".join("01"[mark] for mark in marks)
                    found[f"{name}_{task}_{length}"] = sum(marks) / len(marks)
    return found


def right(llm: LLM, pairs: list[tuple[list[int], list[int]]]) -> list[bool]:
    """Which answers are right to the last token."""
    outputs = llm.generate([prompt for prompt, _ in pairs], GREEDY)
    said = [list(output.outputs[0].token_ids) for output in outputs]
    return [ids[: len(answer)] == answer for ids, (_, answer) in zip(said, pairs, strict=True)]


def drafts(given: Any) -> dict[str, Any]:
    prompts = [ids[:256] for ids in windows(given.data, "code", given.windows)]
    options = {"device": given.device, "dtype": given.dtype, "drafts": 3, "adapt_drafts": False}
    with LLM(given.model, **options) as llm:
        done = draft(llm, prompts, 128)
    shares = [round(share, 4) for share in done.stats["acceptance"]]
    return {"acceptance": shares, "tokens_per_pass": round(done.stats["tokens_per_pass"], 3)}


def parts(given: Any) -> dict[str, Any]:
    model = trainable(given)
    tensors = model.named_tensors()
    found = {}
    for name, (tensor, columns) in {"whole": ("norm_f.weight", slice(0, 0)), **PARTS}.items():
        kept = tensors[tensor].detach().clone()
        with torch.no_grad():
            tensors[tensor][..., columns] = 0
            ids = measure(model, given.data, rows=4, most=min(8, given.windows))
            tensors[tensor].copy_(kept)
        found[name] = round(ids["code_agree1"], 4)
    return {"agreement_without": found}


def states(given: Any) -> dict[str, Any]:
    prompts = [ids[:48] for ids in windows(given.data, "code", 4)]
    params = SamplingParams(temperature=0.8, max_tokens=2000, ignore_eos=True, seed=0)
    said: dict[str, list[list[int]]] = {}
    for name in STATE_FORMATS:
        with LLM(given.model, device=given.device, dtype="float32", state_dtype=name) as llm:
            outputs = llm.generate(prompts, params)
            said[name] = [list(output.outputs[0].token_ids) for output in outputs]
    found = {}
    with LLM(given.model, device=given.device, dtype="float32") as llm:
        for name, texts in said.items():
            whole = [prompt + ids for prompt, ids in zip(prompts, texts, strict=True)]
            same = [agreed(a, b) for a, b in zip(texts, said["float32"], strict=True)]
            loss = loss_of(llm, whole, start=47)
            found[name] = {"tokens_until_different": same, "perplexity": round(math.exp(loss), 4)}
    return {"states": found}


def agreed(a: list[int], b: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def copies(model: Path) -> Iterator[tuple[str, Path]]:
    yield "bf16", model
    if (model / "mixed").is_dir():
        yield "mixed", model / "mixed"


def trainable(given: Any) -> NemotronH:
    """The model in fp32, for its training forward."""
    weights = stored_weights(given.model, None, True, drafting=True)
    model = NemotronH(weights.config, torch.float32, torch.device(given.device), drafting=True)
    weights.place(model, None)
    return model


@contextmanager
def added(path: Path) -> Iterator[dict[str, Any]]:
    """The figures of a file, written back with what was added."""
    figures = json.loads(path.read_text()) if path.is_file() else {}
    yield figures
    path.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--windows", type=int, default=16, help="of 2,048 held-out tokens")
    parser.add_argument("--examples", type=int, default=32, help="of each task and length")
    given = parser.parse_args()
    sections = {"text": text, "tasks": tasks, "drafts": drafts, "parts": parts, "states": states}
    for name in given.only.split(","):
        with added(given.out or given.model / "figures.json") as figures:
            figures |= sections[name](given)
            print(json.dumps(figures, indent=2, sort_keys=True), flush=True)


if __name__ == "__main__":
    main()
