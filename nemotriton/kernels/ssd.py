"""Chunked state-space scan of prefill (SSD; Dao & Gu 2024, "Transformers are SSMs", section 6).

Within a chunk of Q tokens, with a_i = dt_i A, s_i = a_1 + .. + a_i and h the state before it:

    y_i = sum_{j <= i} (C_i . B_j) exp(s_i - s_j) dt_j x_j  +  exp(s_i) h C_i  +  D x_i
    h'  = exp(s_Q) h + sum_j exp(s_Q - s_j) dt_j x_j B_j^T

which equals the token-by-token recurrence for every cut into chunks, up to rounding. No exponent
is above zero. dt = clamp(softplus(dt + dt_bias), dt_limit); A < 0 and D are one scalar a head.

x [T, H, P], dt [T, H], B, C [T, G, N] may be slices of a wider row; sequences are packed behind
each other (`cu`), and the `chunks` table (sequence, first token, tokens) never straddles two of
them. The state [slots, H, P, N] is read unless the piece is fresh, and the final one is written
over it, in its own format (`ssm_state.py`); everything between is fp32. The five published
kernels (`ssd_prefill_chunked`) are in `ssd_chunk.py`; `ssd_fused.py` has `ssd_prefill`.
"""

from collections.abc import Sequence

import torch
from einops import einsum, repeat

from nemotriton.errors import require
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    KernelSpec,
    Tile,
    acc_dtype,
    next_pow2,
    op,
)
from nemotriton.kernels.ssd_chunk import (
    _chunk_scan,
    _chunk_scores,
    _chunk_states,
    _chunk_steps,
    _pass_states,
    chunk_scan,
    chunk_scores,
    chunk_states,
    chunk_steps,
    pass_states,
)
from nemotriton.kernels.ssm_state import (
    StateNoise,
    check_state,
    drawn_ref,
    read_state_ref,
    round_state_ref,
    write_state_ref,
)
from nemotriton.kernels.ssm_update import check_rows, ssm_step_ref, time_step_ref


def chunk_table(
    lengths: Sequence[int], chunk: int, done: Sequence[int] | None = None
) -> list[tuple[int, int, int]]:
    """Rows (sequence, first token, tokens) that cut packed pieces into chunks of `chunk` tokens.

    lengths: new tokens of each sequence, zero allowed. done: tokens each sequence has already
    behind it; then borders lie at multiples of `chunk` from the sequence's own start, so the first
    chunk of a piece may be short. Without it the grid begins with the piece."""
    require(chunk > 0, f"a chunk must have at least one token, not {chunk}")
    rows, start = [], 0
    for s, length in enumerate(lengths):
        first, end = start, start + length
        size = chunk - (done[s] % chunk if done is not None else 0)
        while first < end:
            rows.append((s, first, min(size, end - first)))
            first, size = first + rows[-1][2], chunk
        start = end
    return rows


def ssd_chunk_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    h: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk in h's dtype: x [*, Q, H, P], dt [*, Q, H] (step sizes), B, C [*, Q, G, N],
    h [*, H, P, N] -> (y [*, Q, H, P], the next h)."""
    f, Q, per_group = h.dtype, x.shape[-3], x.shape[-2] // B.shape[-2]
    B, C = (repeat(v.to(f), "... q g n -> ... q (g r) n", r=per_group) for v in (B, C))
    x, dt, A, D = x.to(f), dt.to(f), A.to(f), D.to(f)
    s = (dt * A).cumsum(-2)  # [*, Q, H]
    causal = torch.ones(Q, Q, dtype=torch.bool, device=x.device).tril()[..., None]
    gap = s[..., :, None, :] - s[..., None, :, :]  # [*, i, j, H]
    decay = gap.masked_fill(~causal, -torch.inf).clamp(max=0).exp()
    scores = einsum(C, B, "... i h n, ... j h n -> ... i j h") * decay * dt[..., None, :, :]
    y = einsum(scores, x, "... i j h, ... j h p -> ... i h p") + D[:, None] * x
    y = y + einsum(C, h, "... i h n, ... h p n -> ... i h p") * s.exp()[..., None]
    kept = (s[..., -1:, :] - s).clamp(max=0).exp() * dt  # what is left of each token at the end
    h = h * s[..., -1, :, None, None].exp()
    return y, h + einsum(kept[..., None] * x, B, "... j h p, ... j h n -> ... h p n")


def ssd_scan_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial: torch.Tensor | None = None,
    chunk_size: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan of one sequence, pure and differentiable: x [*, T, H, P], dt [*, T, H] step sizes
    from `time_step_ref`, B, C [*, T, G, N], initial [*, H, P, N] (zeros if None)
    -> (y in x's dtype, the final state in fp32, or fp64 from fp64)."""
    *batch, T, H, P = x.shape
    zeros = torch.zeros(*batch, H, P, B.shape[-1], dtype=acc_dtype(x), device=x.device)
    h = zeros if initial is None else initial.to(acc_dtype(x))
    out = []
    for first in range(0, T, chunk_size):
        q = slice(first, first + chunk_size)
        parts = (x[..., q, :, :], dt[..., q, :], A, B[..., q, :, :], C[..., q, :, :], D)
        y, h = ssd_chunk_ref(*parts, h)
        out.append(y)
    return (torch.cat(out, -3) if out else x).to(x.dtype), h


def recurrence_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial: torch.Tensor,
    cu: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the scan means, token by token: the oracle when given doubles.

    One sequence: x [T, H, P], dt [T, H] step sizes, B, C [T, G, N], initial [H, P, N]. Packed
    sequences: cu [S+1] and initial [S, H, P, N]. Returns (y, final) in x's and fp32 (fp64)."""
    f, y, final = acc_dtype(x), torch.empty_like(x), []
    starts = [0, x.shape[0]] if cu is None else cu.tolist()
    for s, h in enumerate((initial[None] if cu is None else initial).to(f)):
        for t in range(starts[s], starts[s + 1]):
            y[t], h = ssm_step_ref(h, x[t], dt[t], A, B[t], C[t], D)
        final.append(h)
    return y, final[0] if cu is None else torch.stack(final)


def ssd_prefill_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    fresh: torch.Tensor,
    chunks: torch.Tensor,
    chunk_size: int,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    scales: torch.Tensor | None = None,
    noise: StateNoise | None = None,
) -> torch.Tensor:
    """Twin of `ssd_prefill`: chunk by chunk, each sequence's state carried in fp32."""
    dt, y = time_step_ref(dt, dt_bias, dt_limit), torch.zeros_like(x)
    slot_of, is_fresh, starts = slots.tolist(), fresh.tolist(), cu.tolist()
    h: dict[int, torch.Tensor] = {}
    for s, slot in enumerate(slot_of):
        if slot >= 0 and (is_fresh[s] or starts[s] < starts[s + 1]):
            stored = read_state_ref(state, scales, slot, acc_dtype(x))
            h[s] = torch.zeros_like(stored) if is_fresh[s] else stored
    for s, first, tokens in chunks.tolist():
        if s in h:
            q = slice(first, first + tokens)
            out, h[s] = ssd_chunk_ref(x[q], dt[q], A, B[q], C[q], D, h[s])
            y[q] = out.to(y.dtype)
    for s, final in h.items():
        kept = round_state_ref(final, state.dtype, drawn_ref(noise, s, -1, final))
        write_state_ref(*kept, state, scales, slot_of[s])
    return y


ssd_prefill_chunked_ref = ssd_prefill_ref  # one meaning, two sets of kernels


# --------------------------------------------------------------------------------------------- op
@op(ref=ssd_prefill_ref)
def ssd_prefill_chunked(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    fresh: torch.Tensor,
    chunks: torch.Tensor,
    chunk_size: int,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    scales: torch.Tensor | None = None,
    noise: StateNoise | None = None,
) -> torch.Tensor:
    """Scan packed pieces of prompts; returns y [T, H, P] in x's dtype, final states in place.

    x [T, H, P], dt [T, H], B, C [T, G, N]; `cu` int32 [S+1] token starts; `slots` int32 [S], -1 a
    pad, whose y is zeros; `fresh` bool [S]: the slot's contents are ignored, the state begins at
    zero (also of an empty piece, while an empty piece that is not fresh leaves it alone). `chunks`
    int32 [n, 3] as made by `chunk_table`: it must hold every token once, in order, in chunks of at
    most chunk_size tokens; this is not checked. scales fp32 [slots, H, P]: of int16 and int8
    states. noise: for fp16 states with stochastic rounding, at the position of the last token."""
    H, P = x.shape[1:]
    G, N = check_rows(x, dt, B, C, state)
    check_state(state, scales, noise, slots.shape[0])
    tile = _bearable(
        SSD_PREFILL_CHUNKED.tile(x.shape[0], x, H=H, P=P, N=N, G=G, Q=chunk_size), x.dtype
    )
    steps, sums, spans = chunk_steps(dt, A, dt_bias, dt_limit, chunks, slots, chunk_size)
    scores = chunk_scores(B, C, chunks, chunk_size, tile)
    states = chunk_states(x, B, steps, sums, chunks, chunk_size, tile)
    pass_states(states, state, sums, spans, cu, slots, fresh, chunks, scales, noise)
    return chunk_scan(x, C, D, steps, sums, scores, states, chunks, slots, tile)


def _bearable(tile: Tile, dtype: torch.dtype) -> Tile:
    """The tile, cut down to what products of operands other than bf16 bear.

    tf32 operands are made in registers, and overlapped steps would race over them on Hopper; full
    fp32 products are unrolled multiply-adds, which spill by the kilobyte where a step is long."""
    if dtype == torch.bfloat16:
        return tile
    if dtype != torch.float32:
        return tile.but(num_stages=1)
    return tile.but(num_stages=1, BLOCK_K=16, BLOCK_N=16)


def _lengths(T: int) -> list[int]:
    """T tokens as an odd lot: uneven, empty and one-token pieces, the last a pad."""
    half, pad = T // 2, T // 8
    one = min(1, T - half - pad)
    return [half, 0, one, T - half - one - pad, 0, pad]


def make_ssd_prefill(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    """The state has x's dtype, so that its error is held against that dtype's rounding."""
    H, P, N, G = case.H, case.P, case.N, case.G
    lengths, fresh = _lengths(T), [False, True, True, False, False, False]
    S = len(lengths)
    slots = torch.randperm(S + 2, generator=rng, device=dev)[:S].int()
    slots[-1] = -1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=dev)

    state = torch.full((S + 2, H, P, N), float("nan"), device=dev, dtype=dtype)
    for s in (0, 3, 4):  # those that continue; a fresh one's slot stays NaN
        state[slots[s : s + 1].long()] = normal(1, H, P, N).to(dtype)
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.tensor(chunk_table(lengths, case.Q), dtype=torch.int32).reshape(-1, 3)
    return {
        "x": normal(T, H, P).to(dtype),
        "dt": normal(T, H).to(dtype),
        "A": -1 - 15 * torch.rand(H, generator=rng, device=dev),
        "B": normal(T, G, N).to(dtype),
        "C": normal(T, G, N).to(dtype),
        "D": normal(H),
        "dt_bias": normal(H) - 4,
        "state": state,
        "cu": cu.to(dev),
        "slots": slots,
        "fresh": torch.tensor(fresh, device=dev),
        "chunks": table.to(dev),
        "chunk_size": case.Q,
    }


def _default_tile(case: Case, tokens: int) -> Tile:
    width = block_edge(case.P, 128)
    return Tile(
        BLOCK_M=block_edge(case.Q, 64),
        BLOCK_K=block_edge(case.Q, 64),
        BLOCK_P=width,
        BLOCK_N=block_edge(case.N, 64),
        num_warps=4 if width <= 64 else 8,
        num_stages=2,
    )


def block_edge(size: int, most: int) -> int:
    """A block edge for `size`: at least the 16 a matrix product needs."""
    return max(16, min(most, next_pow2(size)))


def _tiles(case: Case) -> list[Tile]:
    width = block_edge(case.P, 128)
    edges = [(64, 64), (128, 64), (64, 128), (128, 128), (64, 32)]
    return [
        Tile(
            BLOCK_M=block_edge(case.Q, m),
            BLOCK_K=block_edge(case.Q, k),
            BLOCK_P=width,
            BLOCK_N=block_edge(case.N, n),
            num_warps=w,
            num_stages=stages,
        )
        for m, k in edges
        for n in (64, 128)
        for w in (4, 8)
        for stages in (1, 2, 3)
        if m + k + n < 256 or stages < 3  # shared memory
        if w == 8 or block_edge(case.Q, m) * width <= 64 * 64  # registers
    ]


def _cases(config: object) -> list[Case]:
    m = getattr(config, "mamba", None)
    return [Case(H=m.heads, P=m.head_dim, N=m.state, G=m.groups, Q=m.chunk)] if m else []


def _cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    """One fresh-to-final sequence: scores, their product with x, states in and out."""
    inner, groups = case.H * case.P, case.G * case.N
    flops = 2 * T * (case.Q * (groups + inner) + 2 * inner * case.N)
    rows = T * (2 * inner + 2 * groups + case.H)
    return Cost(flops, (rows + 2 * inner * case.N) * dtype.itemsize)


SSD_PREFILL_CHUNKED = KernelSpec(
    terms=lambda case: case.Q + case.N,
    op=ssd_prefill_chunked,
    kernels=(_chunk_steps, _chunk_scores, _chunk_states, _pass_states, _chunk_scan),
    cases=_cases,
    small=[
        Case(H=4, P=16, N=16, G=2, Q=8),
        Case(H=3, P=5, N=40, G=1, Q=12),
        Case(H=2, P=24, N=20, G=2, Q=96),
    ],
    tokens=(128, 512, 2048, 8192, 32768, 131072),
    make=make_ssd_prefill,
    tiles=_tiles,
    default=_default_tile,
    cost=_cost,
    small_tokens=(0, 1, 3, 50),
    mutates=("state",),
    per_token=("x", "dt", "B", "C"),
    strided=("x", "dt", "B", "C"),
)
