"""Chunked state-space scan of prefill (SSD; Dao & Gu 2024, "Transformers are SSMs", section 6).

Within a chunk of Q tokens, with a_i = dt_i A, s_i = a_1 + .. + a_i and h the state before it:

    y_i = sum_{j <= i} (C_i . B_j) exp(s_i - s_j) dt_j x_j  +  exp(s_i) h C_i  +  D x_i
    h'  = exp(s_Q) h + sum_j exp(s_Q - s_j) dt_j x_j B_j^T

which equals the token-by-token recurrence for every cut into chunks, up to rounding. No exponent
is above zero. dt = clamp(softplus(dt + dt_bias), dt_limit); A < 0 and D are one scalar a head.

x [T, H, P], dt [T, H], B, C [T, G, N] may be slices of a wider row; sequences are packed behind
each other (`cu`), and the `chunks` table (sequence, first token, tokens) never straddles two of
them. The state [slots, H, P, N] is read unless the piece is fresh, and the final one is written
over it, in its own dtype; everything between is fp32.
"""

from collections.abc import Sequence

import torch
from einops import einsum, repeat

from nemotriton.errors import UnsupportedError, require
from nemotriton.kernels.op import acc_dtype, op
from nemotriton.kernels.ssm_update import ssm_step_ref, time_step_ref


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
) -> torch.Tensor:
    """Twin of `ssd_prefill`: chunk by chunk, each sequence's state carried in fp32."""
    dt, y = time_step_ref(dt, dt_bias, dt_limit), torch.zeros_like(x)
    slot_of, is_fresh, starts = slots.tolist(), fresh.tolist(), cu.tolist()
    h: dict[int, torch.Tensor] = {}
    for s, slot in enumerate(slot_of):
        if slot >= 0 and (is_fresh[s] or starts[s] < starts[s + 1]):
            stored = state[slot].to(acc_dtype(x))
            h[s] = torch.zeros_like(stored) if is_fresh[s] else stored
    for s, first, tokens in chunks.tolist():
        if s in h:
            q = slice(first, first + tokens)
            out, h[s] = ssd_chunk_ref(x[q], dt[q], A, B[q], C[q], D, h[s])
            y[q] = out.to(y.dtype)
    for s, final in h.items():
        state[slot_of[s]] = final.to(state.dtype)
    return y


@op(ref=ssd_prefill_ref)
def ssd_prefill(
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
) -> torch.Tensor:
    """Scan packed pieces of prompts; returns y [T, H, P] in x's dtype."""
    raise UnsupportedError("ssd_prefill has no kernel yet; use(ssd_prefill='ref')")
