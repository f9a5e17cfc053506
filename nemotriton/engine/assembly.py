"""A placed model and its caches, made into an engine."""

from __future__ import annotations

from nemotriton.engine.depth import Depth
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.engine import Engine
from nemotriton.engine.loading import Placed, Work
from nemotriton.engine.pool import Pool
from nemotriton.engine.runner import Runner
from nemotriton.engine.scheduler import Scheduler
from nemotriton.model.config import LayerKind, ModelConfig
from nemotriton.text.tokens import Tokenizer


def assemble(
    config: ModelConfig, placed: Placed, shape: DraftShape | None, tokenizer: Tokenizer, work: Work
) -> Engine:
    """Runner, scheduler and engine of a model, as its plan has it. config: of the whole model."""
    plan, mamba, mtp = placed.plan, config.mamba, config.mtp
    runner = Runner(
        placed.model,
        placed.caches,
        vocab=config.vocab,
        chunk=mamba.chunk if mamba is not None and plan.slots else None,
        device=placed.device,
        shape=shape,
        stateful=mtp is not None and LayerKind.MAMBA in mtp.pattern,
    )
    return Engine(
        runner,
        Scheduler(
            pages=Pool(plan.pages, "pages") if plan.pages else None,
            slots=Pool(plan.slots, "slots") if plan.slots else None,
            page_size=runner.page_size,
            max_requests=plan.max_requests,
            prefill_piece=placed.prefill_piece,
            grain=placed.grain,
        ),
        tokenizer,
        max_context=plan.max_context,
        eos_ids=[t for t in tokenizer.eos_ids if t < config.vocab],
        seed=work.seed,
        depth=Depth(shape, work.adapt_drafts) if shape is not None else None,
    )
