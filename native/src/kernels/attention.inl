// Attention over paged KV with one tile arithmetic for every number of rows.
//
// A query is one (row, head) pair. What its result is made of depends on its position and on the KV it sees alone:
//   - positions are cut into fixed splits of kSplitTokens and those into fixed tiles of 64; a tile or split of which the
//     query sees nothing is skipped, any other contributes in ascending order;
//   - within a tile, lanes are tokens: s[t] = sum over d = 0.. of (q[d] * scale) * K[d][t], one float32 chain per token (KV that is
//     computed with in pairs has products of its own: attention_pairs.inl); softcap; lanes the query does not see are replaced
//     before they reach a maximum, an exp or a sum;
//   - running maximum m, sixteen lane sums l, acc[d] = acc[d] * exp(m_old - m_new) + sum over visible t, ascending, of p[t] * V[t][d];
//   - the state (m, l, acc) of each split is merged into the running total in order of splits (merge_state), in the one-pass
//     form as in the partial form; at the end out = acc / l.
// Only loop nests differ: queries are taken up to kChunk at a time (the heads that share a kv_head, then further rows), and when
// several chunks need a tile it is first widened to float32, which is exact. See FlashAttention-2 (Dao, 2023) for the recurrence.
//
// Slots a query does not see are never touched by its arithmetic beyond its own dead lane of QK, so unwritten KV memory may
// hold anything, NaN included.

#include "kernels/attention_tile.inl"
#include "kernels/attention_pairs.inl"
#include "kernels/attention_state.inl"

namespace octavo {
namespace OCTAVO_ISA_NS {

constexpr int kQueries = 96;  // queries per pass over the KV: bounds the scratch

// One pass over the KV for `count` queries of one kv_head; query j is (row, head) number first + j, heads innermost.
struct Pass {
  const KVLayerView& kv;
  const AttentionParams& p;
  const AttentionSequence& s;
  int kv_head, group, stride;  // stride: head_dim rounded up to 16
  int first = 0, count = 0;
  int *begin = nullptr, *end = nullptr;          // [kQueries] positions a query sees
  float* q = nullptr;                            // [kQueries][stride], scaled; zero beyond head_dim; or pairs of 16 bits
  float* q_scale = nullptr;                      // [kQueries] of int16 pairs
  float* acc = nullptr;                          // [kQueries][stride] of the current split
  float *m = nullptr, *l = nullptr;              // [kQueries], [kQueries][16] of the current split
  float *total_m = nullptr, *total_l = nullptr;  // [kQueries] of the splits merged so far; their acc is in out
  float* scores = nullptr;                       // [kChunk][kTile]
  float *wide_k = nullptr, *wide_v = nullptr;    // [kSubtiles][head_dim][16], [kTile][stride]; of int8 as pairs, in half of it
  KVTileLayout layout = {};

  const uint8_t* subtile(int position) const {
    return kv_tile(kv, layout.bytes, s.block_table[position / kv.block_size], position % kv.block_size, kv_head);
  }
  int row(int j) const { return (first + j) / group; }
  int head(int j) const { return kv_head * group + (first + j) % group; }
  // Where the state of query j's row in a split lies, `splits` a row.
  size_t state_at(int row, int splits, int split) const {
    return (((size_t)row * p.kv_heads + kv_head) * splits + split) * partial_floats(group, stride);
  }
  float* out(int j) const { return s.out + (size_t)row(j) * s.out_stride + (size_t)head(j) * p.head_dim; }
};

// Positions seen from `position`: [begin, position + 1).
OCTAVO_INLINE int visible_begin(const AttentionParams& p, int position) { return p.window > 0 ? int_max(0, position - p.window + 1) : 0; }

OCTAVO_INLINE bool sees_split(const AttentionParams& p, int position, int split) {
  return position >= split * kSplitTokens && visible_begin(p, position) < (split + 1) * kSplitTokens;
}

// ---- tiles -----------------------------------------------------------------------------------------------------------

// Scores of the R queries from j on -> their maxima in m, and in alpha how much their acc and l shrink.
template <int R, bool whole>
OCTAVO_INLINE void raise_maxima(const Pass& pass, const Seen& seen, int j, float* alpha) {
  for (int r = 0; r < R; ++r) {
    const float m = finish_scores<whole>(pass.scores + r * kTile, pass.p.softcap, seen.begin[r], seen.end[r], pass.m[j + r]);
    alpha[r] = pass.m[j + r] - m;
    pass.m[j + r] = m;
  }
  f32_store(alpha, f32_exp(f32_load(alpha)));
}

// Scores -> weights in place; updates m and l.
template <int R, bool whole>
OCTAVO_INLINE void softmax_tile(const Pass& pass, const Seen& seen, int j, float* alpha) {
  raise_maxima<R, whole>(pass, seen, j, alpha);
  for (int r = 0; r < R; ++r)
    finish_weights<whole>(pass.scores + r * kTile, seen.begin[r], seen.end[r], pass.m[j + r], alpha[r], pass.l + (size_t)(j + r) * 16);
}

template <class Load, int R, bool whole>
OCTAVO_INLINE void softmax_pairs(const Pass& pass, const TileView<Load>& tile, const Seen& seen, int j, const PairWeights& w) {
  raise_maxima<R, whole>(pass, seen, j, w.alpha);
  for (int r = 0; r < R; ++r)
    finish_pairs<whole>(typename Load::Sum{}, w.pairs + r * kTile, {pass.m[j + r], w.alpha[r], seen.begin[r], seen.end[r]}, tile.scales,
                        pass.l + (size_t)(j + r) * 16, w.scale + r);
}

// One tile for the R queries from j on, each of which sees some of it.
template <class Load, int R>
void attend_chunk(const Pass& pass, const TileView<Load>& tile, int tile_begin, int j) {
  Seen seen;
  for (int r = 0; r < R; ++r) {
    seen.begin[r] = int_max(pass.begin[j + r] - tile_begin, 0);
    seen.end[r] = int_min(pass.end[j + r] - tile_begin, kTile);
  }
  const int stride = pass.stride, begin = seen.begin[0] / kSubtile, end = (seen.end[R - 1] + kSubtile - 1) / kSubtile;
  const bool whole = seen.begin[R - 1] == 0 && seen.end[0] == kTile;
  float* acc = pass.acc + (size_t)j * stride;
  alignas(64) float alpha[16] = {0};
  if constexpr (Load::kPairs) {
    float scale[16];
    const PairWeights w = {pass.scores, alpha, scale};
    pair_dot_tile<Load, R>({pass.q + (size_t)j * stride, pass.q_scale + j, stride}, tile, begin, end, pass.p.head_dim, pass.scores);
    if (whole) softmax_pairs<Load, R, true>(pass, tile, seen, j, w);
    else softmax_pairs<Load, R, false>(pass, tile, seen, j, w);
    accumulate_pairs<Load, R>(typename Load::Sum{}, seen, tile, w, acc, stride);
  } else {
    dot_tile<Load, R>(pass.q + (size_t)j * stride, stride, tile, begin, end, pass.p.head_dim, pass.scores);
    if (whole) softmax_tile<R, true>(pass, seen, j, alpha);
    else softmax_tile<R, false>(pass, seen, j, alpha);
    accumulate_seen<Load, R>(seen, tile, pass.scores, alpha, acc, stride);
  }
}

template <class Load, int R>
OCTAVO_INLINE void attend_chunk_of(int n, const Pass& pass, const TileView<Load>& tile, int tile_begin, int j) {
  if (n == R) return attend_chunk<Load, R>(pass, tile, tile_begin, j);
  if constexpr (R > 1) attend_chunk_of<Load, R - 1>(n, pass, tile, tile_begin, j);
}

// Queries [a, b) in chunks as even as possible.
template <class Load>
void attend_queries(const Pass& pass, const TileView<Load>& tile, int tile_begin, int a, int b) {
  for (int chunks = (b - a + kChunk - 1) / kChunk; chunks > 0; --chunks) {
    const int n = (b - a + chunks - 1) / chunks;
    attend_chunk_of<Load, kChunk>(n, pass, tile, tile_begin, a);
    a += n;
  }
}

// What a tile is read as when several chunks need it, and how one vector of it is made.
template <class Load> struct Widened { using Type = LoadWide; };
template <> struct Widened<PairsI8> { using Type = PairsI16; };

template <class Load>
OCTAVO_INLINE void widen_vector(const typename Load::Element* from, int part, float* to) { f32_store(to, Load::load(from, part)); }
template <>
OCTAVO_INLINE void widen_vector<PairsI8>(const int8_t* from, int, float* to) { i16_store(to, PairsI8::load(from)); }

// Subtiles [begin, end) in scratch.
template <class Load, class Wide = typename Widened<Load>::Type>
void widen_tile(const Pass& pass, const TileView<Load>& from, int begin, int end, TileView<Wide>* to) {
  constexpr int step = Wide::kPack;  // dims or tokens that one vector of the copy holds of each lane
  for (int u = begin; u < end; ++u) {
    float *k = pass.wide_k + (size_t)u * pass.p.head_dim * kSubtile, *v = pass.wide_v + (size_t)u * kSubtile * pass.stride;
    to->k[u] = (const typename Wide::Element*)k;
    to->v[u] = (const typename Wide::Element*)v;
    to->scales[u] = from.scales[u];
    for (int d = 0; d < pass.p.head_dim; d += step, k += kSubtile) {
      prefetch_ahead<Load>(from.k_at(u, d), from.ahead[u], d / Load::kPack);
      widen_vector<Load>(from.k_at(u, d), d % Load::kPack, k);
    }
    for (int t = u * kSubtile; t < (u + 1) * kSubtile; t += step, v += pass.stride)
      for (int d = 0; d < pass.stride; d += 16) {
        prefetch_ahead<Load>(from.v_at(t, d), from.ahead[u], d / 16);
        widen_vector<Load>(from.v_at(t, d), t % Load::kPack, v + d);
      }
  }
}

// Where the subtiles [begin, end) of a tile lie, and the same ones of the tile after it.
template <class Load>
TileView<Load> view_tile(const Pass& pass, int tile_begin, int begin, int end) {
  TileView<Load> tile;
  tile.v_stride = pass.stride;
  for (int u = begin; u < end; ++u) {
    const int position = tile_begin + u * kSubtile;
    const uint8_t* at = pass.subtile(position);
    tile.k[u] = (const typename Load::Element*)at;
    tile.v[u] = (const typename Load::Element*)(at + pass.layout.v_offset);
    tile.scales[u] = (const float*)(at + pass.layout.scales_offset);
    tile.ahead[u] = position + kTile < pass.end[pass.count - 1] ? pass.subtile(position + kTile) - at : 0;
  }
  return tile;
}

// One tile for every query of the pass that sees some of it: a contiguous run, since what is seen ascends with the row.
template <class Load>
void attend_tile(const Pass& pass, int tile_begin) {
  int a = 0, b = pass.count;
  while (a < b && pass.end[a] <= tile_begin) ++a;
  while (b > a && pass.begin[b - 1] >= tile_begin + kTile) --b;
  if (a == b) return;
  const int begin = int_max(pass.begin[a] - tile_begin, 0) / kSubtile;
  const int end = (int_min(pass.end[b - 1] - tile_begin, kTile) + kSubtile - 1) / kSubtile;
  const TileView<Load> tile = view_tile<Load>(pass, tile_begin, begin, end);
  if (b - a <= kChunk || std::is_same<Load, LoadF32>::value) return attend_queries(pass, tile, tile_begin, a, b);
  if constexpr (Load::kPairs && std::is_same<Load, LoadOfBF16>::value) {  // computed with as it is stored; asked for ahead once
    attend_queries(pass, tile, tile_begin, a, a + kChunk);
    attend_queries(pass, view_tile<NearBF16>(pass, tile_begin, begin, end), tile_begin, a + kChunk, b);
  } else {
    TileView<typename Widened<Load>::Type> wide;
    wide.v_stride = pass.stride;
    widen_tile(pass, tile, begin, end, &wide);
    attend_queries(pass, wide, tile_begin, a, b);
  }
}

// ---- splits --------------------------------------------------------------------------------------------------------

// The state of a split that another pass has begun.
void resume_split(const Pass& pass, int split) {
  const AttentionHead& head = pass.s.head;
  for (int j = 0; j < pass.count; ++j) {
    const float* at = head.partial + pass.state_at(head.row + pass.row(j), head.splits, split);
    const StoredState<const float> state(at, pass.group, pass.stride, (pass.first + j) % pass.group);
    pass.m[j] = *state.m;
    std::memcpy(pass.l + (size_t)j * 16, state.l, sizeof(float) * 16);
    std::memcpy(pass.acc + (size_t)j * pass.stride, state.acc, sizeof(float) * (size_t)pass.stride);
  }
}

void begin_split(const Pass& pass) {
  for (int j = 0; j < pass.count; ++j) pass.m[j] = -__builtin_inff();
  std::memset(pass.l, 0, sizeof(float) * 16 * (size_t)pass.count);
  std::memset(pass.acc, 0, sizeof(float) * (size_t)pass.stride * pass.count);
}

// Runs one split for the whole pass; afterwards acc, m, l of every query that sees some of it are its state.
void attend_split(const Pass& pass, int split) {
  const int first = int_max(split * kSplitTokens, pass.s.head.tokens), begin = int_max(first, pass.begin[0] / kTile * kTile);
  const int end = int_min((split + 1) * kSplitTokens, pass.end[pass.count - 1]);
  const bool begun = first > split * kSplitTokens;
  if (begin >= end && !begun) return;
  if (begun) resume_split(pass, split);
  else begin_split(pass);
  if (begin >= end) return;
  if (pass.s.bytes_read) {
    const int read = int_max(first, pass.begin[0]) / kSubtile;
    *pass.s.bytes_read += (size_t)((end + kSubtile - 1) / kSubtile - read) * pass.layout.bytes;
  }
  for (int tile_begin = begin; tile_begin < end; tile_begin += kTile) {
    switch (pass.kv.type) {
      case KVType::kF16: attend_tile<LoadF16>(pass, tile_begin); break;
      case KVType::kBF16: attend_tile<LoadOfBF16>(pass, tile_begin); break;
      case KVType::kF32: attend_tile<LoadF32>(pass, tile_begin); break;
      case KVType::kI8: attend_tile<PairsI8>(pass, tile_begin); break;
    }
  }
}

// Merges the split's states into the totals, or stores them when partial states are asked for.
void finish_split(const Pass& pass, int split, float* partial) {
  const int num_splits = pass.s.state_splits ? pass.s.state_splits : attention_num_splits(pass.s);
  for (int j = 0; j < pass.count; ++j) {
    if (!sees_split(pass.p, pass.end[j] - 1, split)) continue;
    const float *l = pass.l + (size_t)j * 16, *acc = pass.acc + (size_t)j * pass.stride;
    if (partial == nullptr) {
      merge_state(pass.m[j], f32_sum(f32_load(l)), acc, pass.p.head_dim, pass.total_m + j, pass.total_l + j, pass.out(j));
      continue;
    }
    const StoredState<float> state(partial + pass.state_at(pass.row(j), num_splits, split), pass.group, pass.stride, (pass.first + j) % pass.group);
    *state.m = pass.m[j];
    std::memcpy(state.l, l, sizeof(float) * 16);
    std::memcpy(state.acc, acc, sizeof(float) * (size_t)pass.stride);
  }
}

// ---- scratch and entry points --------------------------------------------------------------------------------------

// Hands out 64-byte aligned arrays; with base null it only counts.
struct ScratchCursor {
  uint8_t* base;
  size_t used;
  template <class T>
  T* take(size_t count) {
    T* p = base ? (T*)(base + used) : nullptr;
    used += (count * sizeof(T) + 63) / 64 * 64;
    return p;
  }
};

OCTAVO_INLINE size_t place_scratch(Pass* pass, void* scratch) {
  ScratchCursor cursor = {(uint8_t*)scratch, 0};
  const size_t stride = (size_t)pass->stride;
  pass->begin = cursor.take<int>(kQueries);
  pass->end = cursor.take<int>(kQueries);
  pass->q = cursor.take<float>(kQueries * stride);
  pass->q_scale = cursor.take<float>(kQueries);
  pass->acc = cursor.take<float>(kQueries * stride);
  pass->m = cursor.take<float>(kQueries);
  pass->l = cursor.take<float>(kQueries * 16);
  pass->total_m = cursor.take<float>(kQueries);
  pass->total_l = cursor.take<float>(kQueries);
  pass->scores = cursor.take<float>(kChunk * kTile);
  pass->wide_k = cursor.take<float>((size_t)kTile * pass->p.head_dim);
  pass->wide_v = cursor.take<float>(kTile * stride);
  return cursor.used;
}

// One query, scaled, in the form that the products with this type of KV take.
OCTAVO_INLINE void load_query(const Pass& pass, const float* q, int j) {
  const int head_dim = pass.p.head_dim;
  float* to = pass.q + (size_t)j * pass.stride;
  if (pass.kv.type == KVType::kI8) {
    pass.q_scale[j] = load_query_i16(q, head_dim, pass.p.scale, to);
    return;
  }
#if defined(OCTAVO_AVX512_BF16)
  if (pass.kv.type == KVType::kBF16) return load_query_bf16(q, head_dim, pass.stride, pass.p.scale, to);
#endif
  for (int d = 0; d < head_dim; d += 16) f32_store(to + d, load_lanes(q + d, lanes_left(head_dim, d)) * f32_set(pass.p.scale));
}

// Folds stored states of splits [begin, end) into query j's total: merge_state after merge_state, their exponentials a vector at a time.
void merge_stored(const Pass& pass, int j, const float* partial, int row, int splits, int begin, int end, float* total_m, float* total_l) {
  while (begin < end) {
    StoredStates states;
    for (; begin < end && states.count < StoredStates::kMost; ++begin)
      if (sees_split(pass.p, pass.s.position(pass.row(j)), begin))
        states.add({partial + pass.state_at(row, splits, begin), pass.group, pass.stride, (pass.first + j) % pass.group});
    states.merge(pass.p.head_dim, total_m, total_l, pass.out(j));
  }
}

// A query's total before the splits of this call: nothing, or the whole splits that were computed before.
void begin_query(const Pass& pass, int j, float* total_m, float* total_l) {
  const AttentionHead& head = pass.s.head;
  begin_total(pass.p.head_dim, total_m, total_l, pass.out(j));
  if (head.tokens) merge_stored(pass, j, head.partial, head.row + pass.row(j), head.splits, 0, head.tokens / kSplitTokens, total_m, total_l);
}

// The queries of the pass and what each sees.
void load_queries(const Pass& pass, bool totals) {
  for (int j = 0; j < pass.count; ++j) {
    const int row = pass.row(j), position = pass.s.position(row), q_row = pass.s.q_rows ? pass.s.q_rows[row] : row;
    pass.begin[j] = visible_begin(pass.p, position);
    pass.end[j] = position + 1;
    load_query(pass, pass.s.q + (size_t)q_row * pass.s.q_stride + (size_t)pass.head(j) * pass.p.head_dim, j);
    if (totals) begin_query(pass, j, pass.total_m + j, pass.total_l + j);
  }
}

void attention(const KVLayerView& kv, const AttentionParams& p, const AttentionSequence& s, int kv_head, int row_begin, int row_end,
               int split_begin, int split_end, float* partial, void* scratch) {
  const int group = p.heads / p.kv_heads, end = row_end * group;
  Pass pass = {kv, p, s, kv_head, group, round_up_16(p.head_dim)};
  pass.layout = kv_tile_layout(kv.type, p.head_dim);
  place_scratch(&pass, scratch);
  for (pass.first = row_begin * group; pass.first < end; pass.first += pass.count) {
    pass.count = int_min(end - pass.first, kQueries);
    load_queries(pass, partial == nullptr);
    for (int split = split_begin; split < split_end; ++split) {
      attend_split(pass, split);
      finish_split(pass, split, partial);
    }
    if (partial != nullptr) continue;
    for (int j = 0; j < pass.count; ++j) finish_total(p.head_dim, pass.total_l[j], pass.out(j));
  }
}

void attention_merge(const AttentionParams& p, const AttentionSequence& s, int kv_head, int row, int splits, const float* partial) {
  const int group = p.heads / p.kv_heads;
  const KVLayerView kv = {};
  Pass pass = {kv, p, s, kv_head, group, round_up_16(p.head_dim), row * group, group};
  for (int g = 0; g < group; ++g) {
    float total_m, total_l;
    begin_query(pass, g, &total_m, &total_l);
    merge_stored(pass, g, partial, row, splits, s.head.tokens / kSplitTokens, splits, &total_m, &total_l);
    finish_total(p.head_dim, total_l, pass.out(g));
  }
}

size_t attention_scratch_bytes(const AttentionParams& p) {
  const KVLayerView kv = {};
  const AttentionSequence s = {};
  Pass pass = {kv, p, s, 0, 1, round_up_16(p.head_dim)};
  return place_scratch(&pass, nullptr);
}

size_t attention_partial_floats(const AttentionParams& p) { return partial_floats(p.heads / p.kv_heads, round_up_16(p.head_dim)); }

}  // namespace OCTAVO_ISA_NS
}  // namespace octavo
