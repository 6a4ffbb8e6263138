// Packing a tile of keys and values to a byte each, with a scale per token, and back (kernels.h has the layout).
//
// A scale has 16 significant bits, so that code * scale is exact in float32, and is the least such number that is not below a 127th of the
// greatest magnitude. So what was packed and unpacked packs to the same bytes again: the loss does not add up.

namespace octavo {
namespace OCTAVO_ISA_NS {

// Sixteen neighbouring values of a tile part, from element i on.
template <KVType type>
OCTAVO_INLINE F32x16 load_values(const uint8_t* part, size_t i) {
  if constexpr (type == KVType::kF32) return f32_load((const float*)part + i);
  else if constexpr (type == KVType::kF16) return f32_load_f16((const uint16_t*)part + i);
  else return f32_load_bf16((const uint16_t*)part + i);
}

template <KVType type>
OCTAVO_INLINE void store_values(uint8_t* part, size_t i, const F32x16& a) {
  if constexpr (type == KVType::kF32) f32_store((float*)part + i, a);
  else if constexpr (type == KVType::kF16) f32_store_f16((uint16_t*)part + i, a);
  else f32_store_bf16((uint16_t*)part + i, a);
}

OCTAVO_INLINE F32x16 load_codes(const int8_t* codes) {
#if defined(OCTAVO_AVX512)
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)))};
#elif defined(OCTAVO_AVX2)
  const __m128i c = _mm_loadu_si128((const __m128i*)codes);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(c)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(c, 8)))};
#else
  F32x16 r;
  for (int j = 0; j < 16; ++j) r.v[j] = codes[j];
  return r;
#endif
}

// Greatest magnitudes of the values seen in each lane; NaN in `poison` once one of them was not finite.
struct LaneRange {
  F32x16 greatest = f32_zero(), poison = f32_zero();
  OCTAVO_INLINE void see(const F32x16& a) {
    greatest = f32_max(greatest, f32_max(a, f32_zero() - a));
    poison = f32_fma(a, f32_zero(), poison);
  }
};

// The scale of one token: of the lanes first, first + step, ... of what was seen; `count` of them.
OCTAVO_INLINE float packing_scale(const LaneRange& range, int first, int step, int count) {
  float greatest[16], poison[16], max = 0.0f, bad = 0.0f;
  f32_store(greatest, range.greatest);
  f32_store(poison, range.poison);
  for (int i = 0, lane = first; i < count; ++i, lane += step) {
    max = greatest[lane] > max ? greatest[lane] : max;
    bad += poison[lane];
  }
  if (bad != 0.0f) return bad;  // NaN: all that is read through it is
  if (max < 1e-30f) return 0.0f;
  const float scale = max / 127.0f;
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  bits = (bits + 0xffu) & ~0xffu;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

OCTAVO_INLINE float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// Lane j: what token first + j / repeat has.
OCTAVO_INLINE F32x16 per_token(const float* scales, int first, int repeat) {
  float t[16];
  for (int j = 0; j < 16; ++j) t[j] = scales[first + j / repeat];
  return f32_load(t);
}

OCTAVO_INLINE F32x16 alternate(float even, float odd) {
  float t[16];
  for (int j = 0; j < 16; ++j) t[j] = j % 2 ? odd : even;
  return f32_load(t);
}

// Where a part's groups of sixteen values lie, and whose they are. K: [dims / per][16 tokens][per]; V: [16 / per][R][per], per 2 where the
// type is paired, else 1.
template <KVType type>
struct TileParts {
  static constexpr int kPer = type == KVType::kBF16 ? 2 : 1;
  int head_dim, v_dims;
  explicit TileParts(int head_dim) : head_dim(head_dim), v_dims((head_dim + 15) / 16 * 16) {}

  // f(element, group 0 .. kPer - 1): the group holds tokens 16 / kPer * group and on.
  template <class F>
  OCTAVO_INLINE void each_of_k(F f) const {
    for (int i = 0; i < head_dim; ++i) f((size_t)i * 16, kPer == 1 ? 0 : i % 2);
  }
  // f(element, lanes that hold values) over one row of V, which has those of kPer tokens side by side.
  template <class F>
  OCTAVO_INLINE void each_of_v(int row, F f) const {
    const int n = head_dim * kPer;
    for (int i = 0; i < v_dims * kPer; i += 16) f((size_t)row * v_dims * kPer + i, i > n ? 0 : n - i < 16 ? n - i : 16);
  }
};

OCTAVO_INLINE void store_codes(int8_t* codes, const F32x16& a) {
  i32_store_i8(codes, i32_from_f32(f32_min(f32_max(a, f32_set(-127.0f)), f32_set(127.0f))));
}

template <KVType type>
OCTAVO_INLINE void pack_tile(int head_dim, const uint8_t* tile, uint8_t* packed) {
  using Parts = TileParts<type>;
  constexpr int per = Parts::kPer;
  const Parts parts(head_dim);
  const KVTileLayout from = kv_tile_layout(type, head_dim), to = kv_tile_layout(KVType::kI8, head_dim);
  int8_t *k_codes = (int8_t*)packed, *v_codes = (int8_t*)packed + to.v_offset;
  const uint8_t* v = tile + from.v_offset;
  float k_scale[16], v_scale[16], inverse[16];
  LaneRange ranges[per];
  parts.each_of_k([&](size_t i, int group) { ranges[group].see(load_values<type>(tile, i)); });
  for (int t = 0; t < 16; ++t) {
    k_scale[t] = packing_scale(ranges[t * per / 16], t * per % 16, 1, per);
    inverse[t] = inverse_of(k_scale[t]);
  }
  F32x16 inverses[per];
  for (int group = 0; group < per; ++group) inverses[group] = per_token(inverse, 16 / per * group, per);
  parts.each_of_k([&](size_t i, int group) { store_codes(k_codes + i, load_values<type>(tile, i) * inverses[group]); });
  for (int row = 0; row < 16 / per; ++row) {
    LaneRange range;
    parts.each_of_v(row, [&](size_t i, int n) { range.see(f32_first(n, load_values<type>(v, i), f32_zero())); });
    float s[2];
    // A key that is not finite shows in V's scale too, as in store_i8.
    for (int t = 0; t < per; ++t) s[t] = v_scale[row * per + t] = packing_scale(range, t, per, 16 / per) + 0.0f * k_scale[row * per + t];
    const F32x16 lanes = alternate(inverse_of(s[0]), inverse_of(s[per - 1]));
    parts.each_of_v(row, [&](size_t i, int n) { store_codes(v_codes + i, f32_first(n, load_values<type>(v, i), f32_zero()) * lanes); });
  }
  std::memcpy(packed + to.scales_offset, k_scale, sizeof k_scale);
  std::memcpy(packed + to.scales_offset + sizeof k_scale, v_scale, sizeof v_scale);
}

template <KVType type>
OCTAVO_INLINE void unpack_tile(int head_dim, const uint8_t* packed, uint8_t* tile) {
  using Parts = TileParts<type>;
  constexpr int per = Parts::kPer;
  const Parts parts(head_dim);
  const KVTileLayout to = kv_tile_layout(type, head_dim), from = kv_tile_layout(KVType::kI8, head_dim);
  const int8_t *k_codes = (const int8_t*)packed, *v_codes = (const int8_t*)packed + from.v_offset;
  uint8_t* v = tile + to.v_offset;
  float scales[32];
  std::memcpy(scales, packed + from.scales_offset, sizeof scales);
  F32x16 lanes[per];
  for (int group = 0; group < per; ++group) lanes[group] = per_token(scales, 16 / per * group, per);
  parts.each_of_k([&](size_t i, int group) { store_values<type>(tile, i, load_codes(k_codes + i) * lanes[group]); });
  for (int row = 0; row < 16 / per; ++row) {
    const F32x16 both = alternate(scales[16 + row * per], scales[16 + row * per + per - 1]);
    parts.each_of_v(row, [&](size_t i, int) { store_values<type>(v, i, load_codes(v_codes + i) * both); });
  }
}

void pack_kv(KVType type, int head_dim, const uint8_t* tile, uint8_t* packed) {
  switch (type) {
    case KVType::kF32: return pack_tile<KVType::kF32>(head_dim, tile, packed);
    case KVType::kF16: return pack_tile<KVType::kF16>(head_dim, tile, packed);
    case KVType::kBF16: return pack_tile<KVType::kBF16>(head_dim, tile, packed);
    case KVType::kI8: std::memcpy(packed, tile, kv_tile_layout(type, head_dim).bytes);
  }
}

void unpack_kv(KVType type, int head_dim, const uint8_t* packed, uint8_t* tile) {
  switch (type) {
    case KVType::kF32: return unpack_tile<KVType::kF32>(head_dim, packed, tile);
    case KVType::kF16: return unpack_tile<KVType::kF16>(head_dim, packed, tile);
    case KVType::kBF16: return unpack_tile<KVType::kBF16>(head_dim, packed, tile);
    case KVType::kI8: std::memcpy(tile, packed, kv_tile_layout(type, head_dim).bytes);
  }
}

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
