// The tile arithmetic of attention.inl: scores, softmax and weighted sum of a few queries over one tile of 64 tokens.
//
// Each function's result for a query is independent of the other queries in the call and of where the tile's numbers are
// stored (page of any KV type, or scratch). Which queries, tiles and splits there are is attention.inl's business.

namespace octavo {
namespace OCTAVO_ISA_NS {

constexpr int kSubtile = 16;              // tokens per vector and per KV tile of the block layout
constexpr int kTile = kTileTokens;        // per step of the running maximum
constexpr int kSubtiles = kTile / kSubtile;
// Queries computed together, and vectors of sums that fit the registers beside what feeds them.
#if defined(OCTAVO_AVX512)
constexpr int kChunk = 6, kAccumulators = 24;
#elif defined(OCTAVO_AVX2)
constexpr int kChunk = 6, kAccumulators = 5;
#else
constexpr int kChunk = 2, kAccumulators = 2;
#endif
// Vectors beside each other for R queries: the power of two that fills the accumulators.
constexpr int block_vectors(int queries) { return kAccumulators / queries >= 4 ? 4 : kAccumulators / queries >= 2 ? 2 : 1; }

// How the numbers of a tile are read, as float32: the stored types, and a tile already widened into scratch.
// kPack: neighbouring dims (K) or tokens (V) that lie side by side; `part` says which of them is wanted.
struct LoadF16 {
  using Element = uint16_t;
  static constexpr bool kStored = true, kPairs = false;
  static constexpr int kPack = 1;
  static OCTAVO_INLINE F32x16 load(const uint16_t* p, int) { return f32_load_f16(p); }
};
struct LoadBF16 {
  using Element = uint16_t;
  static constexpr bool kStored = true, kPairs = false;
  static constexpr int kPack = 2;
  static OCTAVO_INLINE F32x16 load(const uint16_t* p, int part) { return f32_load_bf16_of_pairs(p, part); }
};
struct LoadF32 {
  using Element = float;
  static constexpr bool kStored = true, kPairs = false;
  static constexpr int kPack = 1;
  static OCTAVO_INLINE F32x16 load(const float* p, int) { return f32_load(p); }
};
struct LoadWide : LoadF32 { static constexpr bool kStored = false; };

// Where the subtiles of one tile lie: k[u]: [head_dim / kPack][16][kPack], v[u]: [16 / kPack][v_stride][kPack], and of int8 KV
// scales[u]: [2][16], K's and V's.
// ahead[u]: what will be read a tile later, as an offset from k[u] and v[u] in bytes; blocks lie anywhere, so the hardware's
// own prefetch stops at the end of each.
template <class Load>
struct TileView {
  const typename Load::Element* k[kSubtiles];
  const typename Load::Element* v[kSubtiles];
  const float* scales[kSubtiles];
  int v_stride;
  ptrdiff_t ahead[kSubtiles];

  // Dimension d of a subtile's K, and column c of token t's V: with kPack > 1 what lies around them.
  OCTAVO_INLINE const typename Load::Element* k_at(int u, int d) const {
    return k[u] + (size_t)(d / Load::kPack) * (kSubtile * Load::kPack);
  }
  OCTAVO_INLINE const typename Load::Element* v_at(int t, int c) const {
    return v[t / kSubtile] + ((size_t)(t % kSubtile / Load::kPack) * v_stride + c) * Load::kPack;
  }
};

// Asks for what lies `ahead` bytes from p, once per cache line; i counts the vectors in a row. Into the second level only: the
// first has too few miss buffers for DRAM's latency (Zen 4: 16 GB/s of KV that way, 22 this way, 15 without).
template <class Load>
OCTAVO_INLINE void prefetch_ahead(const typename Load::Element* p, ptrdiff_t ahead, int i) {
  if constexpr (Load::kStored) {
    constexpr int vectors = 64 / (16 * Load::kPack * (int)sizeof(typename Load::Element));  // that share a cache line
    if (i % vectors == 0) __builtin_prefetch((const uint8_t*)p + ahead, 0, 2);
  }
}

// What R queries see of one tile, as offsets into it; both ascend with the query.
struct Seen { int begin[kChunk], end[kChunk]; };

OCTAVO_INLINE int round_up_16(int n) { return (n + 15) & ~15; }
OCTAVO_INLINE int int_min(int a, int b) { return a < b ? a : b; }
OCTAVO_INLINE int int_max(int a, int b) { return a > b ? a : b; }

// Keeps a caller's constants out of the registers that hold accumulators.
#define OCTAVO_NOINLINE __attribute__((noinline))

// ---- products ------------------------------------------------------------------------------------------------------

// scores[r][16 v + lane] = sum over d of q[r][d] * k[v][d][lane] for subtiles v of [u, u + NV), one chain per element.
template <class Load, int R, int NV>
OCTAVO_INLINE void dot_block(const float* q, int q_stride, const TileView<Load>& tile, int u, int head_dim, float* scores) {
  F32x16 sum[R][NV];
  for (int r = 0; r < R; ++r) for (int v = 0; v < NV; ++v) sum[r][v] = f32_zero();
  for (int d = 0; d < head_dim; ++d) {
    F32x16 b[NV];
    for (int v = 0; v < NV; ++v) {
      const typename Load::Element* k = tile.k_at(u + v, d);
      if (d % Load::kPack == 0) prefetch_ahead<Load>(k, tile.ahead[u + v], d / Load::kPack);
      b[v] = Load::load(k, d % Load::kPack);
    }
    for (int r = 0; r < R; ++r) {
      const F32x16 a = f32_set(q[(size_t)r * q_stride + d]);
      for (int v = 0; v < NV; ++v) sum[r][v] = f32_fma(a, b[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) for (int v = 0; v < NV; ++v) f32_store(scores + r * kTile + (u + v) * kSubtile, sum[r][v]);
}

// Scores of R queries against subtiles [begin, end).
template <class Load, int R>
OCTAVO_NOINLINE void dot_tile(const float* q, int q_stride, const TileView<Load>& tile, int begin, int end, int head_dim, float* scores) {
  constexpr int NV = block_vectors(R);
  int u = begin;
  for (; u + NV <= end; u += NV) dot_block<Load, R, NV>(q, q_stride, tile, u, head_dim, scores);
  if (NV > 2 && u + 2 <= end) { dot_block<Load, R, 2>(q, q_stride, tile, u, head_dim, scores); u += 2; }
  if (NV > 1 && u < end) dot_block<Load, R, 1>(q, q_stride, tile, u, head_dim, scores);
}

// acc[r][16 v + lane] = acc * alpha[r] + sum over t in [begin, end) of p[r][t] * v[t][column + 16 v + lane], t ascending.
template <class Load, int R, int NV>
OCTAVO_INLINE void accumulate_block(const float* p, const float* alpha, const TileView<Load>& tile, int begin, int end, int column,
                                    float* acc, int stride) {
  F32x16 sum[R][NV];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) sum[r][v] = f32_load(acc + (size_t)r * stride + column + 16 * v) * f32_set(alpha[r]);
  for (int t = begin; t < end; ++t) {
    const typename Load::Element* row = tile.v_at(t, column);
    const ptrdiff_t ahead = tile.ahead[t / kSubtile];
    F32x16 b[NV];
    for (int v = 0; v < NV; ++v) {
      if (t % Load::kPack == 0) prefetch_ahead<Load>(row + 16 * Load::kPack * v, ahead, v);
      b[v] = Load::load(row + 16 * Load::kPack * v, t % Load::kPack);
    }
    for (int r = 0; r < R; ++r) {
      const F32x16 a = f32_set(p[r * kTile + t]);
      for (int v = 0; v < NV; ++v) sum[r][v] = f32_fma(a, b[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) for (int v = 0; v < NV; ++v) f32_store(acc + (size_t)r * stride + column + 16 * v, sum[r][v]);
}

template <class Load, int R>
OCTAVO_NOINLINE void accumulate_tile(const float* p, const float* alpha, const TileView<Load>& tile, int begin, int end, float* acc,
                                     int stride) {
  constexpr int NV = block_vectors(R);
  int c = 0;
  for (; c + 16 * NV <= stride; c += 16 * NV) accumulate_block<Load, R, NV>(p, alpha, tile, begin, end, c, acc, stride);
  if (NV > 2 && c + 32 <= stride) { accumulate_block<Load, R, 2>(p, alpha, tile, begin, end, c, acc, stride); c += 32; }
  if (NV > 1 && c < stride) accumulate_block<Load, R, 1>(p, alpha, tile, begin, end, c, acc, stride);
}

// ---- softmax over one tile -----------------------------------------------------------------------------------------

// Lanes of subtile u that lie in [begin, end) of the tile from a, the rest `fill`.
OCTAVO_INLINE F32x16 keep_lanes(F32x16 a, float fill, int u, int begin, int end) {
  const int from = begin - u * kSubtile, to = end - u * kSubtile;
  if (to < kSubtile) a = f32_first(to, a, f32_set(fill));
  if (from > 0) a = f32_first(from, f32_set(fill), a);
  return a;
}

// Applies softcap and mask to one query's scores of [begin, end) in place; returns their maximum, at least m.
// `whole` is begin == 0 and end == kTile made known to the compiler, here and below.
template <bool whole>
OCTAVO_INLINE float finish_scores(float* scores, float cap, int begin, int end, float m) {
  F32x16 max = f32_set(m);
  for (int u = whole ? 0 : begin / kSubtile; u < (whole ? kSubtiles : (end + kSubtile - 1) / kSubtile); ++u) {
    F32x16 s = f32_load(scores + u * kSubtile);
    if (cap > 0.0f) s = f32_tanh(s * f32_set(1.0f / cap)) * f32_set(cap);
    if (!whole) s = keep_lanes(s, -__builtin_inff(), u, begin, end);
    max = f32_max(max, s);
    if (!whole || cap > 0.0f) f32_store(scores + u * kSubtile, s);
  }
  return f32_max_lane(max);
}

// scores -> exp(scores - m), exactly zero where masked; l = l * alpha + their sum, lane by lane.
template <bool whole>
OCTAVO_INLINE void finish_weights(float* scores, int begin, int end, float m, float alpha, float* l) {
  F32x16 sum = f32_load(l) * f32_set(alpha);
  for (int u = whole ? 0 : begin / kSubtile; u < (whole ? kSubtiles : (end + kSubtile - 1) / kSubtile); ++u) {
    F32x16 w = f32_exp(f32_load(scores + u * kSubtile) - f32_set(m));
    if (!whole) w = keep_lanes(w, 0.0f, u, begin, end);
    sum = sum + w;
    f32_store(scores + u * kSubtile, w);
  }
  f32_store(l, sum);
}

// ---- what some queries see and others do not ----------------------------------------------------------------------

// PV of R queries. The tokens that all of them see go together; those only some see go query by query, in the same order,
// because a weight of zero would not keep out an infinite or NaN value of a later row.
template <class Load, int R>
OCTAVO_INLINE void accumulate_seen(const Seen& seen, const TileView<Load>& tile, float* scores, float* alpha, float* acc, int stride) {
  const int common_begin = seen.begin[R - 1], common_end = seen.end[0];
  const float one = 1.0f;
  const bool common = common_begin < common_end;
  for (int r = 0; r < R; ++r) {
    const int stop = common ? common_begin : seen.end[r];
    if (seen.begin[r] >= stop) continue;
    accumulate_tile<Load, 1>(scores + r * kTile, alpha + r, tile, seen.begin[r], stop, acc + (size_t)r * stride, stride);
    alpha[r] = 1.0f;
  }
  if (!common) return;
  accumulate_tile<Load, R>(scores, alpha, tile, common_begin, common_end, acc, stride);
  for (int r = 0; r < R; ++r)
    if (common_end < seen.end[r])
      accumulate_tile<Load, 1>(scores + r * kTile, &one, tile, common_end, seen.end[r], acc + (size_t)r * stride, stride);
}

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
