"""Prompts through the engine: answers to stdout or a file, the rest to the console."""

import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from nemotriton.commandline import as_typed
from nemotriton.console import by_position, bytes_text
from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import RequestError
from nemotriton.generate.prompts import Work
from nemotriton.generate.reply import BAD_ENDS, View, Writer, say_end, seeded
from nemotriton.text.answers import answer, batch_answer, failure
from nemotriton.text.batch_file import BatchLine, BatchOutput
from nemotriton.text.chat import ChatPrompt

if TYPE_CHECKING:
    from nemotriton.engine.llm import LLM, RequestOutput

Prompt = list[int] | ChatPrompt
_OWN = tuple(f.name for f in fields(SamplingParams))  # what a line of a batch may state itself
_PARTS = {"draft": "drafting", "verify": "checking", "commit": "keeping"}
_SUSPICIOUS = 50  # drafts; of a working block at least every second is accepted


def run(llm: "LLM", work: Work, view: View) -> int:
    """Do the work; returns the exit code."""
    if isinstance(sys.stdout.encoding, str) and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    if work.out is not None:
        return _batch(llm, work, view)
    params = [seeded(work.params(llm.default_params, llm.tokenizer)) for _ in work.prompts]
    prompts = [work.prompt(prompt, llm.tokenizer) for prompt in work.prompts]
    if len(prompts) == 1 and not view.as_json and params[0].prompt_logprobs is None:
        code = _stream(llm, prompts[0], params[0], view)
    else:
        code = _many(llm, prompts, work.prompts, params, view)
    if view.stats:
        view.console.say(f"--- {_speed(llm)}")
        _report_drafts(llm, view)
    return code


def _stream(llm: "LLM", prompt: Prompt, params: SamplingParams, view: View) -> int:
    """One answer as it comes."""
    ids: list[int] = []
    rows: list[Any] = []
    last, writer = None, Writer(view)
    deltas = llm.stream(prompt, params)
    try:
        for last in deltas:
            ids += last.token_ids
            rows += last.logprobs or ()
            writer.write(last.text, last.thinking, last.tool_calls)
    finally:
        writer.close()
    assert last is not None, "a stream ends with a delta that says why"
    if rows:
        view.console.logprobs(ids, rows)
    return say_end(last, prompt, len(ids), writer.answered, params, llm, view, "")


def _many(
    llm: "LLM", prompts: list[Prompt], texts: list[str], params: list[SamplingParams], view: View
) -> int:
    """All answers, in the order of the prompts, when all are there; each of several behind a line
    that has its prompt."""
    with view.console.counting(len(prompts)) as count:
        outputs = llm.generate(prompts, params, on_finish=lambda _: count())
    stats = llm.stats()["drafts"]
    drafts = {"drafts": stats} if stats is not None else {}  # of the whole run
    codes = []
    given = zip(outputs, prompts, texts, params, strict=True)
    for i, (output, prompt, text, asked) in enumerate(given, 1):
        completion = output.outputs[0]
        if view.as_json:
            found = {"prompt": text} | answer(output) | drafts
            print(json.dumps(found, ensure_ascii=False), flush=True)
        else:
            if len(outputs) > 1:
                view.head(i, len(outputs), text)
            writer = Writer(view)
            writer.write(completion.text, completion.thinking or "", completion.tool_calls)
            writer.close()
            if output.prompt_logprobs is not None:
                view.console.logprobs(output.prompt_token_ids, output.prompt_logprobs)
            if completion.logprobs is not None:
                view.console.logprobs(completion.token_ids, completion.logprobs)
        name = f"answer {i}: " if len(outputs) > 1 else ""
        answered = bool(completion.text or completion.tool_calls)
        count_of = len(completion.token_ids)
        codes.append(say_end(completion, prompt, count_of, answered, asked, llm, view, name))
    return max(codes)


def _batch(llm: "LLM", work: Work, view: View) -> int:
    """Answers to a file as they end, but in the order of the requests."""
    assert work.out is not None
    with BatchOutput(work.out, work.lines) as out:
        todo = work.lines[out.done :]
        if out.done:
            view.console.line("batch", f"{out.done} of {len(work.lines)} are answered already")
        writer = _InOrder(out, todo)
        served: list[tuple[int, Prompt, SamplingParams]] = []
        for i, line in enumerate(todo):
            try:
                params = seeded(work.params(llm.default_params, llm.tokenizer, line.params))
                prompt = work.batch_prompt(line, llm.tokenizer)
                llm.engine.prepare(prompt, params)
                served.append((i, prompt, params))
            except RequestError as problem:
                writer.put(i, failure(line, as_typed(str(problem), _OWN)), failed=True)
        with view.console.counting(len(served)) as count:

            def ended(output: "RequestOutput") -> None:
                # requests are numbered as they are given, and this LLM has had no others
                i = served[int(output.request_id)][0]
                bad = output.outputs[0].finish_reason in BAD_ENDS
                writer.put(i, batch_answer(output, todo[i], llm.config.name), failed=bad)
                count()

            prompts = [prompt for _, prompt, _ in served]
            llm.generate(prompts, [p for _, _, p in served], ended)
    if view.stats:
        view.console.say(f"--- {len(todo)} answers · {_speed(llm)}")
        _report_drafts(llm, view)
    if writer.failed:
        view.console.warn(f"{writer.failed} of {len(todo)} requests failed: {work.out} says why.")
    return 1 if writer.failed else 0


class _InOrder:
    """Holds an answer back until those before it are written."""

    def __init__(self, out: BatchOutput, lines: Sequence[BatchLine]) -> None:
        self._out = out
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next = 0
        self.failed = 0

    def put(self, index: int, record: dict[str, Any], failed: bool = False) -> None:
        """The answer to the `index`-th request of this run."""
        self.failed += failed
        self._waiting[index] = record
        while self._next in self._waiting:
            self._out.append(self._waiting.pop(self._next))
            self._next += 1


def _speed(llm: "LLM") -> str:
    stats = llm.stats()
    parts = [f"{stats['output_tokens']} tokens"]
    if stats["first_token_s"] is not None:
        parts.append(f"first token {1000 * stats['first_token_s']:.0f} ms")
    if stats["tokens_per_s"] is not None:
        parts.append(f"{stats['tokens_per_s']:.1f} tok/s")
    if stats["prompt_tokens_per_s"] is not None:
        parts.append(f"prompt {stats['prompt_tokens_per_s']:.1f} tok/s")
    if stats["peak_memory"] is not None:
        parts.append(f"peak {bytes_text(stats['peak_memory'])}")
    return " · ".join(parts)


def _report_drafts(llm: "LLM", view: View) -> None:
    """Acceptance by position and where the time went, if there are drafts."""
    drafts = llm.stats()["drafts"]
    if drafts is None:
        return
    parts = [f"drafts accepted: {drafts['accepted']} of {drafts['verified']}"]
    if drafts["acceptance"]:
        parts[0] += f" ({by_position(drafts['acceptance'])})"
        parts.append(f"{drafts['tokens_per_pass']:.2f} tokens a step")
    total = sum(drafts["seconds"].values())
    if total:
        split = (f"{_PARTS[part]} {100 * s / total:.0f} %" for part, s in drafts["seconds"].items())
        parts.append(f"time: {', '.join(split)}")
    if drafts["current"] != drafts["most"]:
        now = f"{drafts['current']} a step now" if drafts["current"] else "none now: it did not pay"
        parts.append(f"drafting {now}")
    view.console.say(f"--- {' · '.join(parts)}")
    if drafts["verified"] >= _SUSPICIOUS and not drafts["accepted"]:
        view.console.warn(
            f"none of {drafts['verified']} drafts was accepted: they only cost time. Leave out "
            "--drafts, or check that the MTP block belongs to these weights."
        )
