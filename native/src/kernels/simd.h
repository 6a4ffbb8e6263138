// Sixteen-lane vectors over the ISA of the unit that includes this file.
//
// Kernels are written once against F32x16 / I32x16 / U8x64 and compiled once per ISA level into namespace OCTAVO_ISA_NS
// (portable, avx2, avx512_vnni, avx512_bf16). Everything here is in that namespace, so no linker can merge the copies of two units:
// an AVX-512 body must never be the one a plain machine runs. Lanes mean the same on every level; only FMA contraction
// differs (portable rounds twice), so results are exact within one level.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
// GCC 12 takes the undefined pass-through operand of its own AVX-512 intrinsics for a mistake (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo {
namespace OCTAVO_ISA_NS {

#if defined(OCTAVO_AVX512)

struct F32x16 { __m512 v; };
struct I32x16 { __m512i v; };
struct U8x64 { __m512i v; };  // 16 lanes of 4 consecutive k values

OCTAVO_INLINE F32x16 f32_zero() { return {_mm512_setzero_ps()}; }
OCTAVO_INLINE F32x16 f32_set(float x) { return {_mm512_set1_ps(x)}; }
OCTAVO_INLINE F32x16 f32_load(const float* p) { return {_mm512_loadu_ps(p)}; }
OCTAVO_INLINE void f32_store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
OCTAVO_INLINE F32x16 f32_load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}; }
OCTAVO_INLINE void f32_store_n(float* p, F32x16 a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a.v); }
OCTAVO_INLINE F32x16 f32_load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
OCTAVO_INLINE void f32_store_f16(uint16_t* p, F32x16 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
OCTAVO_INLINE F32x16 f32_load_bf16(const uint16_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))}; }
OCTAVO_INLINE F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
OCTAVO_INLINE F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
OCTAVO_INLINE F32x16 f32_fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
OCTAVO_INLINE F32x16 f32_max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
OCTAVO_INLINE F32x16 f32_min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
OCTAVO_INLINE F32x16 f32_round(F32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// Lanes below n from a, the rest from b; n in 0..16.
OCTAVO_INLINE F32x16 f32_first(int n, F32x16 a, F32x16 b) { return {_mm512_mask_blend_ps((__mmask16)((1u << n) - 1), b.v, a.v)}; }
// 2^k for integral lanes of k in -126..127.
OCTAVO_INLINE F32x16 f32_exp2i(F32x16 k) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(k.v), _mm512_set1_epi32(127)), 23))}; }
OCTAVO_INLINE F32x16 f32_from_i32(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
OCTAVO_INLINE I32x16 i32_from_f32(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
OCTAVO_INLINE I32x16 i32_set(int32_t x) { return {_mm512_set1_epi32(x)}; }
OCTAVO_INLINE I32x16 i32_zero() { return {_mm512_setzero_si512()}; }

#elif defined(OCTAVO_AVX2)

struct F32x16 { __m256 a, b; };
struct I32x16 { __m256i a, b; };
struct U8x64 { __m256i a, b; };

OCTAVO_INLINE F32x16 f32_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
OCTAVO_INLINE F32x16 f32_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OCTAVO_INLINE F32x16 f32_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCTAVO_INLINE void f32_store(float* p, F32x16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
OCTAVO_INLINE F32x16 f32_load_n(const float* p, int n) { float t[16] = {0}; std::memcpy(t, p, sizeof(float) * (size_t)n); return f32_load(t); }
OCTAVO_INLINE void f32_store_n(float* p, F32x16 x, int n) { float t[16]; f32_store(t, x); std::memcpy(p, t, sizeof(float) * (size_t)n); }
OCTAVO_INLINE F32x16 f32_load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))}; }
OCTAVO_INLINE void f32_store_f16(uint16_t* p, F32x16 x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT)); _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT)); }
OCTAVO_INLINE F32x16 f32_load_bf16(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8))), 16))};
}
OCTAVO_INLINE F32x16 operator+(F32x16 x, F32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
OCTAVO_INLINE F32x16 operator-(F32x16 x, F32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
OCTAVO_INLINE F32x16 operator*(F32x16 x, F32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
OCTAVO_INLINE F32x16 operator/(F32x16 x, F32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
OCTAVO_INLINE F32x16 f32_fma(F32x16 x, F32x16 y, F32x16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
OCTAVO_INLINE F32x16 f32_max(F32x16 x, F32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
OCTAVO_INLINE F32x16 f32_min(F32x16 x, F32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
OCTAVO_INLINE F32x16 f32_round(F32x16 x) { return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
OCTAVO_INLINE F32x16 f32_first(int n, F32x16 x, F32x16 y) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), count = _mm256_set1_epi32(n);
  const __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane)), hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8))));
  return {_mm256_blendv_ps(y.a, x.a, lo), _mm256_blendv_ps(y.b, x.b, hi)};
}
OCTAVO_INLINE F32x16 f32_exp2i(F32x16 k) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k.a), bias), 23)), _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k.b), bias), 23))};
}
OCTAVO_INLINE F32x16 f32_from_i32(I32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
OCTAVO_INLINE I32x16 i32_from_f32(F32x16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
OCTAVO_INLINE I32x16 i32_set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
OCTAVO_INLINE I32x16 i32_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

#else  // portable C++: loops of 16 that a compiler may or may not vectorise

struct F32x16 { float v[16]; };
struct I32x16 { int32_t v[16]; };
struct U8x64 { uint8_t v[64]; };

// Scalar conversions of half formats, exact and round-to-nearest-even.
OCTAVO_INLINE float f16_to_f32(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) bits = 0x7f800000u | ((magnitude & 0x3ffu) << 13);
  else if (magnitude >= 0x400u) bits = (magnitude << 13) + 0x38000000u;
  else { float f = (float)magnitude * 5.9604644775390625e-8f; std::memcpy(&bits, &f, 4); }
  bits |= sign;
  float out; std::memcpy(&out, &bits, 4); return out;
}
OCTAVO_INLINE uint16_t f32_to_f16(float x) {
  uint32_t bits; std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u; bits &= 0x7fffffffu;
  if (bits >= 0x7f800000u) return (uint16_t)(sign | 0x7c00u | (bits > 0x7f800000u ? 0x200u | ((bits >> 13) & 0x3ffu) : 0));
  if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // subnormal half: let float addition round
    float f; std::memcpy(&f, &bits, 4); f += 0.5f;
    uint32_t r; std::memcpy(&r, &f, 4); return (uint16_t)(sign | (r - 0x3f000000u));
  }
  const uint32_t odd = (bits >> 13) & 1u;
  return (uint16_t)(sign | ((bits - 0x38000000u + 0xfffu + odd) >> 13));
}

#define OCTAVO_EACH for (int i = 0; i < 16; ++i)
OCTAVO_INLINE F32x16 f32_zero() { F32x16 r; OCTAVO_EACH r.v[i] = 0.0f; return r; }
OCTAVO_INLINE F32x16 f32_set(float x) { F32x16 r; OCTAVO_EACH r.v[i] = x; return r; }
OCTAVO_INLINE F32x16 f32_load(const float* p) { F32x16 r; std::memcpy(r.v, p, 64); return r; }
OCTAVO_INLINE void f32_store(float* p, const F32x16& a) { std::memcpy(p, a.v, 64); }
OCTAVO_INLINE F32x16 f32_load_n(const float* p, int n) { F32x16 r = f32_zero(); std::memcpy(r.v, p, sizeof(float) * (size_t)n); return r; }
OCTAVO_INLINE void f32_store_n(float* p, const F32x16& a, int n) { std::memcpy(p, a.v, sizeof(float) * (size_t)n); }
OCTAVO_INLINE F32x16 f32_load_f16(const uint16_t* p) { F32x16 r; OCTAVO_EACH r.v[i] = f16_to_f32(p[i]); return r; }
OCTAVO_INLINE void f32_store_f16(uint16_t* p, const F32x16& a) { OCTAVO_EACH p[i] = f32_to_f16(a.v[i]); }
OCTAVO_INLINE F32x16 f32_load_bf16(const uint16_t* p) { F32x16 r; OCTAVO_EACH { uint32_t b = (uint32_t)p[i] << 16; std::memcpy(&r.v[i], &b, 4); } return r; }
OCTAVO_INLINE F32x16 operator+(const F32x16& a, const F32x16& b) { F32x16 r; OCTAVO_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
OCTAVO_INLINE F32x16 operator-(const F32x16& a, const F32x16& b) { F32x16 r; OCTAVO_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
OCTAVO_INLINE F32x16 operator*(const F32x16& a, const F32x16& b) { F32x16 r; OCTAVO_EACH r.v[i] = a.v[i] * b.v[i]; return r; }
OCTAVO_INLINE F32x16 operator/(const F32x16& a, const F32x16& b) { F32x16 r; OCTAVO_EACH r.v[i] = a.v[i] / b.v[i]; return r; }
OCTAVO_INLINE F32x16 f32_fma(const F32x16& a, const F32x16& b, const F32x16& c) { F32x16 r; OCTAVO_EACH { const float t = a.v[i] * b.v[i]; r.v[i] = t + c.v[i]; } return r; }
OCTAVO_INLINE F32x16 f32_max(const F32x16& a, const F32x16& b) { F32x16 r; OCTAVO_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return r; }
OCTAVO_INLINE F32x16 f32_min(const F32x16& a, const F32x16& b) { F32x16 r; OCTAVO_EACH r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return r; }
OCTAVO_INLINE F32x16 f32_round(const F32x16& a) { F32x16 r; OCTAVO_EACH r.v[i] = std::nearbyint(a.v[i]); return r; }
OCTAVO_INLINE F32x16 f32_first(int n, const F32x16& a, const F32x16& b) { F32x16 r; OCTAVO_EACH r.v[i] = i < n ? a.v[i] : b.v[i]; return r; }
OCTAVO_INLINE F32x16 f32_exp2i(const F32x16& k) { F32x16 r; OCTAVO_EACH { uint32_t b = (uint32_t)((int32_t)k.v[i] + 127) << 23; std::memcpy(&r.v[i], &b, 4); } return r; }
OCTAVO_INLINE F32x16 f32_from_i32(const I32x16& a) { F32x16 r; OCTAVO_EACH r.v[i] = (float)a.v[i]; return r; }
OCTAVO_INLINE I32x16 i32_from_f32(const F32x16& a) { I32x16 r; OCTAVO_EACH r.v[i] = (int32_t)std::nearbyint(a.v[i]); return r; }
OCTAVO_INLINE I32x16 i32_set(int32_t x) { I32x16 r; OCTAVO_EACH r.v[i] = x; return r; }
OCTAVO_INLINE I32x16 i32_zero() { return i32_set(0); }

#endif

// bfloat16, rounded to nearest even; a NaN stays a quiet NaN.
#if defined(OCTAVO_AVX512)
OCTAVO_INLINE void f32_store_bf16(uint16_t* p, F32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i out = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(out, 16)));
}
#else
OCTAVO_INLINE void f32_store_bf16(uint16_t* p, F32x16 a) {
  uint32_t bits[16];
  std::memcpy(bits, &a, sizeof(bits));
  for (int i = 0; i < 16; ++i) {
    const uint32_t rounded = bits[i] + 0x7fffu + ((bits[i] >> 16) & 1u);
    p[i] = (uint16_t)(((bits[i] & 0x7fffffffu) > 0x7f800000u ? bits[i] | 0x400000u : rounded) >> 16);
  }
}
#endif
// Lanes must fit int8.
OCTAVO_INLINE void i32_store_i8(int8_t* p, I32x16 a) {
#if defined(OCTAVO_AVX512)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v));
#else
  int32_t t[16];
  std::memcpy(t, &a, sizeof(t));
  for (int i = 0; i < 16; ++i) p[i] = (int8_t)t[i];
#endif
}
OCTAVO_INLINE int32_t i32_sum(I32x16 a) {
#if defined(OCTAVO_AVX512)
  return _mm512_reduce_add_epi32(a.v);
#else
  int32_t t[16], sum = 0;
  std::memcpy(t, &a, sizeof(t));
  for (int i = 0; i < 16; ++i) sum += t[i];
  return sum;
#endif
}

// Horizontal reductions in one fixed order on every level: lanes i and i+8, then 4, 2, 1.
OCTAVO_INLINE float f32_sum(F32x16 a) {
#if defined(OCTAVO_AVX512)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float t[16]; f32_store(t, a);
  for (int w = 8; w >= 1; w /= 2) for (int i = 0; i < w; ++i) t[i] += t[i + w];
  return t[0];
#endif
}
OCTAVO_INLINE float f32_max_lane(F32x16 a) {
#if defined(OCTAVO_AVX512)
  return _mm512_reduce_max_ps(a.v);  // pairs lanes in the same order
#else
  float t[16]; f32_store(t, a);
  for (int w = 8; w >= 1; w /= 2) for (int i = 0; i < w; ++i) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
  return t[0];
#endif
}

// ---- pairs of 16-bit numbers ---------------------------------------------------------------------------------------
// Sixteen pairs, one per 32-bit lane; the even one lies first in memory, in the lane's low half.

#if defined(OCTAVO_AVX512)
struct I16x32 { __m512i v; };
OCTAVO_INLINE I16x32 i16_load(const void* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE I16x32 i16_load_i8(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
OCTAVO_INLINE void i16_store(void* p, I16x32 a) { _mm512_storeu_si512(p, a.v); }
OCTAVO_INLINE I16x32 i16_set_pair(uint32_t x) { return {_mm512_set1_epi32((int)x)}; }
OCTAVO_INLINE I16x32 operator&(I16x32 a, I16x32 b) { return {_mm512_and_si512(a.v, b.v)}; }
// c + a.even * b.even + a.odd * b.odd, exact while it fits.
// Not the intrinsic: GCC 12 stores every sum of an array of them to memory after each step.
OCTAVO_INLINE I32x16 i32_dot(I32x16 c, I16x32 a, I16x32 b) { __asm__("vpdpwssd %2, %1, %0" : "+v"(c.v) : "v"(a.v), "v"(b.v)); return c; }
// Lanes saturate to int16.
OCTAVO_INLINE void i32_store_i16(int16_t* p, I32x16 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(a.v)); }
// The even or odd bfloat16 of each pair.
OCTAVO_INLINE F32x16 f32_load_bf16_of_pairs(const uint16_t* p, int odd) {
  const __m512i high = _mm512_sll_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(odd ? 0 : 16));
  return {_mm512_castsi512_ps(_mm512_and_si512(high, _mm512_set1_epi32((int)0xffff0000u)))};
}
#elif defined(OCTAVO_AVX2)
struct I16x32 { __m256i a, b; };
OCTAVO_INLINE I16x32 i16_load(const void* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)}; }
OCTAVO_INLINE I16x32 i16_load_i8(const int8_t* p) { return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))}; }
OCTAVO_INLINE void i16_store(void* p, I16x32 x) { _mm256_storeu_si256((__m256i*)p, x.a); _mm256_storeu_si256((__m256i*)p + 1, x.b); }
OCTAVO_INLINE I16x32 i16_set_pair(uint32_t x) { return {_mm256_set1_epi32((int)x), _mm256_set1_epi32((int)x)}; }
OCTAVO_INLINE I32x16 i32_dot(I32x16 c, I16x32 x, I16x32 y) { return {_mm256_add_epi32(c.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(c.b, _mm256_madd_epi16(x.b, y.b))}; }
OCTAVO_INLINE void i32_store_i16(int16_t* p, I32x16 x) { _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8)); }
OCTAVO_INLINE F32x16 f32_load_bf16_of_pairs(const uint16_t* p, int odd) {
  const I16x32 x = i16_load(p);
  const __m128i shift = _mm_cvtsi32_si128(odd ? 0 : 16);
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000u);
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_sll_epi32(x.a, shift), mask)), _mm256_castsi256_ps(_mm256_and_si256(_mm256_sll_epi32(x.b, shift), mask))};
}
#else
struct I16x32 { int16_t v[32]; };
OCTAVO_INLINE I16x32 i16_load(const void* p) { I16x32 r; std::memcpy(r.v, p, 64); return r; }
OCTAVO_INLINE I16x32 i16_load_i8(const int8_t* p) { I16x32 r; for (int i = 0; i < 32; ++i) r.v[i] = p[i]; return r; }
OCTAVO_INLINE void i16_store(void* p, const I16x32& a) { std::memcpy(p, a.v, 64); }
OCTAVO_INLINE I16x32 i16_set_pair(uint32_t x) { I16x32 r; OCTAVO_EACH { r.v[2 * i] = (int16_t)x; r.v[2 * i + 1] = (int16_t)(x >> 16); } return r; }
OCTAVO_INLINE I32x16 i32_dot(const I32x16& c, const I16x32& a, const I16x32& b) { I32x16 r; OCTAVO_EACH r.v[i] = c.v[i] + a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1]; return r; }
OCTAVO_INLINE void i32_store_i16(int16_t* p, const I32x16& a) { OCTAVO_EACH p[i] = (int16_t)(a.v[i] > 32767 ? 32767 : a.v[i] < -32768 ? -32768 : a.v[i]); }
OCTAVO_INLINE F32x16 f32_load_bf16_of_pairs(const uint16_t* p, int odd) { F32x16 r; OCTAVO_EACH { uint32_t b = (uint32_t)p[2 * i + odd] << 16; std::memcpy(&r.v[i], &b, 4); } return r; }
#endif

#if defined(OCTAVO_AVX512_BF16)
// fma(a.even, b.even, fma(a.odd, b.odd, c)) for bfloat16 pairs, each rounded to nearest even; subnormal numbers count as zero.
OCTAVO_INLINE F32x16 f32_dot_bf16(F32x16 c, I16x32 a, I16x32 b) { return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)}; }
// Thirty-two consecutive values rounded to bfloat16 (nearest even, subnormal to zero).
OCTAVO_INLINE I16x32 bf16_from_f32(F32x16 first, F32x16 second) { return {(__m512i)_mm512_cvtne2ps_pbh(second.v, first.v)}; }
#endif

// ---- functions -----------------------------------------------------------------------------------------------------

// p * 2^k for integral lanes of k in -126..127.
OCTAVO_INLINE F32x16 f32_scale2i(F32x16 p, F32x16 k) {
#if defined(OCTAVO_AVX512)
  return {_mm512_scalef_ps(p.v, k.v)};
#else
  return p * f32_exp2i(k);
#endif
}

// exp(x): Cody-Waite reduction and a degree-6 polynomial (Cephes expf, S. Moshier), about 1 ulp; 0 below -87.
OCTAVO_INLINE F32x16 f32_exp(F32x16 x) {
  const F32x16 lo = f32_set(-87.33654f), hi = f32_set(88.02f);
  const F32x16 c = f32_min(hi, f32_max(lo, x));  // x second: both take the second operand when one is NaN, and a NaN must stay one
  const F32x16 k = f32_round(c * f32_set(1.44269504088896341f));
  F32x16 r = f32_fma(k, f32_set(-0.693359375f), c);
  r = f32_fma(k, f32_set(2.12194440e-4f), r);
  F32x16 p = f32_set(1.9875691500e-4f);
  p = f32_fma(p, r, f32_set(1.3981999507e-3f));
  p = f32_fma(p, r, f32_set(8.3334519073e-3f));
  p = f32_fma(p, r, f32_set(4.1665795894e-2f));
  p = f32_fma(p, r, f32_set(1.6666665459e-1f));
  p = f32_fma(p, r, f32_set(5.0000001201e-1f));
  p = f32_fma(p, r * r, r + f32_set(1.0f));
  return f32_scale2i(p, k);
}

// tanh(x) = 1 - 2 / (exp(2x) + 1); exp saturates well before float does, so the ends are exactly +-1.
OCTAVO_INLINE F32x16 f32_tanh(F32x16 x) {
  const F32x16 one = f32_set(1.0f), e = f32_exp(f32_min(f32_set(20.0f), f32_max(f32_set(-20.0f), x)) * f32_set(2.0f));
  return one - f32_set(2.0f) / (e + one);
}

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
