"""The command line's options, in the order and groups of `--help`. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nemotriton import __version__
from nemotriton.engine.sampling import SamplingParams
from nemotriton.model.layer_config import STATE_DTYPES

DEFAULTS = SamplingParams()


def _option(group: str, *names: str, help: str, default: str = "") -> Any:
    shown = default or False
    return typer.Option(*names, help=help, rich_help_panel=group, show_default=shown)


def _sampling(name: str, help: str) -> Any:
    """An option of SamplingParams that a checkpoint may have its own value for."""
    default = f"the checkpoint's, else {getattr(DEFAULTS, name):g}"
    return _option("Sampling", "--" + name.replace("_", "-"), help=help, default=default)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"nemotriton {__version__}")
        raise typer.Exit


Model = Annotated[
    str | None,
    typer.Argument(
        help="Directory, Hugging Face id, preset:tiny, or preset:NAME with --synthetic.",
        show_default="the embedded model, as preset:tiny",
    ),
]

_INPUT = "Input (a prompt, a file, a batch, or text piped in)"
Prompt = Annotated[
    list[str] | None,
    _option(_INPUT, "--prompt", "-p", help="May be repeated (-q: no heads); - reads stdin."),
]
File = Annotated[
    list[Path] | None,
    _option(_INPUT, "--file", "-f", help="A prompt, less one final newline; may be repeated."),
]
System = Annotated[
    str | None, _option(_INPUT, "--system", "-s", help="System prompt, for a chat template.")
]
Chat = Annotated[
    bool,
    _option(_INPUT, "--chat", "-i", help="Talk: a line is a turn. /help there lists commands."),
]
Raw = Annotated[
    bool | None,
    _option(
        *(_INPUT, "--raw/--no-raw"),
        help="Plain completion, no chat template.",
        default="--no-raw where there is a template; --raw for the embedded model",
    ),
]
Think = Annotated[
    bool | None,
    _option(
        *(_INPUT, "--think/--no-think"),
        help="Think before the answer.",
        default="--think where the template can",
    ),
]
Tools = Annotated[
    Path | None,
    _option(_INPUT, "--tools", help="Functions that may be called: a JSON list, OpenAI's format."),
]
TemplateArg = Annotated[
    list[str] | None,
    _option(_INPUT, "--template-arg", help="NAME=VALUE for the chat template; may be repeated."),
]
Batch = Annotated[
    Path | None,
    _option(_INPUT, "--batch", help='JSON lines: {"prompt": ...} or OpenAI batch requests.'),
]
Out = Annotated[
    Path | None,
    _option(_INPUT, "--out", help="Answers to --batch, in its order; a broken-off one goes on."),
]

_SAMPLING = "Sampling"
MaxTokens = Annotated[
    int | None,
    _option(
        *(_SAMPLING, "--max-tokens", "-n"),
        help="Most tokens of an answer.",
        default=str(DEFAULTS.max_tokens),
    ),
]
Temperature = Annotated[float | None, _sampling("temperature", "0 takes the likeliest token.")]
TopP = Annotated[float | None, _sampling("top_p", "Keep the fewest tokens of this probability.")]
TopK = Annotated[int | None, _sampling("top_k", "Keep this many likeliest tokens; 0 keeps all.")]
MinP = Annotated[float | None, _sampling("min_p", "Keep tokens of this share of the likeliest.")]
Seed = Annotated[
    int | None,
    _option(
        *(_SAMPLING, "--seed"),
        help="Same seed, same answer, whatever runs beside it.",
        default="another each time",
    ),
]
Stop = Annotated[
    list[str] | None, _option(_SAMPLING, "--stop", help="End before this text; may be repeated.")
]
StopToken = Annotated[
    list[str] | None,
    _option(_SAMPLING, "--stop-token", help="End at this token, id or text; may be repeated."),
]
IgnoreEos = Annotated[
    bool, _option(_SAMPLING, "--ignore-eos", help="Go on after the model's own end token.")
]
ThinkBudget = Annotated[
    int | None, _option(_SAMPLING, "--think-budget", help="Most tokens of a thought.")
]
JsonSchema = Annotated[
    str | None,
    _option(_SAMPLING, "--json-schema", help="The answer matches this schema: a file, or {...}."),
]
Regex = Annotated[
    str | None, _option(_SAMPLING, "--regex", help="The answer matches this expression, all of it.")
]
RepetitionPenalty = Annotated[
    float | None, _sampling("repetition_penalty", "Against tokens seen at all, by a factor.")
]
PresencePenalty = Annotated[
    float | None,
    _option(_SAMPLING, "--presence-penalty", help="Against tokens answered, once.", default="0"),
]
FrequencyPenalty = Annotated[
    float | None,
    _option(_SAMPLING, "--frequency-penalty", help="The same, for each time.", default="0"),
]

_OUTPUT = "Output (the answer on stdout, all else on stderr)"
Logprobs = Annotated[
    int | None,
    _option(_OUTPUT, "--logprobs", help="Logprobs of the answer's tokens and of N likeliest."),
]
PromptLogprobs = Annotated[
    int | None, _option(_OUTPUT, "--prompt-logprobs", help="The same for the prompt's tokens.")
]
ShowThinking = Annotated[
    bool | None,
    _option(
        *(_OUTPUT, "--show-thinking/--hide-thinking"),
        help="Thoughts, on stderr.",
        default="shown on a terminal",
    ),
]
Json = Annotated[bool, _option(_OUTPUT, "--json", help="One JSON object an answer.")]
Quiet = Annotated[bool, _option(_OUTPUT, "--quiet", "-q", help="Only warnings and errors.")]
Stats = Annotated[
    bool, _option(_OUTPUT, "--stats/--no-stats", help="Speed and memory.", default="--stats")
]
Version = Annotated[
    bool,
    typer.Option(
        "--version",
        callback=_version,
        is_eager=True,
        help="Print the version.",
        rich_help_panel=_OUTPUT,
        show_default=False,
    ),
]

_WEIGHTS = "Weights"
Synthetic = Annotated[
    int | None,
    _option(_WEIGHTS, "--synthetic", help="Random weights, from an optional seed.", default="0"),
]
Layers = Annotated[
    int | None, _option(_WEIGHTS, "--layers", help="Only so many layers (with --synthetic).")
]
WidthScale = Annotated[
    float | None,
    _option(_WEIGHTS, "--width-scale", help="Sizes times this (with --synthetic)."),
]
Quant = Annotated[
    str | None,
    _option(
        *(_WEIGHTS, "--quant"),
        help="Formats of random weights: bf16, fp8, nvfp4, super-mixed, or release.",
        default="bf16",
    ),
]
Dtype = Annotated[
    str | None,
    _option(_WEIGHTS, "--dtype", help="bfloat16, float16, float32.", default="the checkpoint's"),
]
Revision = Annotated[
    str | None, _option(_WEIGHTS, "--revision", help="Branch, tag or commit of a Hugging Face id.")
]
Offline = Annotated[
    bool, _option(_WEIGHTS, "--offline", help="Only what is on this machine already.")
]

_MACHINE = "Machine"
Device = Annotated[
    str | None, _option(_MACHINE, "--device", help="cuda, cuda:1, cpu.", default="a GPU if any")
]
Memory = Annotated[
    float, _option(_MACHINE, "--memory", help="Share of the free memory to use.", default="0.9")
]
MaxContext = Annotated[
    int | None,
    _option(_MACHINE, "--max-context", help="Longest prompt and answer.", default="the model's"),
]
MaxRequests = Annotated[
    int | None, _option(_MACHINE, "--max-requests", help="Most requests at once.")
]
PrefillPiece = Annotated[
    int | None, _option(_MACHINE, "--prefill-piece", help="Most prompt tokens a step.")
]
StateDtype = Annotated[
    str | None,
    _option(
        _MACHINE, "--state-dtype", help="Recurrent states: auto, " + ", ".join(STATE_DTYPES) + "."
    ),
]
KvDtype = Annotated[
    str | None,
    _option(
        *(_MACHINE, "--kv-dtype"),
        help="Keys and values: auto, bf16 (as activations), fp8.",
        default="auto",
    ),
]
ActQuant = Annotated[
    bool,
    _option(
        *(_MACHINE, "--act-quant"),
        help="Quantise activations as the checkpoint was made for: w8a8, w4a4 (emulated, but on "
        "Blackwell).",
    ),
]
ActQuantFp8 = Annotated[
    bool,
    _option(
        *(_MACHINE, "--act-quant-fp8"),
        help="Quantise activations in front of FP8 matrices alone (w8a8): faster prompts.",
    ),
]
Impl = Annotated[
    list[str] | None,
    _option(_MACHINE, "--impl", help="triton, ref, or OP=ref, OP=triton; may be repeated."),
]
Drafts = Annotated[
    int,
    _option(
        *(_MACHINE, "--drafts"),
        help="Most tokens guessed a step, by the checkpoint's MTP block: speed, not other words.",
        default="0",
    ),
]
Tree = Annotated[
    str | None,
    _option(_MACHINE, "--tree", help="Alternatives: for each draft the one it follows, as 0,0,1."),
]
AdaptDrafts = Annotated[
    bool,
    _option(
        *(_MACHINE, "--adapt-drafts/--no-adapt-drafts"),
        help="Draft less where it does not pay.",
        default="--adapt-drafts",
    ),
]
Graphs = Annotated[
    bool | None,
    _option(
        *(_MACHINE, "--graphs/--no-graphs"),
        help="Record decode steps as CUDA graphs: a slower start, then much less work for the CPU.",
        default="--graphs on a GPU",
    ),
]
Invariant = Annotated[
    bool,
    _option(
        *(_MACHINE, "--invariant"),
        help="The same bits whatever runs beside a request and however its work is cut; slower.",
    ),
]
Rollback = Annotated[
    str | None,
    _option(
        *(_MACHINE, "--rollback"),
        help="How states forget rejected drafts: auto, lanes (a state each), replay (a ring).",
        default="auto",
    ),
]
Tp = Annotated[
    int,
    _option(
        *(_MACHINE, "--tp"),
        help="GPUs that share every layer; started here, or by torchrun.",
        default="1",
    ),
]
Ep = Annotated[
    int,
    _option(
        *(_MACHINE, "--ep"),
        help="The same, but routed experts stay whole, so many groups of them: tp * ep GPUs.",
        default="1",
    ),
]
