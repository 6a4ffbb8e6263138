// The numbers of sampling, defined to the last bit: the same functions and constants as octavo/sampling/arithmetic.py, which has
// the sources and the reasons. IEEE float32 operations in the order written, never contracted (-ffp-contract=off), so results
// are the same on every ISA level. Loops over these functions are left to the compiler's vectoriser.
#pragma once

#include <cstdint>

#include "kernels/simd.h"

namespace octavo {
namespace OCTAVO_ISA_NS {

constexpr float kLowest = -__builtin_inff();

OCTAVO_INLINE uint32_t bits_of(float x) { uint32_t b; __builtin_memcpy(&b, &x, 4); return b; }
OCTAVO_INLINE float float_of(uint32_t b) { float x; __builtin_memcpy(&x, &b, 4); return x; }

// condition ? a : b in integers. A plain conditional lets the compiler move the float work into a branch, and a loop with a branch
// around operations that may trap is not vectorised.
OCTAVO_INLINE float select(bool condition, float a, float b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return float_of((bits_of(a) & mask) | (bits_of(b) & ~mask));
}

// exp of x <= 0 (-inf allowed); 0 below -87.
OCTAVO_INLINE float exp_nonpositive(float x) {
  const float c = select(x < -87.0f, -87.0f, x);
  const float n = (c * 1.442695f + 12582912.0f) - 12582912.0f;
  const float r = (c - n * 0.693359375f) - n * -0.00021219444f;
  const float r2 = r * r;
  float p = (0.00019875691f * r + 0.0013981999f) * r2 + (0.008333452f * r + 0.041665796f);
  p = p * r2 + (0.16666666f * r + 0.5f);
  p = (p * r2 + r) + 1.0f;
  const float e = p * float_of(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
  return select(x < -87.0f, 0.0f, e);
}

// log((1 + f) * 2^e).
OCTAVO_INLINE float log_reduced(float f, float e) {
  float p = 0.070376836f;
  p = p * f + -0.1151461f;
  p = p * f + 0.116769984f;
  p = p * f + -0.12420141f;
  p = p * f + 0.14249323f;
  p = p * f + -0.16668057f;
  p = p * f + 0.20000714f;
  p = p * f + -0.24999994f;
  p = p * f + 0.3333333f;
  const float z = f * f;
  float y = (p * f) * z + e * -0.00021219444f;
  y = y - 0.5f * z;
  return (f + y) + e * 0.693359375f;
}

struct Reduced { float f, e; };  // x = (1 + f) * 2^e

OCTAVO_INLINE Reduced reduce(float x) {
  const int32_t bits = static_cast<int32_t>(bits_of(x)) - 0x3f3504f3;
  return {float_of(static_cast<uint32_t>((bits & 0x007fffff) + 0x3f3504f3)) - 1.0f, static_cast<float>(bits >> 23)};
}

// log of a normal x > 0.
OCTAVO_INLINE float log_normal(float x) {
  const Reduced r = reduce(x);
  return log_reduced(r.f, r.e);
}

// log of a finite x > 0, denormal or not.
OCTAVO_INLINE float log_positive(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const Reduced r = reduce(x * (tiny ? 8388608.0f : 1.0f));
  return log_reduced(r.f, tiny ? r.e - 23.0f : r.e);
}

// The integer mass of a token whose z = (logit - best) / temperature.
OCTAVO_INLINE uint32_t weight_of(float z) { return static_cast<uint32_t>(static_cast<int32_t>(exp_nonpositive(z) * 1073741824.0f)); }

// Unsigned keys in the order of floats; -0 and +0 are one key.
OCTAVO_INLINE uint32_t order_key(float x) {
  const uint32_t b = bits_of(x + 0.0f);
  return b ^ (static_cast<uint32_t>(static_cast<int32_t>(b) >> 31) | 0x80000000u);
}
OCTAVO_INLINE float float_of_key(uint32_t key) { return float_of(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

struct Words { uint32_t x0, x1, x2, x3; };

OCTAVO_INLINE Words philox_round(Words c, uint32_t k0, uint32_t k1) {
  const uint64_t p0 = static_cast<uint64_t>(0xd2511f53u) * c.x0, p1 = static_cast<uint64_t>(0xcd9e8d57u) * c.x2;
  return {static_cast<uint32_t>(p1 >> 32) ^ c.x1 ^ k0, static_cast<uint32_t>(p1), static_cast<uint32_t>(p0 >> 32) ^ c.x3 ^ k1, static_cast<uint32_t>(p0)};
}

// Philox4x32-10, written out so that a loop over counters is one straight line.
OCTAVO_INLINE Words philox(Words c, uint64_t seed) {
  const uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32), w0 = 0x9e3779b9u, w1 = 0xbb67ae85u;
  c = philox_round(c, k0, k1);
  c = philox_round(c, k0 + w0, k1 + w1);
  c = philox_round(c, k0 + 2 * w0, k1 + 2 * w1);
  c = philox_round(c, k0 + 3 * w0, k1 + 3 * w1);
  c = philox_round(c, k0 + 4 * w0, k1 + 4 * w1);
  c = philox_round(c, k0 + 5 * w0, k1 + 5 * w1);
  c = philox_round(c, k0 + 6 * w0, k1 + 6 * w1);
  c = philox_round(c, k0 + 7 * w0, k1 + 7 * w1);
  c = philox_round(c, k0 + 8 * w0, k1 + 8 * w1);
  return philox_round(c, k0 + 9 * w0, k1 + 9 * w1);
}

// Gumbel noise of 32 random bits.
OCTAVO_INLINE float gumbel(uint32_t bits) {
  const int32_t k = static_cast<int32_t>(bits >> 1);
  const float v = (static_cast<float>(k) + 0.5f) * 4.656612873077393e-10f;
  const float u = (static_cast<float>(0x7fffffff - k) + 0.5f) * 4.656612873077393e-10f;
  const Reduced r = reduce(u);
  const bool tail = k < 0x257d8666;
  return -log_normal(-log_reduced(select(tail, -v, r.f), select(tail, 0.0f, r.e)));
}

// An upper bound of gumbel(bits) for a few operations. v <= -log(1 - v), so the noise is at most -log(v); and log2(v) is at least what
// v's bits say when read as a fixed-point number (log2(1 + m) >= m). The constant is 127 ln 2 and 0.001 more than any rounding error.
OCTAVO_INLINE float gumbel_bound(uint32_t bits) {
  const float v = (static_cast<float>(static_cast<int32_t>(bits >> 1)) + 0.5f) * 4.656612873077393e-10f;
  return 88.0307f - static_cast<float>(static_cast<int32_t>(bits_of(v))) * 8.2629583e-8f;
}

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
