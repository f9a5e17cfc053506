"""The fused scan at Super's width: against the five kernels, its neighbours, and itself."""

import pytest
import torch

from nemotriton.kernels import chunk_table, ssd_prefill, ssd_prefill_chunked
from nemotriton.kernels.op import Args, Case, Op, use_tile
from nemotriton.kernels.ssd_fused import SSD_PREFILL

H, P, N, G, Q = 128, 64, 128, 8, 128
RAGGED = [108, 2032, 0, 103, 39, 469, 1, 886, 193, 64, 128]


def inputs(lengths: list[int], where: torch.device, done: list[int] | None = None) -> Args:
    """Slices of one projection row, as the model has them; every second sequence continues."""
    g = torch.Generator(device=where).manual_seed(sum(lengths))
    T, S, wide = sum(lengths), len(lengths), H * P + 2 * G * N + H
    row = torch.randn(T, wide, generator=g, device=where).bfloat16()
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    fresh = torch.arange(S) % 2 == 0
    slots = torch.randperm(S, generator=g, device=where).int()
    state = torch.randn(S, H, P, N, generator=g, device=where)
    state[slots[fresh.to(where)].long()] = float("nan")
    return {
        "x": row[:, : H * P].unflatten(-1, (H, P)),
        "dt": row[:, -H:],
        "A": -1 - 15 * torch.rand(H, generator=g, device=where),
        "B": row[:, H * P : H * P + G * N].unflatten(-1, (G, N)),
        "C": row[:, H * P + G * N : -H].unflatten(-1, (G, N)),
        "D": torch.randn(H, generator=g, device=where),
        "dt_bias": torch.randn(H, generator=g, device=where) - 4,
        "state": state,
        "cu": cu.to(where),
        "slots": slots,
        "fresh": fresh.to(where),
        "chunks": torch.tensor(chunk_table(lengths, Q, done), dtype=torch.int32).to(where),
        "chunk_size": Q,
    }


def run(op: Op, args: Args, roles: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """roles: the form by warp roles, where the device has it."""
    mine = args | {"state": args["state"].clone()}
    tile = SSD_PREFILL.default(Case(H=H, P=P, N=N, G=G, Q=Q), 2048).but(ROLES=roles)
    with use_tile("ssd_prefill", tile):
        return op.triton(**mine), mine["state"]


forms = pytest.mark.parametrize("roles", [False, True])


@forms
@pytest.mark.parametrize("done", [None, [37 * i for i in range(len(RAGGED))]])
def test_the_five_kernels_agree(done: list[int] | None, roles: bool, cuda: torch.device) -> None:
    args = inputs(RAGGED, cuda, done)
    found, want = run(ssd_prefill, args, roles), run(ssd_prefill_chunked, args)
    for mine, theirs in zip(found, want, strict=True):
        assert bool(mine.isfinite().all())
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert float(error) < 6e-3


@forms
def test_bits_do_not_move_and_neighbours_change_none(roles: bool, cuda: torch.device) -> None:
    args = inputs(RAGGED, cuda)
    y, state = run(ssd_prefill, args, roles)
    for _ in range(20):
        again = run(ssd_prefill, args, roles)
        assert torch.equal(again[0], y)
        assert torch.equal(again[1], state)
    sick = args | {k: args[k].clone() for k in ("x", "dt", "B", "C")}
    ill = sum(RAGGED[:5])
    part = slice(ill, ill + RAGGED[5])
    for name in ("x", "dt", "B", "C"):
        sick[name][part] = float("nan")
    other = run(ssd_prefill, sick, roles)
    well = [i for i in range(len(RAGGED)) if i != 5]
    assert torch.equal(other[0][:ill], y[:ill])
    assert torch.equal(other[0][part.stop :], y[part.stop :])
    slots = args["slots"][well].long()
    assert torch.equal(other[1][slots], state[slots])


def test_pointers_and_descriptors_give_the_same_bits(cuda: torch.device) -> None:
    """Rows that start two bytes off are read through pointers."""
    args = inputs(RAGGED, cuda)
    off = dict(args)
    for name in ("x", "B", "C"):
        value = args[name]
        whole = value.new_empty(value.shape[0] * (value[0].numel() + 5) + 1)
        strides = (value[0].numel() + 5, value.shape[2], 1)
        off[name] = whole[1:].as_strided(value.shape, strides, storage_offset=1).copy_(value)
    for mine, theirs in zip(
        run(ssd_prefill, args, False), run(ssd_prefill, off, False), strict=True
    ):
        assert torch.equal(mine, theirs)
