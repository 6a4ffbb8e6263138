// Where keys and values lie in a block (kernels.h has the layout), and how a token's are stored.
//
// Only the token's own elements are written, never a neighbour's bytes: threads storing neighbouring tokens of a tile must not
// overwrite each other. What no token was stored to keeps whatever the memory held.

namespace octavo {
namespace OCTAVO_ISA_NS {

// The tile of kv_head that holds token `offset` of `block`.
OCTAVO_INLINE uint8_t* kv_tile(const KVLayerView& kv, size_t tile_bytes, int block, int offset, int kv_head) {
  return kv.base + (size_t)block * kv.block_bytes + ((size_t)kv_head * (kv.block_size / 16) + offset / 16) * tile_bytes;
}

// n values of K from dimension d on, `dims` of them side by side: [dim / dims][16 tokens][dims].
template <int dims, class T>
OCTAVO_INLINE void scatter_k(const T* values, int d, int n, T* k) {
  for (int j = 0; j < n; j += dims) std::memcpy(k + (size_t)(d + j) * 16, values + j, sizeof(T) * dims);
}

// n values of V from dimension d on, each beside that of the pair's other token.
template <class T>
OCTAVO_INLINE void scatter_v(const T* values, int d, int n, T* v) {
  for (int j = 0; j < n; ++j) v[2 * (d + j)] = values[j];
}

OCTAVO_INLINE void store_f32(float* k_out, float* v_out, int head_dim, const float* k, const float* v) {
  for (int d = 0; d < head_dim; ++d) k_out[d * 16] = k[d];
  std::memcpy(v_out, v, sizeof(float) * (size_t)head_dim);
}

OCTAVO_INLINE void store_f16(uint16_t* k_out, uint16_t* v_out, int head_dim, const float* k, const float* v) {
  for (int d = 0; d < head_dim; d += 16) {
    const int n = lanes_left(head_dim, d);
    uint16_t t[16];
    f32_store_f16(t, load_lanes(k + d, n));
    scatter_k<1>(t, d, n, k_out);
    f32_store_f16(t, load_lanes(v + d, n));
    std::memcpy(v_out + d, t, sizeof(uint16_t) * (size_t)n);
  }
}

OCTAVO_INLINE void store_bf16(uint16_t* k_out, uint16_t* v_out, int head_dim, const float* k, const float* v) {
  for (int d = 0; d < head_dim; d += 16) {
    const int n = lanes_left(head_dim, d);
    uint16_t t[16];
    f32_store_bf16(t, load_lanes(k + d, n));
    scatter_k<2>(t, d, n, k_out);
    f32_store_bf16(t, load_lanes(v + d, n));
    scatter_v(t, d, n, v_out);
  }
}

// What quantises n values: x ~ scale * q, q in -127..127. A value that is not finite makes the scale NaN, and so all that is read
// through it.
struct HeadScale { float scale, inverse; };

OCTAVO_INLINE HeadScale head_scale(const float* x, int head_dim) {
  F32x16 greatest = f32_zero(), poison = f32_zero();
  for (int d = 0; d < head_dim; d += 16) {
    const F32x16 a = load_lanes(x + d, lanes_left(head_dim, d));
    greatest = f32_max(greatest, f32_max(a, f32_zero() - a));
    poison = f32_fma(a, f32_zero(), poison);
  }
  const float bad = f32_sum(poison), max = f32_max_lane(greatest), scale = max / 127.0f;
  if (bad != 0.0f) return {bad, 0.0f};
  return {scale, scale > 0.0f ? 1.0f / scale : 0.0f};
}

OCTAVO_INLINE void quantise_16(const float* x, int n, float inverse, int8_t* q) {
  const F32x16 a = load_lanes(x, n) * f32_set(inverse);
  i32_store_i8(q, i32_from_f32(f32_min(f32_max(a, f32_set(-127.0f)), f32_set(127.0f))));
}

// scales: the tile's, from this token on. A key that is not finite shows in V's scale too: a score's maximum and exp may lose a NaN.
OCTAVO_INLINE void store_i8(int8_t* k_out, int8_t* v_out, float* scales, int head_dim, const float* k, const float* v) {
  const HeadScale ks = head_scale(k, head_dim), vs = head_scale(v, head_dim);
  scales[0] = ks.scale;
  scales[16] = vs.scale + 0.0f * ks.scale;
  for (int d = 0; d < head_dim; d += 16) {
    const int n = lanes_left(head_dim, d);
    int8_t q[16];
    quantise_16(k + d, n, ks.inverse, q);
    scatter_k<2>(q, d, n, k_out);
    quantise_16(v + d, n, vs.inverse, q);
    scatter_v(q, d, n, v_out);
  }
}

void store_kv(const KVLayerView& kv, int block, int offset, const float* k, const float* v) {
  const int head_dim = kv.head_dim, token = offset % 16;
  const KVTileLayout layout = kv_tile_layout(kv.type, head_dim);
  const size_t row = (layout.scales_offset - layout.v_offset) / 16 / kv_value_bytes(kv.type);  // of V, in elements
  const size_t plain_v = token * row, paired_v = token / 2 * 2 * row + token % 2;
  for (int h = 0; h < kv.kv_heads; ++h, k += head_dim, v += head_dim) {
    uint8_t *tile = kv_tile(kv, layout.bytes, block, offset, h), *v_tile = tile + layout.v_offset;
    float* scales = (float*)(tile + layout.scales_offset) + token;
    switch (kv.type) {
      case KVType::kF32: store_f32((float*)tile + token, (float*)v_tile + plain_v, head_dim, k, v); break;
      case KVType::kF16: store_f16((uint16_t*)tile + token, (uint16_t*)v_tile + plain_v, head_dim, k, v); break;
      case KVType::kBF16: store_bf16((uint16_t*)tile + 2 * token, (uint16_t*)v_tile + paired_v, head_dim, k, v); break;
      case KVType::kI8: store_i8((int8_t*)tile + 2 * token, (int8_t*)v_tile + paired_v, scales, head_dim, k, v); break;
    }
  }
}

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
