// The tile arithmetic of attention.inl on pairs of 16-bit numbers, for KV that is stored in pairs.
//
// bfloat16 (levels with BF16): a query is the sum of two bfloat16 numbers, its rounding and the rounding of the rest (rounding it once
// costs same-best-token agreement, docs/exactness.md); weights are rounded. A score is one chain over pairs of dims, first with the
// rounded query, then with the rest: c = fma(q[d], k[d], fma(q[d + 1], k[d + 1], c)). An accumulator is one over pairs of tokens, p and
// v alike; l sums the rounded weights with the same instruction. Where a query sees one token of a pair alone the other's value is zeroed
// before it is multiplied, because it may be NaN.
//
// int8 (every level): a query is quantised to at most 16 bits with a scale of its own; so are the weights of a tile, after V's
// scales have been multiplied in. Both products are then exact integers and have no order; a masked token's weight is zero,
// and whatever byte lies there adds nothing. scores = sum * q_scale * k_scale; acc = fma(sum, weight_scale, acc * alpha).

namespace octavo {
namespace OCTAVO_ISA_NS {

constexpr int kTilePairs = kTile / 2, kSubtilePairs = kSubtile / 2;

#if defined(OCTAVO_AVX512_BF16)
struct PairsBF16 {
  using Element = uint16_t;
  using Sum = F32x16;
  static constexpr bool kStored = true;
  static constexpr bool kPairs = true;
  static constexpr int kPack = 2;
  static OCTAVO_INLINE I16x32 load(const uint16_t* p) { return i16_load(p); }
};
struct PairsBF16Near : PairsBF16 { static constexpr bool kStored = false; };  // a tile that was read just now
OCTAVO_INLINE F32x16 pair_dot(F32x16 c, I16x32 a, I16x32 b) { return f32_dot_bf16(c, a, b); }
OCTAVO_INLINE F32x16 pair_scores(F32x16 sum, float, const float*) { return sum; }
#endif

struct PairsI8 {
  using Element = int8_t;
  using Sum = I32x16;
  static constexpr bool kStored = true;
  static constexpr bool kPairs = true;
  static constexpr int kPack = 2;
  static OCTAVO_INLINE I16x32 load(const int8_t* p) { return i16_load_i8(p); }
};
struct PairsI16 {  // int8 already widened into scratch
  using Element = int16_t;
  using Sum = I32x16;
  static constexpr bool kStored = false;
  static constexpr bool kPairs = true;
  static constexpr int kPack = 2;
  static OCTAVO_INLINE I16x32 load(const int16_t* p) { return i16_load(p); }
};
OCTAVO_INLINE I32x16 pair_dot(I32x16 c, I16x32 a, I16x32 b) { return i32_dot(c, a, b); }
OCTAVO_INLINE F32x16 pair_scores(I32x16 sum, float q_scale, const float* k_scales) {
  return f32_from_i32(sum) * f32_set(q_scale) * f32_load(k_scales);
}
OCTAVO_INLINE F32x16 pair_end(I32x16 sum, F32x16 acc, float weight_scale) { return f32_fma(f32_from_i32(sum), f32_set(weight_scale), acc); }

// A sum of V before its first pair: bfloat16 goes on from the accumulator, integers begin at zero and meet it in pair_end.
template <class Sum> Sum pair_first(F32x16 acc);
template <> OCTAVO_INLINE F32x16 pair_first<F32x16>(F32x16 acc) { return acc; }
template <> OCTAVO_INLINE I32x16 pair_first<I32x16>(F32x16) { return i32_zero(); }

template <class Load>
constexpr bool kIntegerPairs = std::is_same<typename Load::Sum, I32x16>::value;

#if defined(OCTAVO_AVX512_BF16)
using LoadOfBF16 = PairsBF16;  // what reads bfloat16 KV on this level, and what does when a tile was read just now
using NearBF16 = PairsBF16Near;
#else
using LoadOfBF16 = LoadBF16;
using NearBF16 = LoadBF16;
#endif

// Pair i of an array of pairs, in every lane.
OCTAVO_INLINE I16x32 broadcast_pair(const float* pairs, size_t i) {
  uint32_t x;
  std::memcpy(&x, pairs + i, sizeof(x));
  return i16_set_pair(x);
}

// Rows of pairs in arrays of floats, one pair where a float would be.
struct PairQueries { const float* pairs; const float* scale; int stride; };
struct PairWeights { float *pairs, *alpha, *scale; };  // [R][kTile], [16], [16]

// ---- products ------------------------------------------------------------------------------------------------------

template <class Load, int R, int NV>
OCTAVO_INLINE void pair_dot_block(const PairQueries& q, const TileView<Load>& tile, int u, int head_dim, float* scores) {
  typename Load::Sum sum[R][NV];
  for (int r = 0; r < R; ++r) for (int v = 0; v < NV; ++v) sum[r][v] = pair_first<typename Load::Sum>(f32_zero());
  for (int i = 0; i < head_dim / 2; ++i) {
    I16x32 b[NV];
    for (int v = 0; v < NV; ++v) {
      const typename Load::Element* k = tile.k_at(u + v, 2 * i);
      prefetch_ahead<Load>(k, tile.ahead[u + v], i);
      b[v] = Load::load(k);
    }
    for (int r = 0; r < R; ++r) {
      const size_t at = (size_t)r * q.stride + i;
      const I16x32 a = broadcast_pair(q.pairs, at);
      for (int v = 0; v < NV; ++v) sum[r][v] = pair_dot(sum[r][v], a, b[v]);
      if constexpr (!kIntegerPairs<Load>) {  // load_query_bf16's second half
        const I16x32 rest = broadcast_pair(q.pairs, at + q.stride / 2);
        for (int v = 0; v < NV; ++v) sum[r][v] = pair_dot(sum[r][v], rest, b[v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) f32_store(scores + r * kTile + (u + v) * kSubtile, pair_scores(sum[r][v], q.scale[r], tile.scales[u + v]));
}

// Scores of R queries against subtiles [begin, end).
template <class Load, int R>
OCTAVO_NOINLINE void pair_dot_tile(const PairQueries& q, const TileView<Load>& tile, int begin, int end, int head_dim, float* scores) {
  constexpr int NV = block_vectors(R);
  int u = begin;
  for (; u + NV <= end; u += NV) pair_dot_block<Load, R, NV>(q, tile, u, head_dim, scores);
  if (NV > 2 && u + 2 <= end) { pair_dot_block<Load, R, 2>(q, tile, u, head_dim, scores); u += 2; }
  if (NV > 1 && u < end) pair_dot_block<Load, R, 1>(q, tile, u, head_dim, scores);
}

// acc[r] = acc * alpha[r] + the products of pairs [begin, end), for columns [column, column + 16 NV).
template <class Load, int R, int NV>
OCTAVO_INLINE void pair_accumulate_block(const PairWeights& w, const TileView<Load>& tile, int begin, int end, int column, float* acc,
                                         int stride) {
  using Sum = typename Load::Sum;
  const auto shrunk = [&](int r, int v) { return f32_load(acc + (size_t)r * stride + column + 16 * v) * f32_set(w.alpha[r]); };
  Sum sum[R][NV];
  for (int r = 0; r < R; ++r) for (int v = 0; v < NV; ++v) sum[r][v] = pair_first<Sum>(shrunk(r, v));
  for (int i = begin; i < end; ++i) {
    const typename Load::Element* row = tile.v_at(2 * i, column);
    const ptrdiff_t ahead = tile.ahead[i / kSubtilePairs];
    I16x32 b[NV];
    for (int v = 0; v < NV; ++v) {
      prefetch_ahead<Load>(row + 32 * v, ahead, v);
      b[v] = Load::load(row + 32 * v);
    }
    for (int r = 0; r < R; ++r) {
      const I16x32 a = broadcast_pair(w.pairs, (size_t)r * kTile + i);
      for (int v = 0; v < NV; ++v) sum[r][v] = pair_dot(sum[r][v], a, b[v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) {
      float* to = acc + (size_t)r * stride + column + 16 * v;
      if constexpr (kIntegerPairs<Load>) f32_store(to, pair_end(sum[r][v], shrunk(r, v), w.scale[r]));
      else f32_store(to, sum[r][v]);
    }
}

template <class Load, int R>
OCTAVO_NOINLINE void pair_accumulate_tile(const PairWeights& w, const TileView<Load>& tile, int begin, int end, float* acc, int stride) {
  constexpr int NV = block_vectors(R);
  int c = 0;
  for (; c + 16 * NV <= stride; c += 16 * NV) pair_accumulate_block<Load, R, NV>(w, tile, begin, end, c, acc, stride);
  if (NV > 2 && c + 32 <= stride) { pair_accumulate_block<Load, R, 2>(w, tile, begin, end, c, acc, stride); c += 32; }
  if (NV > 1 && c < stride) pair_accumulate_block<Load, R, 1>(w, tile, begin, end, c, acc, stride);
}

// ---- softmax over one tile -----------------------------------------------------------------------------------------

// Lanes of subtile u outside [begin, end) of the tile become zero.
template <bool whole>
OCTAVO_INLINE F32x16 seen_or_zero(F32x16 a, int u, int begin, int end) {
  if (whole) return a;
  if (u * kSubtile >= end || (u + 1) * kSubtile <= begin) return f32_zero();
  return keep_lanes(a, 0.0f, u, begin, end);
}

// One query's softmax over a tile; its scores become weights in place.
struct TileSoftmax { float m, alpha; int begin, end; };

#if defined(OCTAVO_AVX512_BF16)
// exp(x) for x <= 0 within 2^-18, well below the rounding to bfloat16 that follows: 2^k times a polynomial of the rest in [-1/2, 1/2]
// (least greatest relative error, degree 4).
OCTAVO_INLINE F32x16 exp_for_bf16(F32x16 x) {
  const F32x16 t = x * f32_set(1.44269504088896341f), k = f32_round(t), r = t - k;
  F32x16 p = f32_set(9.570102207e-3f);
  p = f32_fma(p, r, f32_set(5.591785908e-2f));
  p = f32_fma(p, r, f32_set(2.402474433e-1f));
  p = f32_fma(p, r, f32_set(6.931217909e-1f));
  p = f32_fma(p, r, f32_set(9.999992847e-1f));
  return f32_scale2i(p, k);
}

// scores -> bfloat16 pairs of exp(scores - m), exactly zero where masked; l = l * alpha + their sum, lane by lane.
template <bool whole>
OCTAVO_INLINE void finish_pairs(F32x16, float* scores, const TileSoftmax& s, const float* const*, float* l, float*) {
  const I16x32 ones = i16_set_pair(0x3f803f80u);
  F32x16 sum = f32_load(l) * f32_set(s.alpha);
  for (int u = 0; u < kSubtiles; u += 2) {
    F32x16 w[2];
    for (int i = 0; i < 2; ++i)
      w[i] = seen_or_zero<whole>(exp_for_bf16(f32_load(scores + (u + i) * kSubtile) - f32_set(s.m)), u + i, s.begin, s.end);
    const I16x32 pairs = bf16_from_f32(w[0], w[1]);
    sum = f32_dot_bf16(sum, pairs, ones);
    i16_store(scores + u * kSubtilePairs, pairs);  // never past the scores still to be read
  }
  f32_store(l, sum);
}
#endif

// scores -> int16 pairs of exp(scores - m) * v_scale / *weight_scale; l = l * alpha + sum of exp(scores - m), which a value's scale
// that is not finite makes NaN.
template <bool whole>
OCTAVO_INLINE void finish_pairs(I32x16, float* scores, const TileSoftmax& s, const float* const* scales, float* l, float* weight_scale) {
  F32x16 sum = f32_load(l) * f32_set(s.alpha), w[kSubtiles], greatest = f32_zero();
  for (int u = 0; u < kSubtiles; ++u) {
    w[u] = f32_zero();
    if (!whole && (u * kSubtile >= s.end || (u + 1) * kSubtile <= s.begin)) continue;
    const F32x16 p = seen_or_zero<whole>(f32_exp(f32_load(scores + u * kSubtile) - f32_set(s.m)), u, s.begin, s.end);
    w[u] = seen_or_zero<whole>(p * f32_load(scales[u] + kSubtile), u, s.begin, s.end);
    sum = f32_fma(w[u], f32_zero(), sum + p);
    greatest = f32_max(greatest, w[u]);
  }
  f32_store(l, sum);
  const float max = f32_max_lane(greatest);
  *weight_scale = max * (1.0f / 32767.0f);
  const F32x16 inverse = f32_set(*weight_scale > 1e-36f ? 1.0f / *weight_scale : 0.0f);
  for (int u = 0; u < kSubtiles; ++u) i32_store_i16((int16_t*)(scores + u * kSubtilePairs), i32_from_f32(w[u] * inverse));
}

// ---- what some queries see and others do not ----------------------------------------------------------------------

#if defined(OCTAVO_AVX512_BF16)
// acc = acc * alpha + one token of pair i: the even one, or the odd one.
OCTAVO_NOINLINE void accumulate_half_pair(const PairWeights& w, int r, const TileView<PairsBF16>& tile, int i, bool odd, float* acc,
                                          int stride) {
  const I16x32 mask = i16_set_pair(odd ? 0xffff0000u : 0x0000ffffu), p = broadcast_pair(w.pairs, (size_t)r * kTile + i);
  for (int c = 0; c < stride; c += 16) {
    const I16x32 v = i16_load(tile.v_at(2 * i, c)) & mask;
    f32_store(acc + c, f32_dot_bf16(f32_load(acc + c) * f32_set(w.alpha[r]), p, v));
  }
  w.alpha[r] = 1.0f;
}

// Pairs [begin, end) of one query.
template <class Load>
OCTAVO_INLINE void accumulate_own(const PairWeights& w, int r, const TileView<Load>& tile, int begin, int end, float* acc, int stride) {
  if (begin >= end) return;
  pair_accumulate_tile<Load, 1>({w.pairs + (size_t)r * kTile, w.alpha + r, nullptr}, tile, begin, end, acc, stride);
  w.alpha[r] = 1.0f;
}

// PV of R queries: the pairs that all of them see whole go together, the others query by query in the same order.
template <class Load, int R>
OCTAVO_INLINE void accumulate_pairs(F32x16, const Seen& seen, const TileView<Load>& tile, const PairWeights& w, float* acc, int stride) {
  TileView<PairsBF16> plain;
  std::memcpy((void*)&plain, &tile, sizeof(plain));
  const int begin = (seen.begin[R - 1] + 1) / 2, end = seen.end[0] / 2;
  const bool common = begin < end;
  for (int r = 0; r < R; ++r) {
    float* to = acc + (size_t)r * stride;
    if (seen.begin[r] % 2) accumulate_half_pair(w, r, plain, seen.begin[r] / 2, true, to, stride);
    accumulate_own(w, r, tile, (seen.begin[r] + 1) / 2, common ? begin : seen.end[r] / 2, to, stride);
  }
  if (common) {
    pair_accumulate_tile<Load, R>(w, tile, begin, end, acc, stride);
    for (int r = 0; r < R; ++r) w.alpha[r] = 1.0f;
  }
  for (int r = 0; r < R; ++r) {
    float* to = acc + (size_t)r * stride;
    if (common) accumulate_own(w, r, tile, end, seen.end[r] / 2, to, stride);
    if (seen.end[r] % 2) accumulate_half_pair(w, r, plain, seen.end[r] / 2, false, to, stride);
  }
}
#endif

template <class Load, int R>
OCTAVO_INLINE void accumulate_pairs(I32x16, const Seen& seen, const TileView<Load>& tile, const PairWeights& w, float* acc, int stride) {
  pair_accumulate_tile<Load, R>(w, tile, seen.begin[0] / 2, (seen.end[R - 1] + 1) / 2, acc, stride);
}

// ---- queries -------------------------------------------------------------------------------------------------------

#if defined(OCTAVO_AVX512_BF16)
// head_dim values times `scale` as pairs: rounded to bfloat16 in the first half of a row of `stride` floats, what that leaves over in
// the second. Beyond head_dim both are zero.
OCTAVO_INLINE void load_query_bf16(const float* q, int head_dim, int stride, float scale, float* row) {
  for (int d = 0; d < stride; d += 16) {
    const F32x16 x = load_lanes(q + d, lanes_left(head_dim, d)) * f32_set(scale);
    uint16_t rounded[32], rest[32];
    i16_store(rounded, bf16_from_f32(x, f32_zero()));
    i16_store(rest, bf16_from_f32(x - f32_load_bf16(rounded), f32_zero()));
    std::memcpy(row + d / 2, rounded, 16 * sizeof(uint16_t));
    std::memcpy(row + stride / 2 + d / 2, rest, 16 * sizeof(uint16_t));
  }
}
#endif

// As int16 pairs, q * scale ~ pair * the scale that is returned. The greatest magnitude is such that no sum of products with int8
// leaves 32 bits. A value that is not finite makes the scale NaN.
OCTAVO_INLINE float load_query_i16(const float* q, int head_dim, float scale, float* pairs) {
  const HeadScale unit = head_scale(q, head_dim);
  const float steps = (float)int_min(32767, 2147483647 / 127 / head_dim), inverse = unit.inverse * (steps / 127.0f);
  for (int d = 0; d < head_dim; d += 16) {
    const F32x16 a = load_lanes(q + d, lanes_left(head_dim, d)) * f32_set(inverse);
    i32_store_i16((int16_t*)(pairs + d / 2), i32_from_f32(f32_min(f32_max(a, f32_set(-steps)), f32_set(steps))));
  }
  return unit.scale * (127.0f / steps) * scale;
}

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
