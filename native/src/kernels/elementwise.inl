// Per-row operations around the matrix products: norm, activation quantisation, gated activations, rotary embedding.
//
// Included by kernels_isa.cc inside no namespace; everything lands in the unit's ISA namespace. Rows may have any length:
// a last vector of fewer than sixteen values is loaded and stored by count, so nothing beyond a row is read or written.
// Sums run over fixed lanes in fixed order and therefore depend on the row alone.

namespace octavo {
namespace OCTAVO_ISA_NS {

OCTAVO_INLINE int lanes_left(int dim, int i) { return dim - i < 16 ? dim - i : 16; }

// n of 1..16 lanes; nearly always all of them, and then a plain load or store.
OCTAVO_INLINE F32x16 load_lanes(const float* p, int n) { return n == 16 ? f32_load(p) : f32_load_n(p, n); }
OCTAVO_INLINE void store_lanes(float* p, F32x16 a, int n) {
  if (n == 16) f32_store(p, a);
  else f32_store_n(p, a, n);
}

// Sum of squares in four chains of sixteen lanes; vector j of the row always belongs to chain j % 4.
OCTAVO_INLINE float sum_of_squares(const float* x, int dim) {
  F32x16 sum[4] = {f32_zero(), f32_zero(), f32_zero(), f32_zero()};
  int i = 0;
  for (; i + 64 <= dim; i += 64) {
    for (int c = 0; c < 4; ++c) {
      const F32x16 a = f32_load(x + i + 16 * c);
      sum[c] = f32_fma(a, a, sum[c]);
    }
  }
  for (int c = 0; i < dim; i += 16, ++c) {
    const F32x16 a = load_lanes(x + i, lanes_left(dim, i));
    sum[c] = f32_fma(a, a, sum[c]);
  }
  return f32_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

void rmsnorm(const float* x, const float* w, float eps, int dim, float* out) {
  const F32x16 inverse = f32_set(1.0f / __builtin_sqrtf(sum_of_squares(x, dim) / (float)dim + eps));
  for (int i = 0; i < dim; i += 16) {
    const int n = lanes_left(dim, i);
    store_lanes(out + i, load_lanes(x + i, n) * inverse * load_lanes(w + i, n), n);
  }
}

// The groups of a row that hold a NaN or an infinity get a NaN scale, so that what is computed from them is NaN, not a number.
__attribute__((cold, noinline)) void mark_non_finite(const float* x, int k, float* scale) {
  for (int g = 0; g < k / 32; ++g) {
    float probe = 0.0f;
    for (int i = 0; i < 32; ++i) probe += x[32 * g + i] * 0.0f;
    if (probe != 0.0f) scale[g] = __builtin_nanf("");
  }
}

#if defined(OCTAVO_AVX512)

// Lane j of the result: v[j] reduced over its sixteen lanes by op, which takes and gives __m512 or __m128.
template <class Op>
OCTAVO_INLINE __m128 reduce_four(const __m512 (&v)[4], Op op) {
  const __m512 a = op(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512 b = op(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512 lanes = op(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
  const __m512 half = op(lanes, _mm512_shuffle_f32x4(lanes, lanes, 0x4E));
  return op(_mm512_castps512_ps128(half), _mm512_extractf32x4_ps(half, 1));
}
struct MaxOp {
  OCTAVO_INLINE __m512 operator()(__m512 a, __m512 b) const { return _mm512_max_ps(a, b); }
  OCTAVO_INLINE __m128 operator()(__m128 a, __m128 b) const { return _mm_max_ps(a, b); }
};
struct AddIntegersOp {
  OCTAVO_INLINE __m512 operator()(__m512 a, __m512 b) const {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }
  OCTAVO_INLINE __m128 operator()(__m128 a, __m128 b) const { return _mm_castsi128_ps(_mm_add_epi32(_mm_castps_si128(a), _mm_castps_si128(b))); }
};

// Four groups at once, with the results of one: what a group costs alone is mostly its three reductions over lanes.
OCTAVO_INLINE void quantize_four(const float* x, int8_t* q, float* scale, int16_t* sum16, F32x16* probe) {
  __m512 value[8], largest[4], first[4], second[4];
  for (int j = 0; j < 8; ++j) {
    value[j] = _mm512_loadu_ps(x + 16 * j);
    probe->v = _mm512_fmadd_ps(value[j], _mm512_setzero_ps(), probe->v);
  }
  for (int g = 0; g < 4; ++g) largest[g] = _mm512_max_ps(_mm512_abs_ps(value[2 * g]), _mm512_abs_ps(value[2 * g + 1]));
  const __m128 max = reduce_four(largest, MaxOp{}), range = _mm_set1_ps(127.0f), inverse = _mm_div_ps(range, max);
  const __m128 finite = _mm_cmple_ps(inverse, _mm_set1_ps(3.4028234664e38f));
  _mm_storeu_ps(scale, _mm_and_ps(finite, _mm_div_ps(max, range)));
  const __m512 multipliers = _mm512_castps128_ps512(_mm_and_ps(finite, inverse));
  for (int g = 0; g < 4; ++g) {
    const __m512 multiplier = _mm512_permutexvar_ps(_mm512_set1_epi32(g), multipliers);
    const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(value[2 * g], multiplier)), b = _mm512_cvtps_epi32(_mm512_mul_ps(value[2 * g + 1], multiplier));
    _mm_storeu_si128((__m128i*)(q + 32 * g), _mm512_cvtepi32_epi8(a));
    _mm_storeu_si128((__m128i*)(q + 32 * g + 16), _mm512_cvtepi32_epi8(b));
    first[g] = _mm512_castsi512_ps(a);
    second[g] = _mm512_castsi512_ps(b);
  }
  const __m128i even = _mm_castps_si128(reduce_four(first, AddIntegersOp{})), odd = _mm_castps_si128(reduce_four(second, AddIntegersOp{}));
  _mm_storeu_si128((__m128i*)sum16, _mm_or_si128(_mm_and_si128(even, _mm_set1_epi32(0xffff)), _mm_slli_epi32(odd, 16)));
}

#endif

// A group whose largest magnitude is zero, or so small (< 4e-37) that 127 / max overflows, becomes exactly zero.
// Clamping before the conversion keeps NaN and infinities inside int8: the codes of their group are garbage, its neighbours' are not.
void quantize(const float* x, int k, QuantRows out, int row) {
  int8_t* q = out.q + (size_t)row * k;
  float* scale = out.scale + (size_t)row * (k / 32);
  int16_t* sum16 = out.sum16 + (size_t)row * (k / 16);
  const F32x16 low = f32_set(-127.0f), high = f32_set(127.0f);
  F32x16 probe = f32_zero();  // stays zero while all values are finite
  int i = 0;
#if defined(OCTAVO_AVX512)
  for (; i + 128 <= k; i += 128) quantize_four(x + i, q + i, scale + i / 32, sum16 + i / 16, &probe);
#endif
  for (; i < k; i += 32) {
    const F32x16 a = f32_load(x + i), b = f32_load(x + i + 16);
    probe = f32_fma(a, f32_zero(), f32_fma(b, f32_zero(), probe));
    const float max = f32_max_lane(f32_max(f32_max(a, f32_zero() - a), f32_max(b, f32_zero() - b)));
    const float inverse = 127.0f / max;
    const bool finite = inverse <= 3.4028234664e38f;
    scale[i / 32] = finite ? max / 127.0f : 0.0f;
    const F32x16 multiplier = f32_set(finite ? inverse : 0.0f);
    const I32x16 qa = i32_from_f32(f32_min(f32_max(a * multiplier, low), high));
    const I32x16 qb = i32_from_f32(f32_min(f32_max(b * multiplier, low), high));
    i32_store_i8(q + i, qa);
    i32_store_i8(q + i + 16, qb);
    sum16[i / 16] = (int16_t)i32_sum(qa);
    sum16[i / 16 + 1] = (int16_t)i32_sum(qb);
  }
  if (f32_sum(probe) != 0.0f) mark_non_finite(x, k, scale);
}

// Both activations are g / (1 + exp(-z)): silu with z = g; the tanh form of gelu with z = 2 sqrt(2 / pi) (g + 0.044715 g^3),
// because (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), which unlike the tanh keeps its relative precision for negative g.
template <bool gelu>
OCTAVO_INLINE F32x16 activate(F32x16 g) {
  F32x16 z = g;
  if (gelu) z = f32_fma(g * g * g, f32_set(0.044715f), g) * f32_set(1.5957691216057308f);
  return g / (f32_set(1.0f) + f32_exp(f32_zero() - z));
}

template <bool gelu>
OCTAVO_INLINE void gated_act_row(const float* gate, const float* up, int dim, float* out) {
  for (int i = 0; i < dim; i += 16) {
    const int n = lanes_left(dim, i);
    store_lanes(out + i, activate<gelu>(load_lanes(gate + i, n)) * load_lanes(up + i, n), n);
  }
}

void gated_act(const float* gate, const float* up, int dim, int activation, float* out) {
  if (activation == 0) gated_act_row<false>(gate, up, dim, out);
  else gated_act_row<true>(gate, up, dim, out);
}

void add(const float* a, const float* b, int dim, float* out) {
  for (int i = 0; i < dim; i += 16) {
    const int n = lanes_left(dim, i);
    store_lanes(out + i, load_lanes(a + i, n) + load_lanes(b + i, n), n);
  }
}

void softcap(const float* x, int dim, float cap, float* out) {
  const F32x16 c = f32_set(cap);
  for (int i = 0; i < dim; i += 16) {
    const int n = lanes_left(dim, i);
    store_lanes(out + i, f32_tanh(load_lanes(x + i, n) / c) * c, n);
  }
}

// (a, b) rotated by the angle whose cosine and sine are c and s.
OCTAVO_INLINE void rotate(F32x16* a, F32x16* b, F32x16 c, F32x16 s) {
  const F32x16 first = f32_fma(f32_zero() - *b, s, *a * c);
  *b = f32_fma(*a, s, *b * c);
  *a = first;
}

// Pairs [i, i + n) of one head, n <= 16; both layouts go through the same rotation of sixteen pairs.
OCTAVO_INLINE void rope_pairs(float* x, int half, bool interleaved, int i, int n, F32x16 c, F32x16 s) {
  if (!interleaved) {
    F32x16 a = load_lanes(x + i, n), b = load_lanes(x + half + i, n);
    rotate(&a, &b, c, s);
    store_lanes(x + i, a, n);
    store_lanes(x + half + i, b, n);
    return;
  }
  float even[16] = {0}, odd[16] = {0};
  for (int j = 0; j < n; ++j) { even[j] = x[2 * (i + j)]; odd[j] = x[2 * (i + j) + 1]; }
  F32x16 a = f32_load(even), b = f32_load(odd);
  rotate(&a, &b, c, s);
  f32_store(even, a);
  f32_store(odd, b);
  for (int j = 0; j < n; ++j) { x[2 * (i + j)] = even[j]; x[2 * (i + j) + 1] = odd[j]; }
}

void rope(float* x, int heads, int head_dim, int rotary_dim, bool interleaved, const float* cos_sin) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; i += 16) {
    const int n = lanes_left(half, i);
    float c[16] = {0}, s[16] = {0};
    for (int j = 0; j < n; ++j) { c[j] = cos_sin[2 * (i + j)]; s[j] = cos_sin[2 * (i + j) + 1]; }
    const F32x16 cv = f32_load(c), sv = f32_load(s);
    for (int h = 0; h < heads; ++h) rope_pairs(x + (size_t)h * head_dim, half, interleaved, i, n, cv, sv);
  }
}

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
