// GGML's quantised blocks, decoded: bytes of a file -> unsigned codes, integer scales and the float16 bits of d and m.
//
// One function per type, all exact. The bit layouts are ggml's (ggml-common.h, block_q4_0 ... block_q6_K). Included by
// packing.cc alone.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/packing.h"

namespace octavo {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  uint32_t bits;
  if (magnitude >= 0x7c00u) {
    bits = 0x7f800000u | ((magnitude & 0x3ffu) << 13);
  } else if (magnitude >= 0x400u) {
    bits = (magnitude << 13) + 0x38000000u;
  } else {  // zero and subnormals: an integer multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
  }
  bits |= sign;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline float bf16_to_float(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t load_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

// One block of a row: codes[i] is value i's unsigned code, scale and min hold one integer per group of a 256-value block
// (scale as a signed or unsigned byte, see QuantType::scales), d and m float16 bits.
struct DecodedBlock {
  uint8_t codes[kSuperBlock];
  uint8_t scale[16], min[16];
  uint16_t d, m;
};

// nibbles: byte i holds value i low and value i + half high.
inline void decode_nibbles(const uint8_t* q, int half, uint8_t* codes) {
  for (int i = 0; i < half; ++i) {
    codes[i] = q[i] & 15;
    codes[i + half] = q[i] >> 4;
  }
}

// Bit i of the 32 bits at qh is bit 4 of value i.
inline void decode_fifth_bits(const uint8_t* qh, uint8_t* codes) {
  for (int i = 0; i < kGroup; ++i) codes[i] |= static_cast<uint8_t>(((qh[i / 8] >> (i % 8)) & 1) << 4);
}

inline void decode_q4_0(const uint8_t* b, DecodedBlock& out) {  // d, 16 nibble pairs
  out.d = load_u16(b);
  decode_nibbles(b + 2, 16, out.codes);
}

inline void decode_q4_1(const uint8_t* b, DecodedBlock& out) {  // d, m, 16 nibble pairs
  out.d = load_u16(b);
  out.m = load_u16(b + 2);
  decode_nibbles(b + 4, 16, out.codes);
}

inline void decode_q5_0(const uint8_t* b, DecodedBlock& out) {  // d, 32 high bits, 16 nibble pairs
  out.d = load_u16(b);
  decode_nibbles(b + 6, 16, out.codes);
  decode_fifth_bits(b + 2, out.codes);
}

inline void decode_q5_1(const uint8_t* b, DecodedBlock& out) {  // d, m, 32 high bits, 16 nibble pairs
  out.d = load_u16(b);
  out.m = load_u16(b + 2);
  decode_nibbles(b + 8, 16, out.codes);
  decode_fifth_bits(b + 4, out.codes);
}

inline void decode_q8_0(const uint8_t* b, DecodedBlock& out) {  // d, 32 signed bytes; stored with offset 128
  out.d = load_u16(b);
  for (int i = 0; i < kGroup; ++i) out.codes[i] = b[2 + i] ^ 0x80;
}

inline void decode_q2_k(const uint8_t* b, DecodedBlock& out) {  // 16 (scale, min) nibbles, 64 x 4 two-bit codes, d, dmin
  for (int i = 0; i < 16; ++i) {
    out.scale[i] = b[i] & 15;
    out.min[i] = b[i] >> 4;
  }
  for (int half = 0; half < 2; ++half)
    for (int plane = 0; plane < 4; ++plane)
      for (int i = 0; i < 32; ++i) out.codes[128 * half + 32 * plane + i] = (b[16 + 32 * half + i] >> (2 * plane)) & 3;
  out.d = load_u16(b + 80);
  out.m = load_u16(b + 82);
}

// 32 high bits x 8, 64 x 4 two-bit codes, 16 six-bit scales with offset 32, d. A clear high bit means -4, so that with zero
// point 4 the code is simply low | high << 2.
inline void decode_q3_k(const uint8_t* b, DecodedBlock& out) {
  const uint8_t *high = b, *low = b + 32, *scales = b + 96;
  for (int half = 0; half < 2; ++half)
    for (int plane = 0; plane < 4; ++plane)
      for (int i = 0; i < 32; ++i) {
        const int bit = (high[i] >> (4 * half + plane)) & 1;
        out.codes[128 * half + 32 * plane + i] = static_cast<uint8_t>(((low[32 * half + i] >> (2 * plane)) & 3) | (bit << 2));
      }
  for (int i = 0; i < 16; ++i) {
    const int low4 = (scales[i % 8] >> (4 * (i / 8))) & 15, high2 = (scales[8 + i % 4] >> (2 * (i / 4))) & 3;
    out.scale[i] = static_cast<uint8_t>((low4 | (high2 << 4)) - 32);
  }
  out.d = load_u16(b + 108);
}

// Eight six-bit scales and minima in 12 bytes, shared by q4_k and q5_k.
inline void decode_six_bit_scales(const uint8_t* s, DecodedBlock& out) {
  for (int i = 0; i < 4; ++i) {
    out.scale[i] = s[i] & 63;
    out.min[i] = s[i + 4] & 63;
    out.scale[i + 4] = static_cast<uint8_t>((s[i + 8] & 15) | ((s[i] >> 6) << 4));
    out.min[i + 4] = static_cast<uint8_t>((s[i + 8] >> 4) | ((s[i + 4] >> 6) << 4));
  }
}

inline void decode_q4_k(const uint8_t* b, DecodedBlock& out) {  // d, dmin, 12 bytes of scales, 4 x 32 nibble pairs
  out.d = load_u16(b);
  out.m = load_u16(b + 2);
  decode_six_bit_scales(b + 4, out);
  for (int j = 0; j < 4; ++j) decode_nibbles(b + 16 + 32 * j, 32, out.codes + 64 * j);
}

inline void decode_q5_k(const uint8_t* b, DecodedBlock& out) {  // d, dmin, scales, 32 x 8 high bits, 4 x 32 nibble pairs
  out.d = load_u16(b);
  out.m = load_u16(b + 2);
  decode_six_bit_scales(b + 4, out);
  for (int j = 0; j < 4; ++j) decode_nibbles(b + 48 + 32 * j, 32, out.codes + 64 * j);
  for (int j = 0; j < 8; ++j)
    for (int i = 0; i < 32; ++i) out.codes[32 * j + i] |= static_cast<uint8_t>(((b[16 + i] >> j) & 1) << 4);
}

inline void decode_q6_k(const uint8_t* b, DecodedBlock& out) {  // 2 x 64 nibble pairs, 2 x 32 x 4 two-bit tops, 16 int8 scales, d
  for (int half = 0; half < 2; ++half) {
    uint8_t* codes = out.codes + 128 * half;
    decode_nibbles(b + 64 * half, 64, codes);
    for (int plane = 0; plane < 4; ++plane)
      for (int i = 0; i < 32; ++i) codes[32 * plane + i] |= static_cast<uint8_t>(((b[128 + 32 * half + i] >> (2 * plane)) & 3) << 4);
  }
  std::memcpy(out.scale, b + 192, 16);
  out.d = load_u16(b + 208);
}

// What a quantised file type is and how its packed form is described.
struct QuantType {
  const char* name;
  int values, bytes;  // per block of the file
  PackedFormat format;
  int group;          // values per scale
  ScaleKind scales;
  bool has_min;
  int zero_point;
  void (*decode)(const uint8_t* block, DecodedBlock& out);
};

constexpr QuantType kQuantTypes[] = {
    {"q4_0", 32, 18, PackedFormat::kQ4, 32, ScaleKind::kHalf, false, 8, decode_q4_0},
    {"q4_1", 32, 20, PackedFormat::kQ4, 32, ScaleKind::kHalf, true, 0, decode_q4_1},
    {"q5_0", 32, 22, PackedFormat::kQ5, 32, ScaleKind::kHalf, false, 16, decode_q5_0},
    {"q5_1", 32, 24, PackedFormat::kQ5, 32, ScaleKind::kHalf, true, 0, decode_q5_1},
    {"q8_0", 32, 34, PackedFormat::kQ8, 32, ScaleKind::kHalf, false, 128, decode_q8_0},
    {"q2_k", 256, 84, PackedFormat::kQ4, 16, ScaleKind::kSuperU8, true, 0, decode_q2_k},
    {"q3_k", 256, 110, PackedFormat::kQ4, 16, ScaleKind::kSuperS8, false, 4, decode_q3_k},
    {"q4_k", 256, 144, PackedFormat::kQ4, 32, ScaleKind::kSuperU8, true, 0, decode_q4_k},
    {"q5_k", 256, 176, PackedFormat::kQ5, 32, ScaleKind::kSuperU8, true, 0, decode_q5_k},
    {"q6_k", 256, 210, PackedFormat::kQ6, 16, ScaleKind::kSuperS8, false, 32, decode_q6_k},
};

// Null when dtype is not a quantised type known here.
inline const QuantType* find_quant_type(const char* dtype) {
  for (const QuantType& type : kQuantTypes)
    if (std::strcmp(type.name, dtype) == 0) return &type;
  return nullptr;
}

}  // namespace octavo
