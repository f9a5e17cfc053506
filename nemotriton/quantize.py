"""`python -m nemotriton.quantize MODEL OUT --scheme nvfp4`: a smaller copy of a bf16 checkpoint."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from nemotriton.commandline import Program, UsageError
from nemotriton.console import Console, bytes_text

app = Program()

SCHEMES = ("nvfp4", "fp8", "super-mixed")
_SCHEME_HELP = (
    "nvfp4: 4 bits, all but attention and the Mamba layer before it. fp8: experts, MLPs and Mamba "
    "projections. super-mixed: NVFP4 experts, FP8 for the rest of those."
)


@app.command()
def main(
    model: Annotated[
        str, typer.Argument(help="Directory, Hugging Face id, or preset:NAME for random weights.")
    ],
    out: Annotated[Path, typer.Argument(help="The directory to write; it must not exist.")],
    scheme: Annotated[str, typer.Option("--scheme", help=_SCHEME_HELP)],
    device: Annotated[
        str | None,
        typer.Option("--device", help="Where to compute.", show_default="a GPU if any"),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit of a Hugging Face id.")
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Only what is on this machine already.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")] = False,
) -> None:
    """Write a copy of a bf16 checkpoint with its matrices in NVFP4 or FP8."""
    if scheme not in SCHEMES:
        raise UsageError(f"--scheme {scheme}: give one of {', '.join(SCHEMES)}.")
    if out.exists():
        raise UsageError(f"{out} exists: remove it, or give another directory.")
    write(model, out, scheme, device, revision, offline, Console(quiet))


def write(
    model: str,
    out: Path,
    scheme: str,
    device: str | None,
    revision: str | None,
    offline: bool,
    console: Console,
) -> None:
    """Find the weights and write them. torch is imported here and not before."""
    from nemotriton.engine.loading import find_device
    from nemotriton.model.config import ModelConfig
    from nemotriton.model.quantizer import quantize_checkpoint
    from nemotriton.model.sources import find_checkpoint
    from nemotriton.model.synth import write_checkpoint

    where = find_device(device)
    with tempfile.TemporaryDirectory() as scratch:
        if model.startswith("preset:"):
            config = ModelConfig.preset(model.removeprefix("preset:"))
            directory = Path(scratch) / config.name
            console.line("weights", "random: what this model says will be noise")
            write_checkpoint(config, directory)
        else:
            directory = find_checkpoint(model, revision, offline)
        with console.loading() as progress:
            done = quantize_checkpoint(directory, out, scheme, where, progress)
    for note in done.notes:
        console.line("weights", note)
    counts = ", ".join(f"{count:,} {storage}" for storage, count in sorted(done.counts.items()))
    console.line("matrices", counts)
    console.line("written", f"{out}: {bytes_text(done.before)} -> {bytes_text(done.after)}")


if __name__ == "__main__":
    app(prog_name="python -m nemotriton.quantize")
