"""LLM: the engine with a model in it; vLLM's names.

with LLM("owner/name", max_context=32768) as llm:
    for output in llm.generate(["..."], SamplingParams(temperature=0)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from nemotriton.engine.arguments import Impl, default_params, implementations, many
from nemotriton.engine.assembly import assemble
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.engine import Engine, Prepared, Prompt
from nemotriton.engine.graphs import find_capture
from nemotriton.engine.loading import (
    Limits,
    Progress,
    Recipe,
    Work,
    embedded_weights,
    find_device,
    place,
    random_weights,
    stored_weights,
)
from nemotriton.engine.lockstep import Lead, Stop, follow
from nemotriton.engine.meter import rate
from nemotriton.engine.outputs import CompletionOutput, Delta, Group, RequestOutput
from nemotriton.engine.precision import Dtype
from nemotriton.engine.rehearsal import rehearse
from nemotriton.engine.runner import Runner
from nemotriton.engine.sampling import Logprob, SamplingParams
from nemotriton.engine.team import open_team
from nemotriton.errors import RankError, RequestError, require
from nemotriton.kernels.fixed_order import DECODE, fixed_order
from nemotriton.kernels.op import use
from nemotriton.model.formats import ActQuant
from nemotriton.text.chat import ChatPrompt, chat_prompt
from nemotriton.text.generation_config import GenerationConfig
from nemotriton.text.tokens import load_tokenizer

__all__ = ["LLM", "CompletionOutput", "Delta", "Logprob", "RequestOutput", "SamplingParams"]

Params = SamplingParams | Sequence[SamplingParams] | None
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None


class LLM:
    """A Nemotron-H model and everything to run it.

    model: directory, Hugging Face id, None for the model inside the package, or another LLM's
    `weights`. dtype: of weights and activations. state_dtype: of recurrent states, "float32",
    "bfloat16", "float16", "float16-sr" (stochastic rounding), "int16" or "int8" (an fp32 scale a
    row); None for either is the checkpoint's. kv_dtype: "bf16" (as activations), "fp8", or "auto"
    (None): the checkpoint's. act_quant: quantise activations where the checkpoint was made for it,
    or "fp8": at its FP8 matrices, see `notes`. device: None is a GPU if there is one. max_context:
    tokens of prompt and completion; max_requests: run at the same time (None: what memory allows,
    see `plan`). prefill_piece: prompt tokens a step. memory: share of the free memory. drafts: most
    tokens that the checkpoint's MTP block guesses a step, or tree: their shape, see
    `DraftShape.parse`; adapt_drafts: fewer where they do not pay. rollback: how states forget
    rejected drafts, "lanes", "replay", or "auto" (None), see `find_rollback`. graphs: record decode
    steps as CUDA graphs; None where there is a GPU. tp, ep: tp * ep GPUs, see `model.parallel`; all
    but the first run in processes that this one, or torchrun, started; those end here. seed: for
    requests that have none. impl: "ref" or "triton" for all ops, or by op. invariant: a token's
    bits depend on its sequence alone, see `kernels.fixed_order`. progress: called with (bytes done,
    all, tensor) as weights load. recording: with (shapes done, all, what) as steps are recorded.
    For reading: config, tokenizer, directory, notes, plan, device, dtype, default_params.
    """

    def __init__(
        self,
        model: str | Path | Recipe | None = None,
        *,
        dtype: Dtype = None,
        device: str | torch.device | None = None,
        max_context: int | None = None,
        max_requests: int | None = None,
        prefill_piece: int | None = None,
        drafts: int = 0,
        tree: str | None = None,
        adapt_drafts: bool = True,
        graphs: bool | None = None,
        seed: int = 0,
        impl: Impl = None,
        invariant: bool = False,
        memory: float = 0.9,
        state_dtype: Dtype = None,
        kv_dtype: str | None = None,
        rollback: str | None = None,
        act_quant: ActQuant = False,
        revision: str | None = None,
        offline: bool = False,
        tp: int = 1,
        ep: int = 1,
        progress: Progress | None = None,
        recording: Progress | None = None,
    ) -> None:
        shape = DraftShape.wanted(drafts, tree)
        sizes = (max_context, max_requests, prefill_piece, shape, memory)
        limits = Limits(device, dtype, state_dtype, *sizes, kv_dtype, rollback, invariant)
        drafting = shape is not None
        weights = model if callable(model) else partial(embedded_weights, act_quant, drafting)
        if isinstance(model, str | Path):
            weights = partial(stored_weights, model, revision, offline, act_quant, drafting)
        work = Work(weights, limits, seed, impl, adapt_drafts, graphs, tp, ep)
        self._start(work, progress, recording)

    @classmethod
    def synthetic(
        cls,
        preset: str | Path,
        *,
        seed: int = 0,
        layers: int | None = None,
        width_scale: float | None = None,
        quant: str = "bf16",
        dtype: Dtype = None,
        device: str | torch.device | None = None,
        max_context: int | None = None,
        max_requests: int | None = None,
        prefill_piece: int | None = None,
        drafts: int = 0,
        tree: str | None = None,
        adapt_drafts: bool = True,
        graphs: bool | None = None,
        impl: Impl = None,
        invariant: bool = False,
        memory: float = 0.9,
        state_dtype: Dtype = None,
        kv_dtype: str | None = None,
        rollback: str | None = None,
        act_quant: ActQuant = False,
        tp: int = 1,
        ep: int = 1,
        progress: Progress | None = None,
        recording: Progress | None = None,
    ) -> LLM:
        """Seeded random weights of a preset (or of a directory's config.json), with no files.

        layers, width_scale: cut down, see ModelConfig.cut. quant: "bf16", "fp8", "nvfp4",
        "super-mixed", or "release" for what the preset's own release holds. The rest as in LLM.
        """
        shape = DraftShape.wanted(drafts, tree)
        sizes = (max_context, max_requests, prefill_piece, shape, memory)
        limits = Limits(device, dtype, state_dtype, *sizes, kv_dtype, rollback, invariant)
        cut = (layers, width_scale, quant, act_quant, shape is not None)
        weights = partial(random_weights, preset, seed, *cut)
        llm = cls.__new__(cls)
        work = Work(weights, limits, seed, impl, adapt_drafts, graphs, tp, ep)
        llm._start(work, progress, recording)
        return llm

    @classmethod
    def follow(cls, work: Work) -> NoReturn:
        """Be one of the other ranks of an LLM with several: repeat its steps until it is closed."""
        cls.__new__(cls)._start(work, None, None)
        raise AssertionError("this is rank 0")

    def _start(self, work: Work, progress: Progress | None, recording: Progress | None) -> None:
        """Open the model; on any rank but the first this does not return."""
        self._engine: Engine | None = None
        self._team = team = open_team(work.tp, work.ep, work.limits.device, work)
        try:
            with self._guard():
                if team is None or team.leads:
                    self._open(work, progress, recording)
                else:
                    self._open(work, None, None)
                    follow(self, team)
        except BaseException:
            if team is not None and not team.leads:
                team.leave(1)
            self.close()
            raise
        if team is not None and not team.leads:
            self._engine = None
            team.leave(0)

    def _open(self, work: Work, progress: Progress | None, recording: Progress | None) -> None:
        team, weights, limits = self._team, work.weights(), work.limits
        if team is not None:
            limits = replace(limits, device=team.device)
            team.agree(work.facts(weights))
        self._weights, self.config, self.directory = weights, weights.config, weights.directory
        self.tokenizer = load_tokenizer(weights.directory, weights.config)
        self.default_params = default_params(GenerationConfig.read(weights.directory))
        device, self.invariant = find_device(limits.device), limits.invariant
        self._impl = implementations(work.impl, device)
        capture = find_capture(work.graphs, device, self._impl.values(), team is not None)
        placed = place(weights, limits, progress, capture, team)
        self.notes = (*weights.notes, *placed.notes)
        self.plan, self.device, self.dtype = placed.plan, placed.device, placed.dtype
        self._engine = assemble(self.config, placed, limits.shape, self.tokenizer, work)
        self._engine.lead = Lead(team) if team is not None else None
        if capture is not None:
            sizes = {"requests": self.plan.max_requests, "context": self.plan.max_context}
            steps = self.runner.record(capture, **sizes)
            if team is not None:
                steps.rungs = team.share(steps.rungs)
            with self._on_device():
                steps.warm(recording)

    # ---- text ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (text, token ids or chat prompts, one or many), in their order.

        params: one for all, one each, or None for the checkpoint's defaults. on_finish is called
        with each output as it ends. RequestError, before anything runs, if any prompt or parameter
        cannot be served. If a step fails, all of these requests end and the error goes on.
        """
        prepared = self._prepare(many(prompts), params)
        groups: list[Group] = []
        try:
            for p in prepared:
                groups.append(self.engine.submit(p))
            pending = list(groups)
            while pending:
                self.step()
                ended = [g for g in pending if g.finished]
                pending = [g for g in pending if not g.finished]
                for group in ended if on_finish is not None else ():
                    on_finish(group.output())  # type: ignore[misc]
        finally:
            self._cancel(groups)
        return [g.output() for g in groups]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[Delta, None, None]:
        """Complete one prompt, a delta at a time; texts joined are the text `generate` gives.

        prompt: a conversation as well, or one from `chat_prompt`. RequestError comes at once.
        Ending the iteration early cancels the request. Streams may run side by side in one thread:
        each drives the engine for all.
        """
        given: Any = prompt
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            given = self.chat_prompt(given)
        return self._deltas(self._prepare([given], params)[0])

    def _deltas(self, prepared: Prepared) -> Generator[Delta, None, None]:
        group = self.engine.submit(prepared)
        try:
            while not group.finished:
                yield from group.take()
                self.step()
            yield from group.take()
        finally:
            self._cancel([group])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        think: bool | None = None,
        tools: Tools = None,
        template_args: Mapping[str, object] | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations (one or many) through the checkpoint's chat template.

        messages: {"role": ..., "content": ...} in order. The rest as in `chat_prompt`. A
        completion's `text` is the answer; `thinking` and `tool_calls` stand beside it.
        """
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts = [self.chat_prompt(c, think, tools, template_args) for c in conversations]
        return self.generate(prompts, params, on_finish)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        think: bool | None = None,
        tools: Tools = None,
        template_args: Mapping[str, object] | None = None,
    ) -> ChatPrompt:
        """A conversation as a prompt for `generate` and `stream`; see text.chat.chat_prompt."""
        return chat_prompt(self.tokenizer, messages, think, tools, template_args)

    def cancel(self, request_id: str) -> None:
        """End a running request before the next step, from any thread; unknown ids are ignored."""
        self.engine.cancel(request_id)

    # ---- numbers ------------------------------------------------------------------------------

    def logits(self, ids: Sequence[int] | Sequence[Sequence[int]]) -> Any:
        """float32 logits [T, V] on the CPU, of every token given the ones before it.

        A list of id lists gives a list of tensors. Row i is the distribution of token i + 1.
        """
        prompts = many(ids)
        prepared = [self.engine.prepare(p, SamplingParams(), keep_logits=True) for p in prompts]
        groups: list[Group] = []
        try:
            for p in prepared:
                groups.append(self.engine.submit(p))
            while not all(g.finished for g in groups):
                self.step()
        finally:
            self._cancel(groups)
        found = [torch.cat(g.completions[0].request.logits) for g in groups]
        return found if prompts is ids else found[0]

    def stats(self) -> dict[str, Any]:
        """Speed and memory so far: tokens, tokens a second, seconds, bytes; plain values.

        tokens_per_s counts steps without prompt tokens, prompt_tokens_per_s those with; None where
        there was none. first_token_s is the mean from submission. drafts: see `DraftMeter`; graphs:
        see `DecodeSteps.report`; None without them.
        """
        meter, on_gpu = self.engine.meter, self.device.type == "cuda"
        return {
            "requests": meter.requests,
            "steps": meter.steps,
            "invariant": self.invariant,
            "preemptions": self.engine.scheduler.preemptions,
            "prompt_tokens": meter.prompt_tokens,
            "output_tokens": meter.output_tokens,
            "prompt_tokens_per_s": rate(meter.prompt_tokens, meter.prefill_seconds),
            "tokens_per_s": rate(meter.decode_tokens, meter.decode_seconds),
            "first_token_s": rate(meter.first_token_seconds, meter.requests),
            "drafts": self._draft_stats(),
            "graphs": None if self.runner.steps is None else self.runner.steps.report(),
            "memory": self.plan.parts(),
            "peak_memory": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
        }

    def _draft_stats(self) -> dict[str, Any] | None:
        drafter, depth = self.runner.drafter, self.engine.depth
        if drafter is None or depth is None:
            return None
        return self.engine.draft_meter.report(len(drafter.shape), depth.current)

    @property
    def engine(self) -> Engine:
        """What queues and steps; RequestError after `close`."""
        if self._engine is None:
            raise RequestError("this LLM is closed: make a new one.")
        return self._engine

    @property
    def weights(self) -> Recipe:
        """For another LLM, which then has this one's model on one GPU; close this one first."""
        return partial(replace, self._weights, model=self.runner.model)

    @property
    def runner(self) -> Runner:
        """The model (`runner.model`) and its caches."""
        return self.engine.runner

    # ---- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and its caches and let other ranks go; the LLM cannot be used after."""
        engine, self._engine = self._engine, None
        try:
            if engine is not None:
                with contextlib.suppress(RankError), self._guard():
                    engine.settle()
                engine.runner.close()
        finally:
            engine = None
            if self._team is not None:
                self._team.close(Stop())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- steps --------------------------------------------------------------------------------

    def _prepare(self, prompts: Sequence[Prompt], params: Params) -> list[Prepared]:
        """Check all prompts before any is queued."""
        if params is None or isinstance(params, SamplingParams):
            each = [params or self.default_params] * len(prompts)
        else:
            each = list(params)
        require(
            len(each) == len(prompts),
            f"{len(each)} SamplingParams for {len(prompts)} prompts: give one for all or one each.",
            RequestError,
        )
        for p in each:
            is_params = isinstance(p, SamplingParams)
            require(is_params, f"params has {p!r}: give SamplingParams.", RequestError)
        return [self.engine.prepare(p, s) for p, s in zip(prompts, each, strict=True)]

    def step(self) -> None:
        """Run one step of what was submitted to `engine`, from the thread that owns it."""
        with self._on_device(), self._guard():
            self.engine.step()

    def everywhere(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(llm, *args) on every rank, between steps; what it returns on this one.

        The function must be one of a module that all ranks can import."""
        lead = self.engine.lead
        told = contextlib.nullcontext() if lead is None else lead.calling(function, *args)
        with self._on_device(), self._guard(), told:
            return function(self, *args)

    def warm_up_prompts(self, progress: Progress | None = None) -> None:
        """Run prompts of every size, so that none compiles later; see `engine.rehearsal`."""
        rehearse(self, progress)

    def check_ranks(self) -> None:
        """RankError if another rank is known to have failed or gone, also while nothing runs."""
        if self._team is not None:
            self._team.check()

    def _guard(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._team is None else self._team.guard()

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        on_gpu = self.device.type == "cuda"
        current = torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext()
        with current, use(self._impl), fixed_order(DECODE if self.invariant else None):
            yield

    def _cancel(self, groups: Sequence[Group]) -> None:
        """End what has not ended, at once; nothing is left behind by an error or an early exit."""
        engine = self._engine
        if engine is None:  # a stream that is dropped after `close`: everything has ended
            return
        for group in groups:
            if not group.finished:
                engine.cancel(group.id)
        engine.drop_cancelled()
