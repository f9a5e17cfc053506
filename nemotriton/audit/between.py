"""A model between its two paths: what is compared with what, and where that makes sense."""

from collections.abc import Callable, Mapping
from pathlib import Path

from nemotriton.audit import hf, traces
from nemotriton.audit.compare import ROUNDINGS
from nemotriton.audit.divergence import Audit, Culprit, Layer
from nemotriton.audit.walk import TWINS, Walk
from nemotriton.commandline import UsageError
from nemotriton.engine.llm import LLM
from nemotriton.kernels.op import INTERPRET

HF_ROUNDINGS = 2 * ROUNDINGS  # transformers rounds elsewhere, and as often


def find_dtype(wanted: str | None) -> str | None:
    """float32 in the interpreter, which lacks what 16-bit kernels use; UsageError for others."""
    if not INTERPRET:
        return wanted
    if wanted not in (None, "float32"):
        raise UsageError(
            f"--dtype {wanted} under TRITON_INTERPRET=1, which has no inline assembly: use float32."
        )
    return "float32"


def diverge(
    llm: LLM,
    text: str,
    against: str,
    impl: Mapping[str, str],
    tokens: int,
    decoded: int,
    random: bool,
    seen: Callable[[Layer], None] = lambda _: None,
) -> tuple[list[Layer], Culprit | None, int]:
    """(layers, the fault if any, tokens compared); `seen` is told of each layer as it is there.

    UsageError where there is nothing to compare."""
    if against.endswith(".safetensors"):
        return _traced(llm, Path(against), impl, decoded, seen)
    ids = llm.tokenizer.encode(text)[:tokens]
    if len(ids) < 2:
        raise UsageError(f"the text is {len(ids)} token long: give at least 2.")
    walk = Walk.of(llm, ids, min(decoded, len(ids) - 1))
    if against == "hf":
        directory = llm.directory
        if random or directory is None or not any(directory.glob("*.safetensors")):
            raise UsageError(
                "--against hf reads a checkpoint's files, and random weights have none: give a "
                "directory or an id, or use --against ref."
            )
        reference = hf.trace(directory, ids, llm.dtype, str(llm.device))
        audit = Audit(walk, impl, reference, HF_ROUNDINGS)
    else:
        if llm.device.type == "cpu" and not INTERPRET:
            raise UsageError(
                "--against ref on a CPU compares the twins with themselves: run it on a GPU, set "
                "TRITON_INTERPRET=1 (tiny models), or use --against hf."
            )
        audit = Audit(walk, impl, list(walk.chain(TWINS)))
    layers = audit.run(seen)
    return layers, audit.culprit(layers), len(ids)


def _traced(
    llm: LLM, path: Path, impl: Mapping[str, str], decoded: int, seen: Callable[[Layer], None]
) -> tuple[list[Layer], Culprit | None, int]:
    """The tokens of a trace, against what it holds of them."""
    config = llm.config
    trace = traces.read(path, config.layer_count, config.width)
    ids = trace["input_ids"].flatten().tolist()
    if not ids or min(ids) < 0 or max(ids) >= config.vocab:
        raise UsageError(f"{path}: its input_ids are not tokens of a vocabulary of {config.vocab}.")
    walk = Walk.of(llm, ids, min(decoded, len(ids) - 1))
    audit = Audit(walk, impl, traces.passes(walk, trace), HF_ROUNDINGS)
    layers = audit.run(seen)
    return layers, audit.culprit(layers), len(ids)
