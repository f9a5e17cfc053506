"""Thin holders of weights: linear maps, the embedding, RMS norms and stacked experts.

Parameters are allocated uninitialised on the device asked for and filled by `checkpoint.load` or
`synth.fill`; their names, shapes and dtypes are those of the checkpoint, matrix by matrix as its
scheme says. Nothing here computes: the ops do.

    stored as   activations as they are      quantised (`Scope.act_quant`, where the file allows it)
    bf16        matmul                       -
    fp8         w8a16                        w8a8: x rounded to e4m3 / input_scale
    nvfp4       w4a16                        w4a4: x rounded to NVFP4 with input_scale as global

Once loaded, weights may take the form that the GPU reads fastest (`packing`); that replaces the
checkpoint's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from nemotriton.errors import require
from nemotriton.kernels import (
    Routing,
    add_rms_norm_fp8,
    fp8_matmul,
    matmul,
    nvfp4_matmul,
    packed_matmul,
    rms_norm,
    run_experts,
    run_experts_fp8,
    run_experts_nvfp4,
    run_experts_packed,
    run_experts_scaled,
    scaled_matmul,
)
from nemotriton.kernels.hopper_pack import pack_hopper
from nemotriton.kernels.scale_tiles import swizzle_scales
from nemotriton.model.checkpoint import destination_dtype
from nemotriton.model.expected import matrix_parts
from nemotriton.model.formats import UNQUANTISED, ActQuant, Format, QuantScheme
from nemotriton.model.packing import packs_for_hopper, tiles_for_blackwell
from nemotriton.model.parallel import ONE, Shard


@dataclass(frozen=True, slots=True)
class Scope:
    """Where in a model a module stands (its canonical name), and how its weights are made.

    dtype: of weights that are not quantised, and of activations. act_quant: activations are
    quantised at every matrix whose checkpoint was made for that, or "fp8": at FP8 ones. shard:
    which part of the model this is; the sizes that modules are made with are its own.
    """

    dtype: torch.dtype
    device: torch.device
    scheme: QuantScheme = UNQUANTISED
    act_quant: ActQuant = False
    name: str = ""
    shard: Shard = ONE

    def at(self, name: str) -> Scope:
        """The scope of a module inside this one."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)


def parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised weight; gradients are switched on only for training."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Matrix(nn.Module):
    """A matrix [rows, cols], or one of each expert, in the format that the scheme gives it.

    weight: bf16 [rows, cols], fp8 the same, nvfp4 codes [rows, cols / 2]. weight_scale: fp8 one
    value, nvfp4 [rows, cols / 16]. weight_scale_2, input_scale: one value. All with [experts] in
    front where there are experts. `used_input_scale` is None where activations stay as they are.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter
    weight_scale_2: nn.Parameter
    input_scale: nn.Parameter
    words: nn.Parameter
    scale_tiles: nn.Parameter

    def __init__(self, rows: int, cols: int, scope: Scope, experts: int = 0) -> None:
        super().__init__()
        self.storage = scope.scheme.of(scope.name)
        self.quantises = scope.scheme.quantises(scope.name, scope.act_quant)
        parts = matrix_parts(scope.name, rows, cols, scope.scheme, experts)
        for name, entry in parts.items():
            dtype = destination_dtype(entry.role, scope.dtype)
            part = parameter(entry.shape, dtype, scope.device)
            self.register_parameter(name.rpartition(".")[2], part)

    @property
    def used_input_scale(self) -> torch.Tensor | None:
        """The static scale that activations are quantised with, or None."""
        return self.input_scale if self.quantises else None

    def scaled(self, scope: Scope) -> bool:
        """Whether codes are multiplied by codes here, with scales in tiles."""
        native = self.storage is Format.NVFP4 and self.quantises
        return native and tiles_for_blackwell(scope.dtype, scope.device)

    def repack(self) -> None:
        """Put packed `words` in the place of NVFP4 codes and block scales."""
        words = pack_hopper(self.weight.detach(), self.weight_scale.detach())
        del self.weight, self.weight_scale
        self.register_parameter("words", nn.Parameter(words, requires_grad=False))
        if words.is_cuda:  # packed tensors do not fit where codes have been
            torch.cuda.empty_cache()

    def tile_scales(self) -> None:
        """Put scales in tiles in the place of those in rows."""
        tiles = swizzle_scales(self.weight_scale.detach())
        del self.weight_scale
        self.register_parameter("scale_tiles", nn.Parameter(tiles, requires_grad=False))

    def permute_rows(self, order: torch.Tensor) -> None:
        """Reorder the rows, and with them the product's columns."""
        for name, part in self.named_parameters(recurse=False):
            by_row = name in ("weight", "bias") or self.storage is Format.NVFP4
            if by_row and part.ndim > 0 and part.shape[0] == len(order):
                raw = part.data.view(torch.uint8) if part.dtype.itemsize == 1 else part.data
                part.data = raw[order].view(part.dtype)


class Linear(Matrix):
    """y = epilogue(x W^T + b), W [rows, cols] in any format; `packed`: repacked for Hopper,
    `tiled`: its scales in tiles for Blackwell."""

    def __init__(self, rows: int, cols: int, scope: Scope, bias: bool = False) -> None:
        super().__init__(rows, cols, scope)
        self.bias = parameter((rows,), scope.dtype, scope.device) if bias else None
        self.rows, self.dtype = rows, scope.dtype
        self.packable = (
            self.storage is Format.NVFP4
            and not self.quantises
            and packs_for_hopper(rows, cols, scope.dtype, scope.device)
        )
        self.tileable = self.scaled(scope)
        self.packed = self.tiled = False

    def prepare(self) -> None:
        """Repack the loaded weight where this GPU wants that."""
        if self.packable and not self.packed:
            self.repack()
            self.packed = True
        elif self.tileable and not self.tiled:
            self.tile_scales()
            self.tiled = True

    def plain(self, *formats: Format) -> bool:
        """Whether y is x times a weight in one of these formats, and its scale: nothing else."""
        return self.storage in formats and not self.quantises and self.bias is None

    @property
    def code_scale(self) -> torch.Tensor | None:
        """What x may be quantised with to FP8 before it comes here; None where x must come as it
        is. In fp32 products are exact, and codes are not multiplied."""
        takes = self.storage is Format.FP8 and self.dtype != torch.float32
        return self.used_input_scale if takes else None

    @property
    def scale(self) -> torch.Tensor | None:
        """The scale of an FP8 weight; None of a BF16 one."""
        return self.weight_scale if self.storage is Format.FP8 else None

    def forward(
        self,
        x: torch.Tensor,
        epilogue: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x [T, cols] -> [T, rows]; epilogue "none", "relu2" or "residual" (adds `residual`).

        x may be e4m3 codes, made with `code_scale`."""
        if x.dtype == torch.float8_e4m3fn:
            out_dtype = out_dtype or self.dtype
        bias, rest = self.bias, (epilogue, residual, out_dtype)
        if self.packed:
            return packed_matmul(x, self.words, self.rows, self.weight_scale_2, bias, *rest)
        weight = self.weight
        if self.tiled:
            scales = (self.scale_tiles, self.weight_scale_2, self.input_scale)
            return scaled_matmul(x, weight, *scales, bias, *rest)
        if self.storage is Format.BF16:
            return matmul(x, weight, bias, *rest)
        scale, inputs = self.weight_scale, self.used_input_scale
        if self.storage is Format.FP8:
            return fp8_matmul(x, weight, scale, inputs, bias, *rest)
        return nvfp4_matmul(x, weight, scale, self.weight_scale_2, inputs, bias, *rest)


class Embedding(nn.Module):
    """Token ids -> rows of weight [V, D], of which a rank holds its share."""

    def __init__(
        self,
        vocab: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ONE,
    ) -> None:
        super().__init__()
        self.shard = shard
        self.weight = parameter((vocab // shard.ranks, width), dtype, device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.shard.embed(ids, self.weight)


class RMSNorm(nn.Module):
    """RMS norm with weight [D], alone or fused with the residual add before it; shard: whose parts
    are added up first."""

    def __init__(
        self,
        width: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ONE,
    ) -> None:
        super().__init__()
        self.eps, self.shard = eps, shard
        self.weight = parameter((width,), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of residual + x, residual + x), x the sum of all ranks' x; with a scale the norm
        may be FP8 codes of what it is without."""
        if scale is not None and self.shard.ranks == 1:
            return add_rms_norm_fp8(x, residual, self.weight, scale, self.eps)
        return self.shard.add_norm(x, residual, self.weight, self.eps)


class Experts(nn.Module):
    """The routed experts' two matrices, stacked: up [E, F, L] and down [E, L, F], in one format.

    Every expert keeps its own scales. Activations are quantised for both matrices or for none.
    UnsupportedError where up and down differ in format. `packed`: the matrices have been repacked
    for Hopper; then `ordered` may say that x's columns stand in `hopper_pack.k_order`, and a few
    tokens' one launch counts in `arrivals`. `tiled`: their scales lie in tiles for Blackwell.
    """

    def __init__(self, experts: int, width: int, latent: int, scope: Scope) -> None:
        super().__init__()
        self.up_proj = Matrix(width, latent, scope.at("up_proj"), experts)
        self.down_proj = Matrix(latent, width, scope.at("down_proj"), experts)
        up, down = self.up_proj.storage, self.down_proj.storage
        require(
            up is down,
            f"{scope.name}: up_proj is stored as {up} and down_proj as {down}; quantise both "
            "alike, or neither",
        )
        self.width = width
        self.quantises = self.up_proj.quantises and self.down_proj.quantises
        self.packable = (
            up is Format.NVFP4
            and not self.quantises
            and packs_for_hopper(width, latent, scope.dtype, scope.device)
        )
        self.tileable = self.up_proj.scaled(scope) and self.down_proj.scaled(scope)
        self.packed = self.ordered = self.tiled = False
        self.arrivals: torch.Tensor | None = None

    def prepare(self) -> None:
        """Repack the loaded matrices where this GPU wants that, one after the other."""
        if self.packable and not self.packed:
            for matrix in (self.up_proj, self.down_proj):
                matrix.repack()
            self.packed = True
        elif self.tileable and not self.tiled:
            self.up_proj.tile_scales()
            self.down_proj.tile_scales()
            self.tiled = True

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """x [T, L] -> the weighted sum over each token's experts, [T, L]."""
        up, down = self.up_proj, self.down_proj
        if self.packed:
            words = (up.words, up.weight_scale_2, down.words, down.weight_scale_2)
            return run_experts_packed(x, *words, self.width, routing, self.ordered, self.arrivals)
        if self.tiled:
            first = (up.weight, up.scale_tiles, up.weight_scale_2)
            second = (down.weight, down.scale_tiles, down.weight_scale_2)
            return run_experts_scaled(x, *first, *second, routing, up.input_scale, down.input_scale)
        inputs = (up.input_scale, down.input_scale) if self.quantises else (None, None)
        match up.storage:
            case Format.BF16:
                return run_experts(x, up.weight, down.weight, routing)
            case Format.FP8:
                weights = (up.weight, up.weight_scale, down.weight, down.weight_scale)
                return run_experts_fp8(x, *weights, routing, *inputs)
            case Format.NVFP4:
                first = (up.weight, up.weight_scale, up.weight_scale_2)
                second = (down.weight, down.weight_scale, down.weight_scale_2)
                return run_experts_nvfp4(x, *first, *second, routing, *inputs)
