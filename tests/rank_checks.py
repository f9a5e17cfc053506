"""What the ranks of one process group compute for tests/test_parallel.py, all of them in step.

Every function runs on all ranks through `LLM.everywhere`; what rank 0 returns is looked at."""

import torch

from nemotriton.engine.llm import LLM
from nemotriton.engine.pool import Pool
from nemotriton.engine.team import Team
from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import expected
from nemotriton.model.nemotron_h import NemotronH
from nemotriton.model.parallel import ONE, Shard
from nemotriton.model.release_schemes import release_scheme
from nemotriton.model.synth import fill
from tests import harness

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64, "vocab_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4,
    "ssm_state_size": 16, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "moe_intermediate_size": 64, "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "chunk_size": 16,
}  # fmt: skip


def config_of(pattern: str, **changed: object) -> ModelConfig:
    """A small model whose every size can be cut for four ranks."""
    data = ModelConfig.preset("tiny").to_json()
    data |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    return ModelConfig.from_json(data | SIZES | changed, name="small")


def made(config: ModelConfig, quant: str, act_quant: bool, shard: Shard) -> NemotronH:
    """The part of a synthetic model that a rank holds."""
    scheme = release_scheme(config, quant)
    local = shard.local(config)
    mtp = config.mtp is not None
    model = NemotronH(local, torch.float32, CPU, scheme, act_quant, mtp, shard)
    wanted = expected(config, scheme)
    kept = shard.parts(config, wanted)
    parts = {name: (wanted[name].shape, part) for name, part in kept.items()}
    fill(config, model.named_tensors(), 0, parts=parts)
    model.prepare()
    return model


def team_of(llm: LLM) -> Team:
    assert llm._team is not None
    return llm._team


def distance(
    llm: LLM, pattern: str, quant: str, act_quant: bool, changed: dict[str, object]
) -> tuple[float, float]:
    """How far logits of a prompt in pieces and of steps behind it are from one process's, and the
    largest of these."""
    config = config_of(pattern, **changed)
    ids = torch.randint(0, config.vocab, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    pieces = [17, 19, -1, -3, -1]
    model = made(config, quant, act_quant, team_of(llm).shard)
    ours, _ = harness.run(model, ids, pieces)
    if not team_of(llm).leads:
        return 0.0, 0.0
    theirs, _ = harness.run(made(config, quant, act_quant, ONE), ids, pieces)
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


def set_pages(llm: LLM, count: int) -> None:
    """So many pages on every rank."""
    llm.engine.scheduler.pages = Pool(count, "pages")


def disagree(llm: LLM) -> None:
    """The last rank has read another file."""
    team = team_of(llm)
    last = team.shard.rank == team.shard.ranks - 1
    team.agree({"the program": 1, "the mark of the weights": "b" if last else "a"})
