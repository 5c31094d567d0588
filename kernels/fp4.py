"""NVFP4 as kernels write it: E2M1 codes, two a byte, and an E4M3 scale for each 16 of them.

A value is code * scale / global_scale, where global_scale (of the whole tensor) moves the scales into E4M3's range. E2M1
has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Rounding is to nearest, ties to the even code, and saturates. It is done in
float32 arithmetic, so that any GPU, and Triton's interpreter, gives the bits of Blackwell's conversions.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(16)
"""Values that share a scale."""


def span(tile: int) -> int:
    """Rows whose scales lie together, in what a GEMM with tiles of so many rows reads."""
    return 128 if tile >= 128 else 8


@triton.jit
def e4m3_code(x):
    """x float32, not negative, as the bits of an E4M3 number, int32; 448 at most."""
    x = tl.minimum(x, 448.0)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # In steps of 2^-9. The sum has them in its last bits, rounded as floats are.
    below_normal = (x * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(x < 0.015625, below_normal, normal)


@triton.jit
def e4m3_value(code):
    """The float32 number of an E4M3 code without a sign."""
    normal = ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * (1.0 / 512.0), normal)


@triton.jit
def e2m1_code(x):
    """x float32 as the four bits of an E2M1 number, int32."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def quantize_fp4(x, global_scale):
    """x float32 [rows, columns] as packed codes, int32 [rows, columns / 2], and scales' codes, int32 [rows, columns / 16].

    The scale of a group is global_scale * largest / 6 as E4M3; the codes are x times the inverse of what that rounds to.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (rows, columns // GROUP, GROUP))
    scale = e4m3_code(global_scale * (tl.max(tl.abs(x), axis=2) * (1.0 / 6.0)))
    rounded = e4m3_value(scale)
    factor = tl.where(scale > 0, global_scale / tl.where(scale > 0, rounded, 1.0), 0.0)
    codes = tl.reshape(e2m1_code(x * factor[:, :, None]), (rows, columns // 2, 2))
    low, high = tl.split(codes)
    return low | (high << 4), scale


@triton.jit
def scale_offset(row, group, GROUPS: tl.constexpr, SPAN: tl.constexpr):
    """Where the scale of a row's group lies, int64, in a tensor of GROUPS (a multiple of 4) groups a row; SPAN from span().

    Scales lie in blocks of 4 groups, first all blocks of one span of rows. A span of 128 rows is ordered 0, 32, 64, 96, 1,
    33, ..., one of 8 rows in their order.
    """
    row = row.to(tl.int64)
    if SPAN == 128:
        block = (row // 128) * (GROUPS // 4) + group // 4
        return block * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4
    block = (row // 8) * (GROUPS // 4) + group // 4
    return block * 32 + (row % 8) * 4 + group % 4
