// Integer pieces of the quantised matmul on each ISA: code unpacking and the exact dot product of unsigned codes (0..255)
// with signed activations (-127..127).
#pragma once

#include "kernels/packing.h"
#include "kernels/simd.h"

#define OCTAVO_NOINLINE __attribute__((noinline))

namespace octavo {
namespace OCTAVO_ISA_NS {

// Four signed bytes as one 32-bit word, for broadcasting.
OCTAVO_INLINE int32_t load_quad(const int8_t* a) {
  int32_t word;
  std::memcpy(&word, a, 4);
  return word;
}

#if defined(OCTAVO_AVX512)

constexpr int kQuantRowsPerTile = 12;  // 12 int32 and 12 float accumulators, 4 lines of codes, scales: 32 registers
constexpr int kFloatRowsPerTile = 12;
constexpr int kHalfRowsPerTile = 12;
constexpr bool kSignedBytes = false;   // kQ8 codes are used with their zero point of 128

OCTAVO_INLINE U8x64 u8_load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE U8x64 u8_low4(U8x64 x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
OCTAVO_INLINE U8x64 u8_high4(U8x64 x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
// codes | ((plane moved left by kShift, or right when negative) & kMask), bits staying within their byte by the mask.
template <int kShift, int kMask>
OCTAVO_INLINE U8x64 u8_or_plane(U8x64 codes, U8x64 plane) {
  const __m512i moved = kShift > 0 ? _mm512_slli_epi16(plane.v, kShift > 0 ? kShift : 0)
                                   : kShift < 0 ? _mm512_srli_epi16(plane.v, kShift < 0 ? -kShift : 0) : plane.v;
  return {_mm512_ternarylogic_epi32(moved, _mm512_set1_epi8(kMask), codes.v, 0xEA)};  // (a & b) | c
}
// As they are; opaque to the compiler, which would rather load them again for each row of the tile than keep them in registers.
OCTAVO_INLINE U8x64 u8_signed(U8x64 x) { __asm__("" : "+v"(x.v)); return x; }
OCTAVO_INLINE F32x16 f32_load_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
OCTAVO_INLINE F32x16 f32_load_s8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}

// acc[row] + dot of 16 consecutive k: four quads of codes with a[0..16).
template <PackedFormat>
OCTAVO_INLINE I32x16 dot16(I32x16 acc, const U8x64 (&w)[4], const int8_t* a) {
  for (int j = 0; j < 4; ++j) acc.v = _mm512_dpbusd_epi32(acc.v, w[j].v, _mm512_set1_epi32(load_quad(a + 4 * j)));
  return acc;
}

#elif defined(OCTAVO_AVX2)

constexpr int kQuantRowsPerTile = 4;
constexpr int kFloatRowsPerTile = 3;  // float32: two chains of two registers each
constexpr int kHalfRowsPerTile = 2;   // float16, bfloat16: their weights take registers as well
constexpr bool kSignedBytes = true;   // kQ8 codes lose their zero point on load

OCTAVO_INLINE U8x64 u8_load(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
OCTAVO_INLINE U8x64 u8_and(U8x64 x, int mask) {
  const __m256i m = _mm256_set1_epi8((char)mask);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
OCTAVO_INLINE U8x64 u8_low4(U8x64 x) { return u8_and(x, 15); }
OCTAVO_INLINE U8x64 u8_high4(U8x64 x) { return u8_and({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}, 15); }
template <int kShift>
OCTAVO_INLINE __m256i shift_epi16(__m256i x) {
  return kShift > 0 ? _mm256_slli_epi16(x, kShift > 0 ? kShift : 0) : kShift < 0 ? _mm256_srli_epi16(x, kShift < 0 ? -kShift : 0) : x;
}
template <int kShift, int kMask>
OCTAVO_INLINE U8x64 u8_or_plane(U8x64 codes, U8x64 plane) {
  const U8x64 bits = u8_and({shift_epi16<kShift>(plane.a), shift_epi16<kShift>(plane.b)}, kMask);
  return {_mm256_or_si256(codes.a, bits.a), _mm256_or_si256(codes.b, bits.b)};
}
OCTAVO_INLINE U8x64 u8_signed(U8x64 x) {
  const __m256i top = _mm256_set1_epi8((char)0x80);
  return {_mm256_xor_si256(x.a, top), _mm256_xor_si256(x.b, top)};
}
OCTAVO_INLINE __m128i load_8_bytes(const uint8_t* p) { return _mm_loadl_epi64((const __m128i*)p); }
OCTAVO_INLINE F32x16 f32_load_u8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8_bytes(p))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8_bytes(p + 8)))};
}
OCTAVO_INLINE F32x16 f32_load_s8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8_bytes(p))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8_bytes(p + 8)))};
}

// vpmaddubsw adds two products into 16 bits: with codes up to 15 all 8 products of 4 quads fit (8 * 15 * 127 = 15,240), up to 31
// too (31,496), up to 63 those of 2 quads (32,004). Signed bytes: |w| <= 128 times a with w's sign, one quad (32,512).
template <PackedFormat kFormat>
OCTAVO_INLINE __m256i dot16_half(__m256i acc, __m256i w0, __m256i w1, __m256i w2, __m256i w3, const __m256i (&q)[4]) {
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (kFormat == PackedFormat::kQ8) {
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w0), _mm256_sign_epi8(q[0], w0)), ones));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w1), _mm256_sign_epi8(q[1], w1)), ones));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w2), _mm256_sign_epi8(q[2], w2)), ones));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w3), _mm256_sign_epi8(q[3], w3)), ones));
  }
  const __m256i front = _mm256_add_epi16(_mm256_maddubs_epi16(w0, q[0]), _mm256_maddubs_epi16(w1, q[1]));
  const __m256i back = _mm256_add_epi16(_mm256_maddubs_epi16(w2, q[2]), _mm256_maddubs_epi16(w3, q[3]));
  if constexpr (kFormat == PackedFormat::kQ6)
    return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(front, ones), _mm256_madd_epi16(back, ones)));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_add_epi16(front, back), ones));
}
template <PackedFormat kFormat>
OCTAVO_INLINE I32x16 dot16(I32x16 acc, const U8x64 (&w)[4], const int8_t* a) {
  const __m256i q[4] = {_mm256_set1_epi32(load_quad(a)), _mm256_set1_epi32(load_quad(a + 4)), _mm256_set1_epi32(load_quad(a + 8)),
                        _mm256_set1_epi32(load_quad(a + 12))};
  return {dot16_half<kFormat>(acc.a, w[0].a, w[1].a, w[2].a, w[3].a, q), dot16_half<kFormat>(acc.b, w[0].b, w[1].b, w[2].b, w[3].b, q)};
}

#else

constexpr int kQuantRowsPerTile = 4;
constexpr int kFloatRowsPerTile = 4;
constexpr int kHalfRowsPerTile = 4;
constexpr bool kSignedBytes = false;

OCTAVO_INLINE U8x64 u8_load(const uint8_t* p) { U8x64 r; std::memcpy(r.v, p, 64); return r; }
OCTAVO_INLINE U8x64 u8_low4(const U8x64& x) { U8x64 r; for (int i = 0; i < 64; ++i) r.v[i] = x.v[i] & 15; return r; }
OCTAVO_INLINE U8x64 u8_high4(const U8x64& x) { U8x64 r; for (int i = 0; i < 64; ++i) r.v[i] = x.v[i] >> 4; return r; }
template <int kShift, int kMask>
OCTAVO_INLINE U8x64 u8_or_plane(const U8x64& codes, const U8x64& plane) {
  U8x64 r;
  for (int i = 0; i < 64; ++i) {
    const int moved = kShift > 0 ? plane.v[i] << (kShift > 0 ? kShift : 0) : plane.v[i] >> (kShift < 0 ? -kShift : 0);
    r.v[i] = (uint8_t)(codes.v[i] | (moved & kMask));
  }
  return r;
}
OCTAVO_INLINE U8x64 u8_signed(const U8x64& x) { return x; }
OCTAVO_INLINE F32x16 f32_load_u8(const uint8_t* p) { F32x16 r; OCTAVO_EACH r.v[i] = (float)p[i]; return r; }
OCTAVO_INLINE F32x16 f32_load_s8(const uint8_t* p) { F32x16 r; OCTAVO_EACH r.v[i] = (float)(int8_t)p[i]; return r; }

// In vectors of 16 bytes, which any SIMD machine has.
typedef int16_t I16x8 __attribute__((vector_size(16)));
typedef uint16_t U16x8 __attribute__((vector_size(16)));
typedef int32_t I32x4 __attribute__((vector_size(16)));
typedef uint32_t U32x4 __attribute__((vector_size(16)));
OCTAVO_INLINE I16x8 splat_pair(int8_t low, int8_t high) {
  const int32_t pair = (int32_t)((uint32_t)(uint16_t)low | (uint32_t)(uint16_t)high << 16);
  return (I16x8)I32x4{pair, pair, pair, pair};
}
// Sums of the products of adjacent pairs. A code times an activation fits 16 bits: 255 * 127 < 2^15.
OCTAVO_INLINE I32x4 multiply_pairs(U16x8 codes, I16x8 a) {
#if defined(__SSE2__)
  return (I32x4)__builtin_ia32_pmaddwd128((I16x8)codes, a);
#else
  const I32x4 products = (I32x4)((I16x8)codes * a);
  return ((I32x4)((U32x4)products << 16) >> 16) + (products >> 16);
#endif
}
// The even and the odd bytes of each row's quad, as pairs.
template <PackedFormat>
OCTAVO_INLINE I32x16 dot16(const I32x16& start, const U8x64 (&w)[4], const int8_t* a) {
  I32x16 acc;
  for (int part = 0; part < 4; ++part) {  // four rows
    I32x4 sum;
    std::memcpy(&sum, start.v + 4 * part, 16);
    for (int j = 0; j < 4; ++j) {
      U16x8 codes;
      std::memcpy(&codes, w[j].v + 16 * part, 16);
      sum += multiply_pairs(codes & 255, splat_pair(a[4 * j], a[4 * j + 2]));
      sum += multiply_pairs(codes >> 8, splat_pair(a[4 * j + 1], a[4 * j + 3]));
    }
    std::memcpy(acc.v + 4 * part, &sum, 16);
  }
  return acc;
}

#endif

// The four quads of half kHalf (k 16 * kHalf .. + 16) of one group's code lines, as unsigned codes (kQ8 with kSignedBytes: signed).
template <PackedFormat kFormat, int kHalf>
OCTAVO_INLINE void load_codes(const uint8_t* lines, U8x64 (&w)[4]) {
  if constexpr (kFormat == PackedFormat::kQ8) {
    for (int j = 0; j < 4; ++j) w[j] = u8_signed(u8_load(lines + 64 * (4 * kHalf + j)));
    return;
  }
  for (int j = 0; j < 4; ++j) w[j] = kHalf == 0 ? u8_low4(u8_load(lines + 64 * j)) : u8_high4(u8_load(lines + 64 * j));
  if constexpr (kFormat == PackedFormat::kQ5) {
    const U8x64 plane = u8_load(lines + 256);  // bit 4 * kHalf + j to bit 4
    w[0] = u8_or_plane<4 - 4 * kHalf, 16>(w[0], plane);
    w[1] = u8_or_plane<3 - 4 * kHalf, 16>(w[1], plane);
    w[2] = u8_or_plane<2 - 4 * kHalf, 16>(w[2], plane);
    w[3] = u8_or_plane<1 - 4 * kHalf, 16>(w[3], plane);
  } else if constexpr (kFormat == PackedFormat::kQ6) {
    const U8x64 plane = u8_load(lines + 256 + 64 * kHalf);  // bits 2j, 2j + 1 to bits 4, 5
    w[0] = u8_or_plane<4, 48>(w[0], plane);
    w[1] = u8_or_plane<2, 48>(w[1], plane);
    w[2] = u8_or_plane<0, 48>(w[2], plane);
    w[3] = u8_or_plane<-2, 48>(w[3], plane);
  }
}

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
