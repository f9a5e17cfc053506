"""Attention and KV-cache kernels in the interpreter, beyond the grid of the SPECs."""

import mmap

import pytest
import torch
import triton
import triton.language as tl

from nemotriton.autotune import parity
from nemotriton.kernels.attention import ATTEND_PREFILL, attend_prefill
from nemotriton.kernels.attention_decode import ATTEND_DECODE, GRAIN, attend_decode, most_splits
from nemotriton.kernels.attention_paths import split_size
from nemotriton.kernels.fixed_order import fixed_order
from nemotriton.kernels.kv_cache import write_kv, write_kv_ref
from nemotriton.kernels.op import Args, Case, KernelSpec, Tile, use_tile
from nemotriton.kernels.paged import attention_inputs
from tests.conftest import Poison

CPU = torch.device("cpu")
Plan = list[tuple[int, int]]


def inputs(
    plan: Plan, ratio: int = 4, kv_heads: int = 1, width: int = 16, page: int = 16, fp8: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Args:  # fmt: skip
    case = Case(H=ratio * kv_heads, Hkv=kv_heads, Dh=width, page=page, fp8=fp8)
    return attention_inputs(case, plan, CPU, dtype, parity.generator(3, CPU))


def right(spec: KernelSpec, args: Args) -> None:
    out = parity.run(spec, args)
    verdict = parity.compare(spec, out, parity.run(spec, args, ref=True), parity.oracle(spec, args))
    assert verdict.ok, verdict.detail


def piece(args: Args, rows: slice, length: int) -> Args:
    """The same single sequence with only these query rows new, `length` keys long."""
    q = args["q"][rows]
    cu = torch.tensor([0, len(q)], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    return args | {"q": q, "cu": cu, "lengths": lengths, "max_length": length, "max_new": len(q)}


DECODE = Tile(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3, SPLITS=64)
RATIOS = [(1, 1), (1, 5), (4, 2), (16, 1), (16, 3), (16, 4), (32, 5)]


@pytest.mark.parametrize("ratio,new", RATIOS)
def test_decode_of_every_ratio_and_count(ratio: int, new: int, poison: Poison) -> None:
    """Tokens on both sides of a split's edge, then as a tree; 5 x 32 rows take three blocks."""
    args = inputs([(new, GRAIN + new // 2), (1, 3)], ratio, dtype=torch.float32)
    tree = [(i - 1) // 2 if i else -1 for i in range(new)]
    with use_tile("attend_decode", DECODE):
        right(ATTEND_DECODE, args)
        right(ATTEND_DECODE, args | {"parents": torch.tensor([*tree, -1], dtype=torch.int32)})


@pytest.mark.parametrize("ratio", [1, 4, 16, 32])
@pytest.mark.parametrize("page", [16, 64, 128])
def test_prefill_of_every_ratio_and_page(ratio: int, page: int, poison: Poison) -> None:
    """Among them a block whose second token sees just one key more, the last of a block of keys."""
    plan = [(0, 9), (33, 33), (1, 130), (2, 0), (2, 128), (0, 0), (9, 65)]
    with use_tile("attend_prefill", Tile(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)):
        right(ATTEND_PREFILL, inputs(plan, ratio, page=page, dtype=torch.float32))


@pytest.mark.parametrize("width", [16, 40, 256])
def test_head_widths(width: int, poison: Poison) -> None:
    right(ATTEND_PREFILL, inputs([(5, 70), (20, 20)], kv_heads=2, width=width))
    right(ATTEND_DECODE, inputs([(2, 70), (1, 20)], kv_heads=2, width=width))


def test_blocks_wider_than_a_page_and_narrower() -> None:
    for n in (16, 32, 128):
        tile = Tile(BLOCK_M=16, BLOCK_N=n, num_warps=4, num_stages=2)
        with use_tile("attend_prefill", tile), use_tile("attend_decode", tile.but(SPLITS=64)):
            right(ATTEND_PREFILL, inputs([(5, 150), (9, 9)], page=32))
            right(ATTEND_DECODE, inputs([(5, 300), (3, 9)], page=32))


def test_more_sequences_than_one_look_up_holds(poison: Poison) -> None:
    plan = [(s // 70, 20 + s % 7 if s % 5 else s // 70) for s in range(150)]
    right(ATTEND_PREFILL, inputs(plan, ratio=16))


def test_a_prompt_in_pieces_has_the_bits_of_the_whole() -> None:
    args = inputs([(150, 150)], ratio=4, dtype=torch.float32)
    with use_tile("attend_prefill", Tile(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)):
        whole = attend_prefill.triton(**args)
        for first, last in ((0, 1), (1, 64), (64, 67), (67, 150), (149, 150)):
            got = attend_prefill.triton(**piece(args, slice(first, last), last))
            assert torch.equal(got, whole[first:last]), (first, last)


def test_drafts_and_bounds_change_no_bit_of_a_token() -> None:
    """At one `max_new`: alone, with drafts behind it, with looser bounds on the length."""
    args = inputs([(4, GRAIN + 2)], ratio=2, dtype=torch.float32)
    drafted = attend_decode.triton(**args)
    for i in range(4):
        alone = piece(args, slice(i, i + 1), GRAIN - 1 + i) | {"max_new": 4}
        assert torch.equal(attend_decode.triton(**alone)[0], drafted[i])
    loose = attend_decode.triton(**args | {"max_length": 9_000})
    assert torch.equal(loose, drafted)


def test_a_chain_of_parents_is_no_tree() -> None:
    args = inputs([(3, 50), (1, 7), (5, 20)], ratio=4)
    chain = torch.tensor([-1, 0, 1, -1, -1, 0, 1, 2, 3], dtype=torch.int32)
    plain = attend_decode.triton(**args)
    assert torch.equal(attend_decode.triton(**args, parents=chain), plain)


def test_a_sick_sibling_reaches_only_its_own_branch() -> None:
    """A NaN query is one row's business: its siblings and parents keep their bits."""
    args = inputs([(5, 40)], ratio=4)
    args["parents"] = torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32)
    healthy = attend_decode.triton(**args)
    args["q"][2] = float("nan")
    sick = attend_decode.triton(**args)
    keep = torch.tensor([0, 1, 3, 4])
    assert torch.equal(sick[keep], healthy[keep])
    assert sick[2].isnan().all()


def test_where_the_pages_lie_changes_no_bit() -> None:
    args = inputs([(3, 90), (1, 40), (2, 17)], ratio=4)
    count = args["k_cache"].shape[0]
    order = torch.randperm(count, generator=parity.generator(1, CPU))
    moved = parity.copy(args)
    for name in ("k_cache", "v_cache"):
        moved[name][order] = args[name]
    used = args["pages"] >= 0
    moved["pages"][used] = order[args["pages"][used].long()].int()
    for op in (attend_prefill, attend_decode):
        assert torch.equal(op.triton(**args), op.triton(**moved))


def test_rows_of_no_sequence_and_no_sequences_at_all_are_zeros(poison: Poison) -> None:
    args = inputs([(3, 50), (2, 90)], ratio=4)  # 90: the tail shares blocks that need no mask
    tail = torch.full((40, 4, 16), float("nan"), dtype=torch.bfloat16)
    for op in (attend_prefill, attend_decode):
        plain = op.triton(**args)
        padded = op.triton(**args | {"q": torch.cat([args["q"], tail])})
        assert torch.equal(padded[:5], plain)
        assert not padded[5:].any()
        nobody = inputs([], ratio=4) | {"q": tail}
        assert not op.triton(**nobody).any()
        pads = inputs([(2, 0), (3, 0)], ratio=4) | {"q": tail[:5]}
        assert not op.triton(**pads).any()


@triton.jit
def _sizes(out_ptr, SPLITS: tl.constexpr, GRAIN: tl.constexpr, N: tl.constexpr):
    keys = tl.arange(0, N)
    tl.store(out_ptr + keys, split_size(keys * 3, SPLITS, GRAIN))


@pytest.mark.parametrize("target", [2, 64])
def test_splits_are_neither_many_nor_large(target: int) -> None:
    count = 2**15
    out = torch.zeros(count, dtype=torch.int32)
    _sizes[(1,)](out, target, GRAIN, count)
    keys = torch.arange(count) * 3
    splits = -(-keys // out)
    assert not (out % GRAIN).any()
    assert (splits[keys >= target * GRAIN] >= target * 2 // 3).all()
    most = torch.tensor([most_splits(n, target) for n in keys.tolist()])
    assert (splits <= most).all()
    assert most_splits(0, target) == 0
    assert (out[1:] >= out[:-1]).all()


def test_tokens_on_both_sides_of_a_larger_split() -> None:
    """Splits of 128 keys become splits of 256: drafted or alone, the bits are the same."""
    change = 3 * GRAIN
    args = inputs([(4, change + 1), (1, 30)], ratio=2, page=64, dtype=torch.float32)
    tile = Tile(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3, SPLITS=2)
    with use_tile("attend_decode", tile):
        right(ATTEND_DECODE, args)
        drafted = attend_decode.triton(**args)
        for i in range(4):
            alone = piece(args, slice(i, i + 1), change - 2 + i) | {"max_new": 4}
            alone["pages"] = args["pages"][:1]
            assert torch.equal(attend_decode.triton(**alone)[0], drafted[i])
        tree = torch.tensor([-1, 0, 0, 1, -1], dtype=torch.int32)
        right(ATTEND_DECODE, args | {"parents": tree})


@pytest.mark.parametrize("mode", ["default", "invariant"])
@pytest.mark.parametrize("tree", [False, True])
def test_empty_splits_look_up_no_page_behind_the_table(tree: bool, mode: str) -> None:
    """Three splits of 256 keys, the last one behind all 385: `bounds` sees what the table lacks."""
    args = inputs([(2, 3 * GRAIN + 1)], ratio=2, page=64, dtype=torch.float32)
    args |= {"pages": args["pages"][:, :7].contiguous(), "max_length": 64 * GRAIN}
    if tree:
        args["parents"] = torch.tensor([-1, -1], dtype=torch.int32)
    tile = Tile(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3, SPLITS=2)
    with use_tile("attend_decode", tile), fixed_order("decode" if mode == "invariant" else None):
        right(ATTEND_DECODE, args)


def test_splits_of_a_long_context() -> None:
    args = inputs([(2, 129 * GRAIN + 70)], ratio=2, page=128, dtype=torch.float32)
    tile = Tile(BLOCK_M=16, BLOCK_N=128, num_warps=4, num_stages=3, SPLITS=128)
    with use_tile("attend_decode", tile):
        right(ATTEND_DECODE, args)


@pytest.mark.parametrize("k_scale,v_scale", [(0.02, 30.0), (30.0, 0.02)])
def test_fp8_caches_written_and_read(k_scale: float, v_scale: float, poison: Poison) -> None:
    args = inputs([(5, 60), (3, 33)], ratio=4, kv_heads=2, fp8=1)
    scales = {"k_scale": torch.tensor(k_scale), "v_scale": torch.tensor(v_scale)}
    _, page, heads, width = args["k_cache"].shape
    rng = parity.generator(5, CPU)
    k, v = (torch.randn(93, heads, width, generator=rng).bfloat16() * s for s in (k_scale, v_scale))
    at = torch.cat([torch.arange(60), torch.arange(33)])
    owner = torch.cat([torch.zeros(60, dtype=torch.int64), torch.ones(33, dtype=torch.int64)])
    rows = args["pages"][owner, at // page].long() * page + at % page
    twins = [args["k_cache"].clone(), args["v_cache"].clone()]
    write_kv.triton(k, v, args["k_cache"], args["v_cache"], rows, **scales)
    write_kv_ref(k, v, *twins, rows, **scales)
    for got, want in zip((args["k_cache"], args["v_cache"]), twins, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    for spec in (ATTEND_PREFILL, ATTEND_DECODE):
        right(spec, args | scales)


def test_fp8_rounds_and_saturates_like_the_twin() -> None:
    """Every bf16 value once: ties, sub-normals, both infinities and NaN."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    k = every.view(64, 4, 256)
    got, want = ([torch.zeros(1, 64, 4, 256).to(torch.float8_e4m3fn) for _ in "kv"] for _ in "gw")
    scales = {"k_scale": torch.tensor(0.3), "v_scale": None}
    write_kv.triton(k, k, *got, torch.arange(64), **scales)
    write_kv_ref(k, k, *want, torch.arange(64), **scales)
    for g, w in zip(got, want, strict=True):
        same = (g.view(torch.uint8) == w.view(torch.uint8)) | (g.isnan() & w.isnan())
        assert same.all()


def far_cache(pages: int, page: int, width: int) -> torch.Tensor:
    """A cache of more than 2^31 elements whose untouched pages take no memory."""
    size = pages * page * width * 2
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    whole = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.bfloat16)
    return whole.view(pages, page, 1, width)


def test_addresses_beyond_2_31_elements() -> None:
    page, width = 64, 256
    pages = 2**31 // (page * width) + 2
    caches = [far_cache(pages, page, width) for _ in "kv"]
    k, v = (torch.randn(5, 1, width, generator=parity.generator(s, CPU)).bfloat16() for s in (1, 2))
    rows = torch.tensor([0, pages * page - 1, -1, (pages - 1) * page, (pages - 1) * page + 1])
    write_kv.triton(k, v, *caches, rows)
    for new, cache in zip((k, v), caches, strict=True):
        flat = cache.view(-1, 1, width)
        for t, row in enumerate(rows.tolist()):
            assert row < 0 or torch.equal(flat[row], new[t])
    args = piece(inputs([(2, 2)], ratio=2, width=width), slice(0, 2), 2)
    near = [torch.cat([c[-1:]] * 2) for c in caches]
    for op in (attend_prefill, attend_decode):
        bits = []
        for (k_cache, v_cache), last in ((caches, pages - 1), (near, 1)):
            table = torch.tensor([[last]], dtype=torch.int32)
            bits.append(
                op.triton(**args | {"k_cache": k_cache, "v_cache": v_cache, "pages": table})
            )
        assert bits[0].isfinite().all()
        assert torch.equal(*bits)
