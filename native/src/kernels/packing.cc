#include "kernels/packing.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels/gguf_blocks.h"
#include "kernels/packing_words.h"

namespace octavo {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

int float_bytes(const char* dtype) {  // 0 when not a float type
  if (is_dtype(dtype, "f32")) return 4;
  return is_dtype(dtype, "f16") || is_dtype(dtype, "bf16") ? 2 : 0;
}

// Weights are streamed once per token: 2 MiB pages keep the page walks out of that stream, and their first touch is cheap.
std::shared_ptr<uint8_t> allocate(size_t bytes) {
  const size_t alignment = bytes >= 2 * kHugePage ? kHugePage : kLine;
  void* data = std::aligned_alloc(alignment, round_up(bytes, alignment));
  if (!data) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHugePage) madvise(data, round_up(bytes, alignment), MADV_HUGEPAGE);  // a hint: failure changes nothing
#endif
  return {static_cast<uint8_t*>(data), [](uint8_t* p) { std::free(p); }};
}

size_t code_bytes(PackedFormat format) {  // per group of 32 k and 16 rows
  switch (format) {
    case PackedFormat::kQ4: return 4 * kLine;
    case PackedFormat::kQ5: return 5 * kLine;
    case PackedFormat::kQ6: return 6 * kLine;
    case PackedFormat::kQ8: return 8 * kLine;
    default: return 0;
  }
}

size_t head_bytes(const PackedMatrix& m) { return m.has_min ? 2 * kHalves : kHalves; }

size_t group_bytes(const PackedMatrix& m) {
  const size_t kinds = m.has_min ? 2 : 1;
  return code_bytes(m.format) + (m.scales == ScaleKind::kHalf ? 0 : kinds * static_cast<size_t>(kGroup / m.group) * kRowBlock);
}

int unit_values(const PackedMatrix& m) { return m.scales == ScaleKind::kHalf ? kGroup : kSuperBlock; }

size_t unit_bytes(const PackedMatrix& m) { return head_bytes(m) + static_cast<size_t>(unit_values(m) / kGroup) * group_bytes(m); }

size_t element_bytes(PackedFormat format) { return format == PackedFormat::kF32 ? 4 : 2; }

PackedFormat float_format(const char* dtype) {
  return is_dtype(dtype, "f16") ? PackedFormat::kF16 : is_dtype(dtype, "bf16") ? PackedFormat::kBF16 : PackedFormat::kF32;
}

// ---- quantised rows --------------------------------------------------------------------------------------------------

// The eight quads of one row's 32 codes as words: byte i of word j is value 4j + i.
struct Quads {
  uint32_t word[8];
  explicit Quads(const uint8_t* codes) { std::memcpy(word, codes, sizeof(word)); }
};

// One row's 32 codes into the interleaved lines of its group.
void put_codes(PackedFormat format, const uint8_t* codes, int row, uint8_t* lines) {
  const Quads q(codes);
  if (format == PackedFormat::kQ8) {
    for (int j = 0; j < 8; ++j) put_word(lines + kLine * j, row, q.word[j]);
    return;
  }
  constexpr uint32_t low4 = 0x0f0f0f0fu, low2 = 0x03030303u, low1 = 0x01010101u;
  for (int j = 0; j < 4; ++j) put_word(lines + kLine * j, row, (q.word[j] & low4) | ((q.word[j + 4] & low4) << 4));
  if (format == PackedFormat::kQ5) {
    uint32_t plane = 0;
    for (int j = 0; j < 8; ++j) plane |= ((q.word[j] >> 4) & low1) << j;
    put_word(lines + kLine * 4, row, plane);
  } else if (format == PackedFormat::kQ6) {
    for (int h = 0; h < 2; ++h) {
      uint32_t plane = 0;
      for (int j = 0; j < 4; ++j) plane |= ((q.word[4 * h + j] >> 4) & low2) << (2 * j);
      put_word(lines + kLine * (4 + h), row, plane);
    }
  }
}

void put_half(uint8_t* halves, int row, uint16_t bits) { std::memcpy(halves + 2 * row, &bits, 2); }

// One row's decoded file block into the unit of the same values.
void put_block(const PackedMatrix& m, const DecodedBlock& block, int row, uint8_t* unit) {
  put_half(unit, row, block.d);
  if (m.has_min) put_half(unit + kHalves, row, block.m);
  uint8_t* group = unit + head_bytes(m);
  const int parts = m.scales == ScaleKind::kHalf ? 0 : kGroup / m.group;  // integer scales per group
  for (int g = 0; g < unit_values(m) / kGroup; ++g, group += group_bytes(m)) {
    put_codes(m.format, block.codes + g * kGroup, row, group);
    uint8_t* integers = group + code_bytes(m.format) + row;
    for (int i = 0; i < parts; ++i) integers[kRowBlock * i] = block.scale[g * parts + i];
    if (!m.has_min) continue;
    for (int i = 0; i < parts; ++i) integers[kRowBlock * (parts + i)] = block.min[g * parts + i];
  }
}

void pack_quantised(PackedMatrix& m, const QuantType& type, Put put, const uint8_t* raw, int b) {
  uint8_t* out = m.data + static_cast<size_t>(b) * m.block_bytes;
  const size_t blocks = static_cast<size_t>(m.k / type.values), row_stride = blocks * type.bytes, unit = unit_bytes(m);
  if ((b + 1) * kRowBlock > m.n) std::memset(out, 0, m.block_bytes);  // rows of padding: scales of zero
  std::memset(out + blocks * unit, 0, m.block_bytes - blocks * unit);
  const int rows = std::min(kRowBlock, m.n - b * kRowBlock);
  const uint8_t* source = raw + static_cast<size_t>(b) * kRowBlock * row_stride;
  for (size_t i = 0; i < blocks; ++i, source += type.bytes, out += unit) {  // a unit at a time: its lines are written whole
    for (int row = 0; row < rows; ++row) {
      if (put) {
        put(source + row * row_stride, row, out);
        continue;
      }
      DecodedBlock block;
      type.decode(source + row * row_stride, block);
      put_block(m, block, row, out);
    }
  }
}

// One row's 32 codes out of the lines of its group: put_codes the other way.
void take_codes(PackedFormat format, const uint8_t* lines, int row, uint8_t* codes) {
  constexpr uint32_t low4 = 0x0f0f0f0fu, low2 = 0x03030303u, low1 = 0x01010101u;
  const auto word_of = [=](int line) { return load_word(lines + kLine * line + 4 * row); };
  uint32_t words[8];
  for (int j = 0; j < 8; ++j) {
    if (format == PackedFormat::kQ8) {
      words[j] = word_of(j);
      continue;
    }
    words[j] = (word_of(j % 4) >> (j / 4 * 4)) & low4;
    if (format == PackedFormat::kQ5) words[j] |= ((word_of(4) >> j) & low1) << 4;
    if (format == PackedFormat::kQ6) words[j] |= ((word_of(4 + j / 4) >> (2 * (j % 4))) & low2) << 4;
  }
  std::memcpy(codes, words, sizeof(words));
}

// put_block the other way.
void take_block(const PackedMatrix& m, const uint8_t* unit, int row, DecodedBlock& block) {
  block.d = load_u16(unit + 2 * row);
  if (m.has_min) block.m = load_u16(unit + kHalves + 2 * row);
  const uint8_t* group = unit + head_bytes(m);
  const int parts = m.scales == ScaleKind::kHalf ? 0 : kGroup / m.group;
  for (int g = 0; g < unit_values(m) / kGroup; ++g, group += group_bytes(m)) {
    take_codes(m.format, group, row, block.codes + g * kGroup);
    const uint8_t* integers = group + code_bytes(m.format) + row;
    for (int i = 0; i < parts; ++i) block.scale[g * parts + i] = integers[kRowBlock * i];
    for (int i = 0; m.has_min && i < parts; ++i) block.min[g * parts + i] = integers[kRowBlock * (parts + i)];
  }
}

// ---- float rows ------------------------------------------------------------------------------------------------------

// Rows of elements of the packed type, `stride` bytes apart, into block b.
template <class T>
void interleave(PackedMatrix& m, const uint8_t* rows, size_t stride, int b) {
  uint8_t* out = m.data + static_cast<size_t>(b) * m.block_bytes;
  const int count = std::min(kRowBlock, m.n - b * kRowBlock);
  T line[kRowBlock] = {};  // rows of padding stay zero
  for (int k = 0; k < m.k; ++k) {
    for (int row = 0; row < count; ++row) std::memcpy(&line[row], rows + row * stride + sizeof(T) * k, sizeof(T));
    std::memcpy(out + sizeof(line) * k, line, sizeof(line));
  }
  const size_t used = sizeof(line) * m.k;
  std::memset(out + used, 0, m.block_bytes - used);
}

void pack_widened(PackedMatrix& m, const char* dtype, const uint8_t* raw, int b, float* values /* [16][k] */) {
  const size_t stride = row_bytes(dtype, m.k);
  for (int row = 0; row < kRowBlock && b * kRowBlock + row < m.n; ++row)
    dequantize_row(dtype, raw + static_cast<size_t>(b * kRowBlock + row) * stride, m.k, values + static_cast<size_t>(row) * m.k);
  interleave<float>(m, reinterpret_cast<const uint8_t*>(values), sizeof(float) * m.k, b);
}

// Group g of a decoded block in float32: scale * (code - zero point), then + or - the minimum. Format: QuantType or PackedMatrix.
template <class Format>
void dequantize_group(const Format& type, const DecodedBlock& block, int g, float* out) {
  float scale = half_to_float(block.d), min = type.has_min ? half_to_float(block.m) : 0.0f;
  if (type.scales == ScaleKind::kSuperU8) {
    scale *= static_cast<float>(block.scale[g]);
    min *= -static_cast<float>(block.min[g]);
  } else if (type.scales == ScaleKind::kSuperS8) {
    scale *= static_cast<float>(static_cast<int8_t>(block.scale[g]));
  }
  const uint8_t* codes = block.codes + g * type.group;
  for (int i = 0; i < type.group; ++i) {
    const float value = scale * static_cast<float>(codes[i] - type.zero_point);
    out[i] = type.has_min ? value + min : value;
  }
}

void check_size(const PackedMatrix& m, const char* dtype) {
  if (m.quantised() && m.k > kMaxQuantisedK)
    refuse("k = " + std::to_string(m.k) + " of a " + dtype + " matrix exceeds " + std::to_string(kMaxQuantisedK));
  if (m.block_bytes > std::numeric_limits<size_t>::max() / static_cast<size_t>(m.num_blocks))
    refuse(std::string("a ") + dtype + " matrix of " + std::to_string(m.n) + " x " + std::to_string(m.k) + " does not fit in memory");
}

}  // namespace

size_t row_bytes(const char* dtype, int k) {
  const QuantType* type = find_quant_type(dtype);
  const int values = type ? type->values : 1, bytes = type ? type->bytes : float_bytes(dtype);
  if (bytes == 0)
    refuse(std::string("dtype '") + dtype + "' cannot be packed; known: f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k");
  if (k < 1 || k % values != 0)
    refuse("k = " + std::to_string(k) + " is not a positive multiple of " + std::to_string(values) + ", the block of " + dtype);
  return static_cast<size_t>(k / values) * bytes;
}

std::unique_ptr<PackedMatrix> pack_plan(const char* dtype, int n, int k, bool widen_to_f32) {
  row_bytes(dtype, k);  // checks both
  if (n < 1 || n > std::numeric_limits<int>::max() - kRowBlock) refuse("n = " + std::to_string(n) + " is not a number of rows");
  auto m = std::make_unique<PackedMatrix>();
  m->n = n;
  m->k = k;
  m->num_blocks = (n + kRowBlock - 1) / kRowBlock;
  m->data = nullptr;
  const QuantType* type = widen_to_f32 ? nullptr : find_quant_type(dtype);
  if (type) {
    m->format = type->format;
    m->group = type->group;
    m->scales = type->scales;
    m->has_min = type->has_min;
    m->zero_point = type->zero_point;
    m->block_bytes = round_up(static_cast<size_t>(k / unit_values(*m)) * unit_bytes(*m), kLine);
  } else {
    m->format = widen_to_f32 ? PackedFormat::kF32 : float_format(dtype);
    m->group = m->zero_point = 0;
    m->scales = ScaleKind::kNone;
    m->has_min = false;
    m->block_bytes = round_up(static_cast<size_t>(k) * kRowBlock * element_bytes(m->format), kLine);
  }
  check_size(*m, dtype);
  m->bytes = m->block_bytes * static_cast<size_t>(m->num_blocks);
  return m;
}

void pack_allocate(const std::vector<PackedMatrix*>& matrices) {
  size_t total = 0;  // block_bytes, so bytes, are whole lines
  for (const PackedMatrix* m : matrices) {
    if (m->bytes > std::numeric_limits<size_t>::max() - kHugePage - total) throw std::bad_alloc();
    total += m->bytes;
  }
  const std::shared_ptr<uint8_t> storage = allocate(total);
  size_t offset = 0;
  for (PackedMatrix* m : matrices) {
    m->storage = storage;
    m->data = storage.get() + offset;
    offset += m->bytes;
  }
}

std::unique_ptr<PackedMatrix> pack_begin(const char* dtype, int n, int k, bool widen_to_f32) {
  auto m = pack_plan(dtype, n, k, widen_to_f32);
  pack_allocate({m.get()});
  return m;
}

void pack_blocks(PackedMatrix& matrix, const char* dtype, const uint8_t* raw, int block_begin, int block_end) {
  const QuantType* type = find_quant_type(dtype);
  if (matrix.quantised()) {
    const Put put = find_put(*type);
    for (int b = block_begin; b < block_end; ++b) pack_quantised(matrix, *type, put, raw, b);
  } else if (!type && float_format(dtype) == matrix.format) {
    const size_t stride = row_bytes(dtype, matrix.k);
    const auto pack = matrix.format == PackedFormat::kF32 ? interleave<uint32_t> : interleave<uint16_t>;
    for (int b = block_begin; b < block_end; ++b) pack(matrix, raw + b * kRowBlock * stride, stride, b);
  } else {
    const std::unique_ptr<float[]> values(new float[static_cast<size_t>(kRowBlock) * matrix.k]);
    for (int b = block_begin; b < block_end; ++b) pack_widened(matrix, dtype, raw, b, values.get());
  }
}

void dequantize_row(const char* dtype, const uint8_t* row, int k, float* out) {
  row_bytes(dtype, k);  // checks both
  const QuantType* type = find_quant_type(dtype);
  if (!type) {
    const PackedFormat format = float_format(dtype);
    if (format == PackedFormat::kF32) std::memcpy(out, row, sizeof(float) * static_cast<size_t>(k));
    else if (format == PackedFormat::kF16) std::generate_n(out, k, [&, i = 0]() mutable { return half_to_float(load_u16(row + 2 * i++)); });
    else std::generate_n(out, k, [&, i = 0]() mutable { return bf16_to_float(load_u16(row + 2 * i++)); });
    return;
  }
  DecodedBlock block;
  for (int begin = 0; begin < k; begin += type->values, row += type->bytes) {
    type->decode(row, block);
    for (int g = 0; g < type->values / type->group; ++g) dequantize_group(*type, block, g, out + begin + g * type->group);
  }
}

void unpack_row(const PackedMatrix& matrix, int row, float* out) {
  const uint8_t* unit = matrix.data + static_cast<size_t>(row / kRowBlock) * matrix.block_bytes;
  const int lane = row % kRowBlock;
  if (!matrix.quantised()) {
    const uint8_t* element = unit + lane * element_bytes(matrix.format);
    for (int i = 0; i < matrix.k; ++i, element += kRowBlock * element_bytes(matrix.format)) {
      if (matrix.format == PackedFormat::kF32) std::memcpy(out + i, element, sizeof(float));
      else out[i] = matrix.format == PackedFormat::kF16 ? half_to_float(load_u16(element)) : bf16_to_float(load_u16(element));
    }
    return;
  }
  DecodedBlock block;
  for (int begin = 0; begin < matrix.k; begin += unit_values(matrix), unit += unit_bytes(matrix)) {
    take_block(matrix, unit, lane, block);
    for (int g = 0; g < unit_values(matrix) / matrix.group; ++g) dequantize_group(matrix, block, g, out + begin + g * matrix.group);
  }
}

}  // namespace octavo
