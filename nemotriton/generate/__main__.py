"""The command: options in, exit code out (see `commandline`)."""

from dataclasses import replace
from typing import Any

import typer

from nemotriton.commandline import Program
from nemotriton.console import Console
from nemotriton.generate import options as o
from nemotriton.generate.prompts import work_of
from nemotriton.generate.reply import View
from nemotriton.generate.run import run
from nemotriton.generate.shared import with_model
from nemotriton.generate.source import machine_of, source_of

app = Program()


@app.command()
@with_model
def main(
    ctx: typer.Context,
    model: o.Model = None,
    prompt: o.Prompt = None,
    file: o.File = None,
    system: o.System = None,
    chat: o.Chat = False,
    raw: o.Raw = None,
    think: o.Think = None,
    tools: o.Tools = None,
    template_arg: o.TemplateArg = None,
    batch: o.Batch = None,
    out: o.Out = None,
    max_tokens: o.MaxTokens = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    stop_token: o.StopToken = None,
    ignore_eos: o.IgnoreEos = False,
    think_budget: o.ThinkBudget = None,
    json_schema: o.JsonSchema = None,
    regex: o.Regex = None,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = None,
    frequency_penalty: o.FrequencyPenalty = None,
    logprobs: o.Logprobs = None,
    prompt_logprobs: o.PromptLogprobs = None,
    show_thinking: o.ShowThinking = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    stats: o.Stats = True,
    version: o.Version = False,
) -> None:
    """Answer prompts with a Nemotron-H model."""
    answer(ctx.params, View(Console(quiet), json, stats, show_thinking))


def answer(given: dict[str, Any], view: View) -> None:
    """Check the options, load the model and do the work. torch is imported here and not before."""
    source, machine, work = source_of(given), machine_of(given), work_of(given)
    if machine.max_requests is None and len(work.prompts) <= 1 and not work.lines:
        machine = replace(machine, max_requests=1)  # no memory, and no recorded steps, for more
    from nemotriton.generate.interactive import converse
    from nemotriton.generate.loading import opened

    with opened(source, machine, view.console) as llm:
        code = converse(llm, work, view) if work.interactive else run(llm, work, view)
    if code:
        raise typer.Exit(code)


if __name__ == "__main__":
    app(prog_name="python -m nemotriton.generate")
