"""Logits to tokens: penalties, forbidden tokens, the pick, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemotriton.engine.sampling import Logprob
from nemotriton.kernels import sample_tokens, token_logprobs

if TYPE_CHECKING:
    from nemotriton.engine.request import Request


class TokenCounts:
    """What the penalties of one request need: its prompt's tokens, and counts of its output's.

    prompt: bool [V]. output: int32 [V], brought up to date from the request's own list.
    """

    def __init__(self, request: Request, vocab: int, device: torch.device | str) -> None:
        self.prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.prompt[torch.tensor(request.prompt, device=device)] = True
        self.output = torch.zeros(vocab, dtype=torch.int32, device=device)
        self._seen = 0

    def update(self, request: Request) -> None:
        """Count the output tokens that came since the last call."""
        new = request.output[self._seen :]
        self._seen += len(new)
        if new:
            index = torch.tensor(new, device=self.output.device)
            self.output.index_add_(0, index, torch.ones_like(index, dtype=torch.int32))


class Sampler:
    """Picks one token a row, each request by its own rules; rows never influence each other."""

    def __init__(self, vocab: int, device: torch.device | str) -> None:
        self.vocab = vocab
        self.device = device
        self._counts: dict[str, TokenCounts] = {}

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        self._counts.pop(request.id, None)

    def pick(
        self, logits: Tensor, requests: Sequence[Request], drafts: Sequence[Tensor] = ()
    ) -> Tensor:
        """Ids int64 [R] for float32 logits [R, V], row i for requests[i]; -1 for a broken row.

        drafts[i], int64 [n] on the device: tokens that stand between the last one of requests[i]
        and row i; none at all: on no row. A row is broken where its largest logit is NaN or
        infinite: the model, not the request's neighbours, is at fault, and only that request has to
        end.
        """
        ahead = [d.shape[0] for d in drafts] or [0] * len(requests)
        adjusted = self._adjust(logits, requests, drafts, ahead)
        return choose(logits, adjusted, *self._rules(requests, ahead))

    def _rules(self, requests: Sequence[Request], ahead: Sequence[int]) -> tuple[Tensor, ...]:
        """The parameters of `sample_tokens` behind the logits, moved in two copies."""
        params = [r.params for r in requests]
        real = torch.tensor(
            [
                [0.0 if p.greedy else p.temperature for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
            ],
            dtype=torch.float32,
        ).to(self.device, non_blocking=True)
        whole = torch.tensor(
            [
                [min(max(p.top_k, 0), self.vocab) for p in params],
                [r.seed for r in requests],
                [r.length + n for r, n in zip(requests, ahead, strict=True)],
            ],
            dtype=torch.int64,
        ).to(self.device, non_blocking=True)
        return real[0], whole[0].int(), real[1], real[2], whole[1], whole[2]

    def _adjust(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        drafts: Sequence[Tensor] = (),
        ahead: Sequence[int] = (),
    ) -> Tensor:
        """Logits after penalties, without ends before min_tokens and without what a constraint
        forbids; a copy if anything changes.

        Repetition first, over prompt and output, then frequency and presence over the output, as
        vLLM does it.
        """
        ahead = ahead or [0] * len(requests)
        young = [
            len(r.output) + n < r.params.min_tokens and bool(r.stop_ids)
            for r, n in zip(requests, ahead, strict=True)
        ]
        if not any(young) and not any(r.params.penalised for r in requests):
            return self._constrain(logits, requests, drafts, ahead)
        logits = logits.clone()
        for row, request in enumerate(requests):
            if request.params.penalised:
                self._penalise(logits[row], request, drafts[row] if ahead[row] else None)
            if young[row]:
                logits[row, torch.tensor(sorted(request.stop_ids), device=self.device)] = -torch.inf
        return self._constrain(logits, requests, drafts, ahead)

    def _constrain(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        drafts: Sequence[Tensor],
        ahead: Sequence[int],
    ) -> Tensor:
        """Logits without the tokens that a request's constraint forbids; a copy if there are any.

        Only if a request has a constraint, the host waits for the drafts.
        """
        rows = [i for i, r in enumerate(requests) if r.constraint is not None]
        if not rows:
            return logits
        known: list[int] = torch.cat([drafts[i] for i in rows]).tolist() if drafts else []
        bits = torch.full((len(rows), -(-self.vocab // 32)), -1, dtype=torch.int32)
        for mask, i in zip(bits, rows):
            before, known = known[: ahead[i]], known[ahead[i] :]
            if not self._allow(mask, requests[i], before):
                mask.fill_(-1)
        index = torch.tensor(rows).to(self.device, non_blocking=True)
        shifts = torch.arange(32, dtype=torch.int32, device=self.device)
        allowed = (bits.to(self.device, non_blocking=True)[:, :, None] >> shifts) & 1
        old = logits[index]
        new = old.masked_fill(allowed.flatten(1)[:, : self.vocab] == 0, -torch.inf)
        # a draft whose siblings have taken all that is allowed: anything will do, it is rejected
        dead = new.amax(-1, keepdim=True) == -torch.inf
        return logits.index_copy(0, index, torch.where(dead, old, new))

    @staticmethod
    def _allow(mask: Tensor, request: Request, before: Sequence[int]) -> bool:
        """`Constraint.allow`; what it raises is the request's own end, not that of the step."""
        assert request.constraint is not None
        try:
            return request.constraint.allow(mask, request.output, before)
        except Exception as problem:
            request.fault = problem
            return False

    def _penalise(self, row: Tensor, request: Request, drafts: Tensor | None) -> None:
        params = request.params
        if request.id not in self._counts:
            self._counts[request.id] = TokenCounts(request, self.vocab, self.device)
        counts = self._counts[request.id]
        counts.update(request)
        output = counts.output
        if drafts is not None:
            ones = torch.ones_like(drafts, dtype=torch.int32)
            output = output.index_add(0, drafts, ones)
        seen = counts.prompt | (output > 0)
        factor = params.repetition_penalty
        row.copy_(torch.where(seen, torch.where(row > 0, row / factor, row * factor), row))
        row.sub_(params.frequency_penalty * output)
        row.sub_(params.presence_penalty * (output > 0))


def choose(logits: Tensor, adjusted: Tensor, *rules: Tensor) -> Tensor:
    """Ids int64 [R] from `adjusted` [R, V]; -1 where the model's own logits are broken.

    rules: the parameters of `sample_tokens` behind the logits. Without host work."""
    finite = torch.isfinite(logits.amax(-1))
    return torch.where(finite, sample_tokens(adjusted, *rules), -1)


def is_plain(request: Request) -> bool:
    """True where the request's next pick is of the model's logits as they are."""
    young = bool(request.stop_ids) and len(request.output) < request.params.min_tokens
    return not (young or request.constraint is not None or request.params.penalised)


def describe(
    logits: Tensor, chosen: Sequence[int], wanted: Sequence[int]
) -> list[dict[int, Logprob]]:
    """For each row of logits [R, V]: the chosen token, and the `wanted[i]` most likely ones.

    Of the model's own distribution: give it logits before penalties and temperature. Ranks count
    from 1; ties go to the lower id. The chosen token comes first.
    """
    found = token_logprobs(logits, max(wanted, default=0))
    index = torch.tensor(chosen, device=logits.device)[:, None]
    own = found.every.gather(-1, index)
    ahead = (found.every > own).sum(-1)
    lower = torch.arange(logits.shape[-1], device=logits.device) < index
    ahead += ((found.every == own) & lower).sum(-1)
    own_values, own_ranks = own[:, 0].tolist(), (ahead + 1).tolist()
    top_ids, top_values = found.top_ids.tolist(), found.top.tolist()
    rows = []
    for i, count in enumerate(wanted):
        row = {chosen[i]: Logprob(own_values[i], own_ranks[i])}
        for rank in range(count):
            row.setdefault(top_ids[i][rank], Logprob(top_values[i][rank], rank + 1))
        rows.append(row)
    return rows
