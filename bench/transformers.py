"""`python -m bench.transformers`: a decode step at batch 1, by transformers and here, one after the
other on the same GPU.

First a gate: a small model of the same kind, written by us and read by both, in fp32: logits of a
random text and of tokens decoded with transformers' own cache must agree. Then both run the whole
model with random weights in bf16, whatever kernels transformers finds installed (`note` says which;
its fall-back is PyTorch). Its step is the difference of two calls of `generate` that differ in
their number of tokens, so the prompt does not count; ours is `bench.decode`'s.
"""

import gc
import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import decode, rows
from bench.cli import Out, application, need_gpu, run
from bench.cost import Load
from bench.models import Setup, blank, facts_here, numbers
from bench.rows import BenchError, Row
from nemotriton import LLM
from nemotriton.autotune.provenance import version
from nemotriton.errors import require
from nemotriton.model.config import ModelConfig
from nemotriton.model.synth import write_checkpoint

app = application(__doc__)
FAR = 2e-3  # of the largest logit, in fp32: other orders of sums, TF32 nowhere
OPTIONAL = ("mamba_ssm", "causal_conv1d", "kernels")
HEAD = (
    "| model | context | floor ms | ms | % of floor | transformers ms | times as fast | its ops |"
)


def settled(model: Any) -> Any:
    """With the releases' step sizes: transformers clamps them, in its prefill only."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model.eval()


def peer(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model of this configuration with the weights of its own initialisation."""
    from transformers import AutoModelForCausalLM, NemotronHConfig

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(NemotronHConfig(**config.to_json()), dtype=dtype)
    model.generation_config.eos_token_id = None
    return settled(model)


def generated(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """`count` greedy tokens behind ids [1, T], by its own cache."""
    out: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    return out[0, ids.shape[1] :]


def gate(config: ModelConfig, device: torch.device, tokens: int = 48, steps: int = 8) -> float:
    """How far logits are apart, as a share of the largest; BenchError beyond `FAR`."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_checkpoint(config, path, dtype=torch.float32)
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
        settled(theirs).generation_config.eos_token_id = None
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab, (1, tokens), generator=rng).to(device)
        whole = torch.cat([ids, generated(theirs, ids, steps)[None]], 1)
        with torch.no_grad():
            want = theirs(whole, use_cache=False).logits[0].float().cpu()
        picks = want[tokens - 1 : -1].argmax(-1)
        require(
            bool((picks == whole[0, tokens:].cpu()).all()),
            "transformers' own cache and its whole forward give different tokens",
            BenchError,
        )
        with LLM(path, dtype="float32", device=str(device), max_context=tokens + steps + 1) as llm:
            got = llm.logits(whole[0].tolist())
    far = float((got - want).abs().max() / want.abs().max())
    require(far <= FAR, f"logits of a small model are {far:.1e} of the largest apart", BenchError)
    return far


def seconds(model: Any, context: int, vocab: int, count: int) -> list[float]:
    """Seconds of a step at batch 1, three times."""
    ids = torch.randint(vocab // 2, vocab, (1, context), device=model.device)

    def timed(n: int) -> float:
        start = time.perf_counter()
        generated(model, ids, n).tolist()
        return time.perf_counter() - start

    timed(2)
    return sorted((timed(2 + count) - timed(2)) / count for _ in range(3))


def installed() -> str:
    """Which packages with faster ops transformers can use here."""
    found = [name for name in OPTIONAL if importlib.util.find_spec(name) is not None]
    return ", ".join(found) or "PyTorch alone"


def line(mine: Row, theirs: Row) -> str:
    return (
        f"| {mine['case']['model']} | {mine['case']['context']:,} | {mine['floor_us'] / 1e3:.3f} | "
        f"{mine['us'] / 1e3:.3f} | {mine['roofline_pct']:.0f} | {theirs['us'] / 1e3:.1f} | "
        f"{theirs['us'] / mine['us']:.1f} | {theirs['note']} |"
    )


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Presets, with commas.")] = "nano-30b,h-8b",
    context: Annotated[str, typer.Option(help="Tokens behind the step.")] = "1024",
    layers: Annotated[int | None, typer.Option(help="Only so many layers.")] = None,
    count: Annotated[int, typer.Option("--steps", help="Steps behind each number.")] = 16,
    out: Out = None,
) -> None:
    """Both, and how many times as fast a step is here."""
    need_gpu()
    where = torch.device("cuda", 0)
    facts = facts_here()
    lines = [HEAD, "|" + "--:|" * HEAD.count(" |")]
    for name in model.split(","):
        config = ModelConfig.preset(name)
        far = gate(config.cut(8, 0.125), where)
        command = f"python -m bench.transformers --model {name} --context {context}"
        setup, loads = Setup(name, layers=layers), [Load(1, n) for n in numbers(context)]
        mine = list(decode.measure(setup, loads, 0, facts, 2 * count, True, command))
        gc.collect()
        torch.cuda.empty_cache()
        theirs = peer(config.cut(layers), where, torch.bfloat16)
        for row, load in zip(mine, loads, strict=True):
            times = [1e6 * s for s in seconds(theirs, load.context, config.vocab, count)]
            case = {k: v for k, v in row["case"].items() if k not in ("dtype", "model", "quant")}
            other = blank("decode", config.name, "bf16", 1, command, **case)
            other |= rows.environment(facts)
            other |= {"provider": "transformers", "provider_version": version("transformers")}
            other |= {"us": round(times[1], 1), "p20": round(times[0], 1)}
            other |= {"p80": round(times[2], 1), "note": f"{installed()}; gate {far:.1e}"}
            for r in (row, other):
                rows.append(r, out)
            lines.append(line(row, other))
        del theirs
        gc.collect()
        torch.cuda.empty_cache()
    print("\n".join(lines))


if __name__ == "__main__":
    run(app)
