// File types whose packed words are words of the file, or nearly so: rows go from one into the other without a code being looked at
// alone. The layouts are those of packing.h and gguf_blocks.h. Included by packing.cc alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/gguf_blocks.h"
#include "kernels/packing.h"

namespace octavo {

constexpr size_t kLine = 64;
constexpr size_t kHalves = kRowBlock * sizeof(uint16_t);  // one float16 per row

inline bool is_dtype(const char* dtype, const char* name) { return std::strcmp(dtype, name) == 0; }

inline void put_word(uint8_t* line, int row, uint32_t word) { std::memcpy(line + 4 * row, &word, 4); }

inline uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// The float16 d, and m when there is one, from the start of a file block into the head of a unit: what follows in each.
template <int kNumHalves>
void put_head(const uint8_t*& block, int row, uint8_t*& unit) {
  for (int i = 0; i < kNumHalves; ++i) std::memcpy(unit + kHalves * i + 2 * row, block + 2 * i, 2);
  block += 2 * kNumHalves;
  unit += kHalves * kNumHalves;
}

// These types pair values i and i + 16 in a byte, as the packed words do.
inline void put_nibbles(const uint8_t* nibbles, int row, uint8_t* lines) {
  for (int j = 0; j < 4; ++j) put_word(lines + kLine * j, row, load_word(nibbles + 4 * j));
}

template <int kNumHalves>  // q4_0: d; q4_1: d and m
void put_q4(const uint8_t* block, int row, uint8_t* unit) {
  put_head<kNumHalves>(block, row, unit);
  put_nibbles(block, row, unit);
}

template <int kNumHalves>  // q5_0: d; q5_1: d and m
void put_q5(const uint8_t* block, int row, uint8_t* unit) {
  put_head<kNumHalves>(block, row, unit);
  const uint32_t fifth_bits = load_word(block);  // bit i: bit 4 of value i
  uint32_t plane = 0;
  for (int quad = 0; quad < 8; ++quad)  // the product puts bit i of four into byte i
    plane |= ((((fifth_bits >> (4 * quad)) & 15) * 0x00204081u) & 0x01010101u) << quad;
  put_nibbles(block + 4, row, unit);
  put_word(unit + kLine * 4, row, plane);
}

inline void put_q8_0(const uint8_t* block, int row, uint8_t* unit) {
  put_head<1>(block, row, unit);
  for (int j = 0; j < 8; ++j) put_word(unit + kLine * j, row, load_word(block + 4 * j) ^ 0x80808080u);
}

// Byte i of 32 holds value i of one group low and value i of the next high.
inline void put_q4_k(const uint8_t* block, int row, uint8_t* unit) {
  put_head<2>(block, row, unit);
  DecodedBlock scales;
  decode_six_bit_scales(block, scales);
  constexpr uint32_t low = 0x0f0f0f0fu, high = 0xf0f0f0f0u;
  constexpr size_t group_bytes = 4 * kLine + 2 * kRowBlock;
  for (int g = 0; g < 8; g += 2, unit += 2 * group_bytes) {
    const uint8_t* bytes = block + 12 + 16 * g;
    for (int j = 0; j < 4; ++j) {
      const uint32_t first = load_word(bytes + 4 * j), second = load_word(bytes + 16 + 4 * j);
      put_word(unit + kLine * j, row, (first & low) | ((second & low) << 4));
      put_word(unit + group_bytes + kLine * j, row, ((first >> 4) & low) | (second & high));
    }
    for (int i = 0; i < 2; ++i) {
      uint8_t* integers = unit + i * group_bytes + 4 * kLine + row;
      integers[0] = scales.scale[g + i];
      integers[kRowBlock] = scales.min[g + i];
    }
  }
}

using Put = void (*)(const uint8_t* block, int row, uint8_t* unit);

inline Put find_put(const QuantType& type) {
  constexpr struct {
    const char* name;
    Put put;
  } known[] = {{"q4_0", put_q4<1>}, {"q4_1", put_q4<2>}, {"q5_0", put_q5<1>}, {"q5_1", put_q5<2>}, {"q8_0", put_q8_0}, {"q4_k", put_q4_k}};
  for (const auto& entry : known)
    if (is_dtype(type.name, entry.name)) return entry.put;
  return nullptr;
}

}  // namespace octavo
