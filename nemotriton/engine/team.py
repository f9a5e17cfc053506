"""The processes of a run on several GPUs: how they start, agree, hear of each other, and end.

Rank 0 drives; the others repeat its steps (`lockstep`). They are started by `torchrun`, one process
a GPU, or by rank 0 itself. Weights and activations go through torch.distributed, by NCCL between
GPUs and gloo between CPUs; what rank 0 tells the others goes through gloo.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nemotriton.engine.watch import Watch, end_all, ending
from nemotriton.errors import ConfigError, NemotritonError, RankError, require
from nemotriton.model.parallel import Shard
from nemotriton.model.sums import small_sums

log = logging.getLogger(__name__)
_START = timedelta(seconds=120)  # until all have come
_PATIENCE = timedelta(days=20)  # of one who waits for the next step; `Watch` knows who has gone
_HEAD = 4096  # bytes of the first part of what is told
_LOST = timedelta(seconds=4)  # for the store to answer
_CAUSE = 2.0  # seconds in which the cause of a broken connection becomes known
_FAREWELL = 5.0


class Team:
    """One process among its like; `guard` everything that may wait for the others."""

    def __init__(
        self,
        shard: Shard,
        device: torch.device,
        store: dist.Store | None,
        watch: Watch,
        children: Mapping[int, subprocess.Popen[bytes]],
    ) -> None:
        self.shard, self.device, self.children = shard, device, children
        self.closed = False
        self._watch = watch
        self._store = store  # the host of the store lives as long as this

    @property
    def leads(self) -> bool:
        """True for rank 0."""
        return self.shard.rank == 0

    def check(self) -> None:
        """RankError if the run is over."""
        if self._watch.fault is not None:
            raise RankError(self._watch.fault)

    # ---- words --------------------------------------------------------------------------------

    def tell(self, what: object) -> None:
        """Rank 0 to all others, which `hear` it."""
        data = pickle.dumps(what)
        rest = len(data) - (_HEAD - 8)
        body = len(data).to_bytes(8, "little") + data[: _HEAD - 8]
        head = torch.zeros(_HEAD, dtype=torch.uint8)
        head[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        dist.broadcast(head, 0)
        if rest > 0:
            dist.broadcast(torch.frombuffer(bytearray(data[-rest:]), dtype=torch.uint8), 0)

    def hear(self) -> Any:
        """What rank 0 tells next."""
        head = torch.empty(_HEAD, dtype=torch.uint8)
        dist.broadcast(head, 0)
        raw = head.numpy().tobytes()
        length = int.from_bytes(raw[:8], "little")
        data, rest = raw[8 : 8 + length], length - (_HEAD - 8)
        if rest > 0:
            tail = torch.empty(rest, dtype=torch.uint8)
            dist.broadcast(tail, 0)
            data += tail.numpy().tobytes()
        return pickle.loads(data)

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if not self.leads:
            return self.hear()
        self.tell(value)
        return value

    def agree(self, facts: Mapping[str, object]) -> None:
        """RankError on every rank where any has other facts than rank 0, naming the first."""
        found: list[Any] = [None] * self.shard.ranks
        dist.all_gather_object(found, dict(facts))
        for rank, theirs in enumerate(found):
            for name, value in found[0].items():
                if theirs.get(name) != value:
                    raise RankError(
                        f"rank {rank}: {name} is {theirs.get(name)}, but {value} on rank 0: start "
                        "all with the same files and options."
                    )

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        value = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)

    # ---- faults -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Whatever fails inside is told to all, for none can go on alone; RankError with the cause
        where that was another's failure, and from then on."""
        self.check()
        self._watch.enter()
        try:
            yield
            self.check()
        except BaseException as problem:
            cause = self._cause(problem)
            if cause is None:
                raise
            raise RankError(cause) from problem
        finally:
            self._watch.leave()

    def _cause(self, problem: BaseException) -> str | None:
        """What is to be raised in the place of `problem`; None where that says it all."""
        if isinstance(problem, RankError):
            self._watch.report(str(problem))
            return None
        if self.leads and isinstance(problem, NemotritonError):  # others may have met it first
            self._watch.report(f"rank 0: {problem}")
            return None
        passive = isinstance(problem, RuntimeError) and not isinstance(
            problem, torch.OutOfMemoryError
        )
        known = self._watch.wait(_CAUSE) if passive else self._watch.fault
        if known is not None:
            return known
        text = str(problem).strip().splitlines()
        named = "" if isinstance(problem, NemotritonError) else f"{type(problem).__name__}: "
        own = f"rank {self.shard.rank}: {named}{text[0] if text else ''}"
        told = self._watch.report(own)
        if told != own:
            return told
        plain = isinstance(problem, NemotritonError) or not isinstance(problem, Exception)
        return None if plain and self.leads else own

    # ---- life ---------------------------------------------------------------------------------

    def leave(self, code: int) -> NoReturn:
        """End a process other than rank 0's; what its device is at does not keep it.

        Why it failed is rank 0's to say; the log has the rest."""
        if code:
            log.debug("rank %d failed", self.shard.rank, exc_info=True)
            self._watch.end()
        self._watch.stop()
        _disband()
        sys.stdout.flush()
        os._exit(code)

    def close(self, farewell: object = None) -> None:
        """Let the others go, rank 0 with a last word; again does nothing."""
        if self.closed:
            return
        self.closed = True
        fault = self._watch.fault
        if self.leads and farewell is not None and fault is None:
            with contextlib.suppress(RuntimeError):
                self.tell(farewell)
        if fault is None:
            self._watch.stop()
            _disband()
        end_all(list(self.children.values()), _FAREWELL if fault is None else 2 * _CAUSE)
        self._watch.stop()
        if dist.is_initialized():
            _disband()


def under_launcher() -> bool:
    """True in a process that torchrun has started."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def open_team(tp: int, ep: int, device: str | torch.device | None, work: object) -> Team | None:
    """Join, or start, the tp * ep processes of a run; None for one alone.

    work: what a process that this one starts is given on its stdin. ConfigError where torchrun has
    started another number; UnsupportedError where there are too few GPUs; RankError where not all
    come.
    """
    ranks = Shard(0, tp, ep).ranks
    launched = under_launcher()
    world = int(os.environ["WORLD_SIZE"]) if launched else 1
    require(
        not launched or world == ranks,
        f"tp={tp} and ep={ep} make {ranks} ranks, but torchrun has started {world} processes: make "
        "them equal.",
        ConfigError,
    )
    if ranks == 1:
        return None
    require(
        not dist.is_initialized(),
        "this process is in a group of torch.distributed already, as of another LLM with several "
        "ranks: close that first.",
    )
    host_of: dist.Store | None = None
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if launched else ranks
    place = _device(device, int(os.environ.get("LOCAL_RANK", "0")), local_ranks)
    if launched:
        rank = int(os.environ["RANK"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if "NEMOTRITON_SPAWNED" not in os.environ:
            host_of = next(iter(dist.rendezvous("env://", rank, world)))[0]
        shard, children = Shard(rank, tp, ep), {}
    else:
        host, shard = "127.0.0.1", Shard(0, tp, ep)
        host_of = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_START)
        port = host_of.port
        children = _start(ranks, port, work)
    own = _client(host, port, ranks, "group")
    try:
        _gather(own, shard, children)
        _group(own, shard, place)
    except BaseException:
        end_all(list(children.values()), 0.0)
        raise
    watched = _client(host, port, ranks, "watch")
    watched.set_timeout(_LOST)
    parent = os.getppid() if shard.rank and "NEMOTRITON_SPAWNED" in os.environ else None
    watch = Watch(watched, shard.rank, ranks, children, parent, _abort)
    if local_ranks == ranks:
        sums = small_sums(shard.rank, ranks, place, dist.PrefixStore("sums", own))
        shard = replace(shard, sums=sums)
    return Team(shard, place, host_of, watch, children)


def _group(store: dist.Store, shard: Shard, place: torch.device) -> None:
    """Make the process group, once all have come."""
    on_gpu = place.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(place)
        # who has gone is the watch's business; NCCL's own would end processes without a word
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=shard.rank,
        world_size=shard.ranks,
        timeout=_PATIENCE,
        device_id=place if on_gpu else None,
    )


def _client(host: str, port: int, ranks: int, name: str) -> dist.Store:
    """A connection to the store, with names of this team alone: a launcher's store outlives it."""
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_START)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    number = (store.add(f"nemotriton/{attempt}/{name}", 1) - 1) // ranks
    return dist.PrefixStore(f"nemotriton/{attempt}/{number}/{name}", store)


def _device(wanted: str | torch.device | None, local_rank: int, local_ranks: int) -> torch.device:
    """This process's own: a GPU each, or the CPU for all."""
    kind = "cuda" if wanted is None and torch.cuda.is_available() else str(wanted or "cpu")
    require(
        kind in ("cuda", "cpu"),
        f"device={str(wanted)!r} with several processes: use 'cuda', of which each takes its own, "
        "or 'cpu'.",
        ConfigError,
    )
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    require(
        count >= local_ranks,
        f"{local_ranks} processes on this machine, but it has {count} GPUs: lower tp or ep, or use "
        "device='cpu'.",
    )
    return torch.device("cuda", local_rank)


def _start(ranks: int, port: int, work: object) -> dict[int, subprocess.Popen[bytes]]:
    """Processes for all other ranks; each gets `work` on its stdin."""
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    named = {name: str(value) for name, value in shared.items()}
    path = os.pathsep.join(p for p in sys.path if p)
    named |= {"MASTER_ADDR": "127.0.0.1", "NEMOTRITON_SPAWNED": "1", "PYTHONPATH": path}
    children = {}
    for rank in range(1, ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        child = subprocess.Popen(
            [sys.executable, "-m", "nemotriton.engine.follower"],
            stdin=subprocess.PIPE,
            stdout=2,  # stdout is for completions
            env=os.environ | named | own,
        )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(pickle.dumps(work))
            child.stdin.close()
        children[rank] = child
    return children


def _gather(
    store: dist.Store, shard: Shard, children: Mapping[int, subprocess.Popen[bytes]]
) -> None:
    """Wait until all have come, or one of those that were started has ended; RankError."""
    store.set(f"here/{shard.rank}", "")
    until = time.monotonic() + _START.total_seconds()
    for rank in range(shard.ranks):
        while not store.check([f"here/{rank}"]):
            code = children[rank].poll() if rank in children else None
            if code is not None:
                raise RankError(f"rank {rank} {ending(code)} before it had come up.")
            if time.monotonic() > until:
                raise RankError(f"rank {rank} has not come within {_START.seconds} s.")
            time.sleep(0.02)


def _disband() -> None:
    """End the group. Recorded steps hold on to it and must have gone first; taking leave of those
    who have gone without a word may take for ever, and then it is given up."""
    gc.collect()
    leave = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leave.start()
    leave.join(_FAREWELL)
    if leave.is_alive():
        _abort()


def _abort() -> None:
    """Bring back who waits in a collective on the device."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if torch.cuda.is_available() and abort is not None and dist.is_initialized():
        abort()
