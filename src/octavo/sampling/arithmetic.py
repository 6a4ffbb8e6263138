"""The numbers of sampling, defined to the last bit: exp, log, sums, and the noise of a draw.

Every function here is IEEE float32 addition, subtraction, multiplication, division and comparison, each rounded once to
nearest even, in the order written; never a fused multiply-add, never a library's exp or log. The native unit
(``native/src/kernels/sampling_math.h``) has the same functions with the same constants and must agree bit for bit, on
every instruction set; so must any later one. This module knows nothing of requests, parameters or vocabularies.

exp and log are those of Cephes (S. Moshier, ``expf.c`` and ``logf.c``): Cody-Waite reduction by ln 2 in two parts, then
a polynomial, about 1 ulp. The noise is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
as 1, 2, 3", SC 2011), a counter-based generator: any number of the stream can be had alone.
"""

from __future__ import annotations

import numpy as np

_F = np.float32

LOG2_E = _F(1.442695)
LN2_HI = _F(0.693359375)  # exact in few bits, so that n * LN2_HI is exact
LN2_LO = _F(-0.00021219444)
ROUND_MAGIC = _F(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to an integer, halves to even
EXP_LOWEST = _F(-87.0)  # below it exp is 0; at it the result is still a normal number
EXP_POLY = tuple(_F(c) for c in (0.00019875691, 0.0013981999, 0.008333452, 0.041665796, 0.16666666, 0.5))
LOG_POLY = tuple(
    _F(c) for c in (0.070376836, -0.1151461, 0.116769984, -0.12420141, 0.14249323, -0.16668057, 0.20000714, -0.24999994, 0.3333333)
)
SQRT_HALF_BITS = 0x3F3504F3  # float32 just above sqrt(1/2): where the mantissa's range begins
SMALLEST_NORMAL = _F(2.0**-126)

SUM_BLOCK = 1024  # elements summed by one set of lanes
SUM_LANES = 16

PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85  # key increments
NOISE_BLOCK = 1024  # token ids that share one run of counters: four words for each of 256 counters
TAIL_LIMIT = 0x257D8666  # 31-bit draws below it (v < 1 - sqrt(1/2)) take log(1 - v) without forming 1 - v
TWO_NEG31 = _F(2.0**-31)


def exp(x: np.ndarray | np.float32) -> np.ndarray:
    """exp of float32 ``x`` <= 0 (-inf allowed), any shape; 0 below -87. exp(0) is exactly 1."""
    x = np.asarray(x, np.float32)
    c = np.where(x < EXP_LOWEST, EXP_LOWEST, x)
    n = (c * LOG2_E + ROUND_MAGIC) - ROUND_MAGIC
    r = (c - n * LN2_HI) - n * LN2_LO
    c0, c1, c2, c3, c4, c5 = EXP_POLY
    r2 = r * r
    p = (c0 * r + c1) * r2 + (c2 * r + c3)
    p = p * r2 + (c4 * r + c5)
    p = (p * r2 + r) + _F(1)
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    return np.where(x < EXP_LOWEST, _F(0), p * power)


def _log_reduced(f: np.ndarray, e: np.ndarray) -> np.ndarray:
    """log((1 + f) * 2**e) for f in [sqrt(1/2) - 1, sqrt(2) - 1), e integral; both float32."""
    p = np.full_like(f, LOG_POLY[0])
    for coefficient in LOG_POLY[1:]:
        p = p * f + coefficient
    z = f * f
    y = (p * f) * z + e * LN2_LO
    y = y - _F(0.5) * z
    return (f + y) + e * LN2_HI


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Normal ``x`` > 0 as (f, e) with x = (1 + f) * 2**e."""
    bits = np.asarray(x, np.float32).view(np.int32) - np.int32(SQRT_HALF_BITS)
    mantissa = ((bits & 0x007FFFFF) + np.int32(SQRT_HALF_BITS)).view(np.float32)
    return mantissa - _F(1), (bits >> 23).astype(np.float32)


def log(x: np.ndarray | np.float32) -> np.ndarray:
    """log of finite float32 ``x`` > 0, any shape. log(1) is exactly 0; a denormal is scaled by 2**23 first."""
    x = np.asarray(x, np.float32)
    tiny = x < SMALLEST_NORMAL
    f, e = _split(x * np.where(tiny, _F(2**23), _F(1)))
    return _log_reduced(f, np.where(tiny, e - _F(23), e))


def lane_sum(x: np.ndarray) -> np.float32:
    """Sum of float32 ``x`` [n] in the fixed order.

    Blocks of 1024 elements (the last one filled with zeros); in a block element i goes to lane i % 16, each lane adds in
    order of i; then lane j takes lane j + 8, j + 4, j + 2, j + 1. The blocks' sums are added in order.
    """
    num_blocks = -(-x.size // SUM_BLOCK)
    padded = np.zeros(num_blocks * SUM_BLOCK, np.float32)
    padded[: x.size] = x
    rows = padded.reshape(num_blocks, SUM_BLOCK // SUM_LANES, SUM_LANES)
    lanes = rows[:, 0].copy()
    for r in range(1, rows.shape[1]):
        lanes = lanes + rows[:, r]
    width = SUM_LANES // 2
    while width:
        lanes = lanes[:, :width] + lanes[:, width:]
        width //= 2
    total = _F(0)
    for block in lanes[:, 0]:
        total = total + block
    return total


def philox4x32(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Philox4x32-10: four words [n] uint32 from four counter words [n] uint32 and two key words."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(PHILOX_M0) * c0, np.uint64(PHILOX_M1) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + PHILOX_W0) & 0xFFFFFFFF, (k1 + PHILOX_W1) & 0xFFFFFFFF
    return tuple(c.astype(np.uint32) for c in (c0, c1, c2, c3))


def noise_bits(seed: int, position: np.ndarray | int, token_ids: np.ndarray) -> np.ndarray:
    """The 32 random bits of (seed, position, token id); ``position`` and ``token_ids`` broadcast, both >= 0.

    Key: the seed's low and high word. Token t reads word t // 256 % 4 of the counter
    (t // 1024 * 256 + t % 256, position's low word, position's high word, 0).
    """
    token_ids, position = np.broadcast_arrays(np.asarray(token_ids, np.uint64), np.asarray(position, np.uint64))
    index = token_ids // np.uint64(NOISE_BLOCK) * np.uint64(256) + token_ids % np.uint64(256)
    counter = (index, position & np.uint64(0xFFFFFFFF), position >> np.uint64(32), np.zeros_like(index))
    words = philox4x32(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return np.choose((token_ids // np.uint64(256) % np.uint64(4)).astype(np.intp), words)


def gumbel(seed: int, position: np.ndarray | int, token_ids: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise -log(-log(u)) of (seed, position, token id), float32.

    With k the top 31 random bits, u = 1 - (k + 1/2) * 2**-31, strictly inside (0, 1). Where u > sqrt(1/2), log(u) is taken
    of 1 - v with v = (k + 1/2) * 2**-31 and not of a rounded u, so the upper tail, which decides draws, keeps its
    resolution: tokens of relative probability down to 2**-32 can be drawn. The noise lies in [-3.1, 22.2].
    """
    k = (noise_bits(seed, position, token_ids) >> np.uint32(1)).astype(np.int32)
    v = (k.astype(np.float32) + _F(0.5)) * TWO_NEG31
    u = ((np.int32(0x7FFFFFFF) - k).astype(np.float32) + _F(0.5)) * TWO_NEG31
    f, e = _split(u)
    tail = k < TAIL_LIMIT
    exponential = -_log_reduced(np.where(tail, -v, f), np.where(tail, _F(0), e))
    return -log(exponential)
