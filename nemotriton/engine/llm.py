"""LLM: the engine with a model in it; vLLM's names.

with LLM("owner/name", max_context=32768) as llm:
    for output in llm.generate(["..."], SamplingParams(temperature=0)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from nemotriton.engine.depth import Depth
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.engine import Engine, Prepared, Prompt
from nemotriton.engine.graphs import find_capture
from nemotriton.engine.loading import (
    Limits,
    Progress,
    Weights,
    embedded_weights,
    find_device,
    place,
    random_weights,
    stored_weights,
)
from nemotriton.engine.meter import rate
from nemotriton.engine.outputs import CompletionOutput, Delta, Group, RequestOutput
from nemotriton.engine.pool import Pool
from nemotriton.engine.precision import Dtype
from nemotriton.engine.runner import Runner
from nemotriton.engine.sampling import Logprob, SamplingParams
from nemotriton.engine.scheduler import Scheduler
from nemotriton.errors import RequestError, require
from nemotriton.kernels.op import INTERPRET, use
from nemotriton.model.config import LayerKind
from nemotriton.text.chat import ChatPrompt, chat_prompt
from nemotriton.text.generation_config import GenerationConfig
from nemotriton.text.tokens import load_tokenizer

__all__ = ["LLM", "CompletionOutput", "Delta", "Logprob", "RequestOutput", "SamplingParams"]

Params = SamplingParams | Sequence[SamplingParams] | None
Impl = str | Mapping[str, str] | None
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None


class LLM:
    """A Nemotron-H model and everything to run it.

    model: directory, Hugging Face id, or None for the model inside the package. dtype: of weights
    and activations. state_dtype: of recurrent states, "float32", "bfloat16", "float16",
    "float16-sr" (stochastic rounding), "int16" or "int8" (an fp32 scale a row); None for either is
    the checkpoint's. kv_dtype: of keys and
    values, "bf16" (as activations), "fp8", or None or "auto" for what the checkpoint was made for.
    act_quant: quantise activations where the checkpoint was made for it, see `notes`. device: None
    is a GPU if there is one. max_context: tokens of prompt and completion; max_requests: run at the
    same time (None: what memory allows, see `plan`). prefill_piece: prompt tokens a step. memory:
    share of the free memory to plan with. drafts: most tokens that the checkpoint's MTP block
    guesses a step, or tree: their shape, see `DraftShape.parse`; adapt_drafts: fewer where they do
    not pay. rollback: how states forget rejected drafts, "lanes", "replay", or None or "auto",
    see `find_rollback`. graphs: record decode steps as CUDA graphs; None where there is a GPU.
    seed: for requests that have none. impl: "ref" or "triton" for all ops, or by op. progress:
    called with (bytes done, bytes in all, tensor) while weights load. recording: called with
    (shapes done, in all, what) while decode steps are recorded.

    For reading: config, tokenizer, directory, notes, plan, device, dtype, default_params.
    """

    def __init__(
        self,
        model: str | Path | None = None,
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
        memory: float = 0.9,
        state_dtype: Dtype = None,
        kv_dtype: str | None = None,
        rollback: str | None = None,
        act_quant: bool = False,
        revision: str | None = None,
        offline: bool = False,
        progress: Progress | None = None,
        recording: Progress | None = None,
    ) -> None:
        shape = DraftShape.wanted(drafts, tree)
        sizes = (max_context, max_requests, prefill_piece, shape, memory)
        limits = Limits(device, dtype, state_dtype, *sizes, kv_dtype, rollback)
        drafting = shape is not None
        if model is None:
            weights = embedded_weights(act_quant, drafting)
        else:
            weights = stored_weights(model, revision, offline, act_quant, drafting)
        self._start(weights, limits, seed, impl, adapt_drafts, graphs, progress, recording)

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
        memory: float = 0.9,
        state_dtype: Dtype = None,
        kv_dtype: str | None = None,
        rollback: str | None = None,
        act_quant: bool = False,
        progress: Progress | None = None,
        recording: Progress | None = None,
    ) -> LLM:
        """Seeded random weights of a preset (or of a directory's config.json), with no files.

        layers, width_scale: cut down, see ModelConfig.cut. quant: "bf16", "fp8", "nvfp4",
        "super-mixed", or "release" for what the preset's own release holds. The rest as in LLM.
        """
        shape = DraftShape.wanted(drafts, tree)
        sizes = (max_context, max_requests, prefill_piece, shape, memory)
        limits = Limits(device, dtype, state_dtype, *sizes, kv_dtype, rollback)
        drafting = shape is not None
        weights = random_weights(preset, seed, layers, width_scale, quant, act_quant, drafting)
        llm = cls.__new__(cls)
        llm._start(weights, limits, seed, impl, adapt_drafts, graphs, progress, recording)
        return llm

    def _start(
        self,
        weights: Weights,
        limits: Limits,
        seed: int,
        impl: Impl,
        adapt_drafts: bool,
        graphs: bool | None,
        progress: Progress | None,
        recording: Progress | None,
    ) -> None:
        self.config = weights.config
        self.directory = weights.directory
        self.tokenizer = load_tokenizer(weights.directory, weights.config)
        self.default_params = _default_params(GenerationConfig.read(weights.directory))
        device = find_device(limits.device)
        self._impl = _implementations(impl, device)
        capture = find_capture(graphs, device, self._impl.values())
        placed = place(weights, limits, progress, capture)
        self.notes = (*weights.notes, *placed.notes)
        self.plan, self.device, self.dtype = placed.plan, placed.device, placed.dtype
        mamba = self.config.mamba
        chunk = mamba.chunk if mamba is not None and self.plan.slots else None
        mtp, shape = self.config.mtp, limits.shape
        runner = Runner(
            placed.model,
            placed.caches,
            vocab=self.config.vocab,
            chunk=chunk,
            device=self.device,
            shape=shape,
            stateful=mtp is not None and LayerKind.MAMBA in mtp.pattern,
        )
        pages, slots = self.plan.pages, self.plan.slots
        self._engine: Engine | None = Engine(
            runner,
            Scheduler(
                pages=Pool(pages, "pages") if pages else None,
                slots=Pool(slots, "slots") if slots else None,
                page_size=runner.page_size,
                max_requests=self.plan.max_requests,
                prefill_piece=placed.prefill_piece,
            ),
            self.tokenizer,
            max_context=self.plan.max_context,
            eos_ids=[t for t in self.tokenizer.eos_ids if t < self.config.vocab],
            seed=seed,
            depth=Depth(shape, adapt_drafts) if shape is not None else None,
        )
        if capture is not None:
            sizes = {"requests": self.plan.max_requests, "context": self.plan.max_context}
            steps = runner.record(capture, **sizes)
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
        prepared = self._prepare(_many(prompts), params)
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
        prompts = _many(ids)
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
        meter = self.engine.meter
        peak = None
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        return {
            "requests": meter.requests,
            "steps": meter.steps,
            "preemptions": self.engine.scheduler.preemptions,
            "prompt_tokens": meter.prompt_tokens,
            "output_tokens": meter.output_tokens,
            "prompt_tokens_per_s": rate(meter.prompt_tokens, meter.prefill_seconds),
            "tokens_per_s": rate(meter.decode_tokens, meter.decode_seconds),
            "first_token_s": rate(meter.first_token_seconds, meter.requests),
            "drafts": self._draft_stats(),
            "graphs": None if self.runner.steps is None else self.runner.steps.report(),
            "memory": self.plan.parts(),
            "peak_memory": peak,
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
    def runner(self) -> Runner:
        """The model (`runner.model`) and its caches."""
        return self.engine.runner

    # ---- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and its caches; the LLM cannot be used after."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.settle()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        with self._on_device():
            self.engine.step()

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        on_gpu = self.device.type == "cuda"
        current = torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext()
        with current, use(self._impl):
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


def _many(prompts: Any) -> Sequence[Any]:
    """A list of prompts, whether one or many were given."""
    if isinstance(prompts, str | ChatPrompt):
        return [prompts]
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, bytes)
    kind = type(prompts).__name__
    require(is_list, f"prompts of type {kind}: give a text, token ids or a list.", RequestError)
    one = bool(prompts) and all(isinstance(p, int) for p in prompts)
    return [prompts] if one else prompts


def _default_params(checkpoint: GenerationConfig) -> SamplingParams:
    """What generation_config.json says, and our defaults for the rest."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    stated = {n: v for n in names if (v := getattr(checkpoint, n)) is not None}
    return SamplingParams(**stated)


def _implementations(impl: Impl, device: torch.device) -> Mapping[str, str]:
    """ "ref", "triton" or a mapping, as `use` takes it; UnsupportedError for what cannot be."""
    forced = {"*": impl} if isinstance(impl, str) else dict(impl or {})
    with use(forced):
        can_launch = device.type == "cuda" or INTERPRET
    require(
        can_launch or "triton" not in forced.values(),
        f"impl={impl!r} needs a GPU (or TRITON_INTERPRET=1), but the device is {device}: use "
        "impl='ref'.",
    )
    return forced
