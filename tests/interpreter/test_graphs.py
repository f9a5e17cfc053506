"""Static steps on kernels: pads write zeros and move nothing; all tiles are chosen beforehand."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from nemotriton import LLM, SamplingParams
from nemotriton.engine import graphs as recording
from nemotriton.engine.request import Request, State
from nemotriton.model.config import LayerKind

PROMPTS = [[20, 9, 200], [77, 3], [5]]
CACHED = (LayerKind.MAMBA, LayerKind.ATTENTION)


class Memory:
    """The caches of an LLM, NaN before anything runs, as [layers, owner, ...] parts."""

    def __init__(self, llm: LLM) -> None:
        kv, mamba = llm.runner.caches.kv, llm.runner.caches.mamba
        assert kv is not None
        assert mamba is not None
        assert mamba.conv_lanes is not None
        self.cursor, self.pages = mamba.cursor, [kv.k, kv.v]
        lanes = mamba.ssm.unflatten(1, (-1, mamba.lanes))
        self.slots = [lanes, mamba.conv, mamba.conv_lanes]
        for part in (*self.pages, *self.slots):
            part.fill_(float("nan"))

    def strangers(self, pages: set[int], slots: set[int]) -> list[Tensor]:
        """Copies of what lies beside these, as bits."""
        found = []
        for parts, taken in ((self.pages, pages), (self.slots, slots)):
            for part in parts:
                rest = [i for i in range(part.shape[1]) if i not in taken]
                found.append(part[:, rest].contiguous().view(torch.int32))
        return found

    def own(self, request: Request) -> list[Tensor]:
        """Copies of a request's committed states, windows, keys and values."""
        lanes, conv, _ = self.slots
        cells = [part[:, request.pages].flatten(1, 2)[:, : request.computed] for part in self.pages]
        state = lanes[:, request.slot, int(self.cursor[request.slot])]
        return [x.clone() for x in (state, conv[:, request.slot], *cells)]


@contextmanager
def padded_rows_are_zeros(llm: LLM, live: list[int]) -> Iterator[None]:
    """What mixers with a cache bring to rows behind the live ones, in steps without prompts."""
    config, seen = llm.config, []

    def check(mixer: object, args: tuple[Tensor, ...], found: Tensor) -> None:
        if live and found.shape[0] > live[-1]:
            assert not found[live[-1] :].any(), f"rows behind {live[-1]} are no zeros: {mixer}"
            seen.append(mixer)

    blocks = zip(config.kinds, llm.runner.model.layers, strict=True)
    hooks = [b.mixer.register_forward_hook(check) for kind, b in blocks if kind in CACHED]
    yield
    assert len({id(mixer) for mixer in seen}) == len(hooks) > 1
    for hook in hooks:
        hook.remove()


def decode(llm: LLM, memory: Memory, live: list[int]) -> list[list[Tensor]]:
    """Step to the end; of every step what each request then owns. Nobody else's memory moves."""
    found = []
    while llm.engine.busy:
        running = [r for r in llm.engine.scheduler.running if r.state is State.DECODE]
        live[:] = [2 * len(running)]  # each with a draft
        owned = {page for r in running for page in r.pages}, {r.slot for r in running}
        before = memory.strangers(*owned)
        llm.step()
        after = memory.strangers(*owned)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found += [memory.own(r) for r in running if r.state is State.DECODE]
    live.clear()
    return found


def test_padded_steps_on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests in a shape of four, one of which ends early, with a draft each."""
    monkeypatch.setattr(recording, "ladder", lambda requests: [requests])
    tokens, kept = [], []
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 2, 3)]
    sizes = {"dtype": "float32", "device": "cpu", "max_context": 256, "layers": 4, "drafts": 1}
    for impl, graphs in (("triton", True), ("ref", False)):
        with LLM.synthetic(
            "tiny", impl=impl, graphs=graphs, max_requests=4, adapt_drafts=False, **sizes
        ) as llm:
            llm.engine.run_ahead = False
            memory, live = Memory(llm), list[int]()
            asked = [llm.engine.prepare(p, s) for p, s in zip(PROMPTS, params)]
            groups = [llm.engine.submit(a) for a in asked]
            llm.step()  # the prompts
            steps = llm.runner.steps
            if steps is None:
                kept.append(decode(llm, memory, live))
            else:
                before = steps.report()["tiles_looked_up_since"]
                with padded_rows_are_zeros(llm, live):
                    kept.append(decode(llm, memory, live))
                assert steps.replays >= 2
                assert steps.report()["tiles_looked_up_since"] == before
                assert steps.others == 0
            tokens.append([g.completions[0].request.output for g in groups])
    assert tokens[0] == tokens[1]
    assert len(kept[0]) == len(kept[1]) >= 2
    for one, other in zip(*kept, strict=True):  # a pad in a live slot or page would show
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
