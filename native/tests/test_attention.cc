// Attention against a plain double loop, and its exactness: one query's bits do not depend on what is computed around it.
#include <cstdlib>

#include "checks/scalar_attention.h"
#include "testing.h"

using namespace octavo;
using namespace octavo_test;

namespace {

struct Shape { int heads, kv_heads, head_dim, window; float softcap; KVType type; };

const char* type_name(KVType type) {
  return type == KVType::kF16 ? "f16" : type == KVType::kBF16 ? "bf16" : type == KVType::kF32 ? "f32" : "int8";
}

// KV memory of one sequence in shuffled blocks. Every byte starts as 0xff, a NaN in each format.
struct Cache {
  KVLayerView view;
  std::vector<uint8_t> memory;
  std::vector<int32_t> table;

  Cache(const Shape& shape, int block_size, int tokens, Rng& rng) {
    const int blocks = (tokens + block_size - 1) / block_size;
    const size_t used = kv_tile_layout(shape.type, shape.head_dim).bytes * shape.kv_heads * (block_size / 16);
    view = {nullptr, used + 192, shape.kv_heads, shape.head_dim, block_size, shape.type};
    memory.assign(view.block_bytes * blocks, 0xff);
    view.base = memory.data();
    for (int b = 0; b < blocks; ++b) table.push_back(b);
    for (int b = blocks - 1; b > 0; --b) std::swap(table[b], table[rng.below(b + 1)]);
  }
};

struct Problem {
  Shape shape;
  AttentionParams params;
  int tokens, width, kv_width;
  std::vector<float> q, k, v;  // [tokens][heads * head_dim], [tokens][kv_heads * head_dim]

  Problem(const Shape& s, int tokens, uint64_t seed)
      : shape(s), tokens(tokens), width(s.heads * s.head_dim), kv_width(s.kv_heads * s.head_dim) {
    Rng rng{seed};
    params = {s.heads, s.kv_heads, s.head_dim, 1.0f / std::sqrt((float)s.head_dim), s.softcap, s.window};
    q = rng.uniform_values((size_t)tokens * width, 4.0f);
    k = rng.uniform_values((size_t)tokens * kv_width, 2.0f);
    v = rng.uniform_values((size_t)tokens * kv_width, 2.0f);
  }
  void store(const Kernels& kernels, Cache& cache, int from, int to) const {
    const int block_size = cache.view.block_size;
    for (int t = from; t < to; ++t)
      kernels.store_kv(cache.view, cache.table[t / block_size], t % block_size, &k[(size_t)t * kv_width], &v[(size_t)t * kv_width]);
  }
  // Rows start .. start + rows - 1, out at their place in a [tokens][width] array.
  AttentionSequence sequence(const Cache& cache, int start, int rows, std::vector<float>& out) const {
    return {&q[(size_t)start * width], &out[(size_t)start * width], width, width, start, rows, cache.table.data()};
  }
};

struct Scratch {
  std::vector<uint8_t> bytes;
  void* at;
  Scratch(const Kernels& kernels, const AttentionParams& p) : bytes(kernels.attention_scratch_bytes(p) + 64, 0xff) {
    at = (void*)(((uintptr_t)bytes.data() + 63) & ~(uintptr_t)63);
  }
};

void run_rows(const Kernels& kernels, const Problem& problem, const Cache& cache, int start, int rows, std::vector<float>& out) {
  Scratch scratch(kernels, problem.params);
  const AttentionSequence s = problem.sequence(cache, start, rows, out);
  for (int h = 0; h < problem.shape.kv_heads; ++h)
    kernels.attention(cache.view, problem.params, s, h, 0, rows, 0, attention_num_splits(s), nullptr, scratch.at);
}

// Rows and splits cut at random into items, states stored and merged.
void run_partial(const Kernels& kernels, const Problem& problem, const Cache& cache, int start, int rows, Rng& rng,
                 std::vector<float>& out) {
  Scratch scratch(kernels, problem.params);
  const AttentionSequence s = problem.sequence(cache, start, rows, out);
  const int splits = attention_num_splits(s);
  std::vector<float> partial((size_t)rows * problem.shape.kv_heads * splits * kernels.attention_partial_floats(problem.params), NAN);
  for (int h = 0; h < problem.shape.kv_heads; ++h) {
    for (int row = 0, row_end; row < rows; row = row_end) {
      row_end = row + 1 + rng.below(rows - row);
      for (int split = 0, split_end; split < splits; split = split_end) {
        split_end = split + 1 + rng.below(splits - split);
        kernels.attention(cache.view, problem.params, s, h, row, row_end, split, split_end, partial.data(), scratch.at);
      }
    }
    for (int row = 0; row < rows; ++row) kernels.attention_merge(problem.params, s, h, row, splits, partial.data());
  }
}

// Each row's first tiles together with those of others, in any order of theirs, cut at random into runs and splits; the rest on from there,
// whole or as partial states that are merged. What is read is counted.
void run_together(const Kernels& kernels, const Problem& problem, const Cache& cache, int start, int rows, Rng& rng, std::vector<float>& out) {
  Scratch scratch(kernels, problem.params);
  const AttentionSequence s = problem.sequence(cache, start, rows, out);
  const int tiles = 1 + rng.below((start + 1) / kTileTokens), splits = (tiles * kTileTokens + kSplitTokens - 1) / kSplitTokens;
  std::vector<int> order((size_t)rows);
  for (int i = 0; i < rows; ++i) order[(size_t)i] = i;
  for (int i = rows - 1; i > 0; --i) std::swap(order[(size_t)i], order[(size_t)rng.below(i + 1)]);
  const size_t floats = kernels.attention_partial_floats(problem.params);
  std::vector<float> states((size_t)rows * problem.shape.kv_heads * splits * floats, NAN);
  uint64_t bytes = 0;
  for (int tile = 0, end; tile < tiles; tile = end) {
    const int split = tile * kTileTokens / kSplitTokens, most = std::min(tiles, (split + 1) * kSplitTokens / kTileTokens) - tile;
    end = tile + 1 + rng.below(most);
    AttentionSequence all = s;
    all.start = end * kTileTokens - 1;
    all.together = true;
    all.q_rows = order.data();
    all.state_splits = splits;
    all.head = {states.data(), tile * kTileTokens, 0, splits};
    all.bytes_read = &bytes;
    for (int h = 0; h < problem.shape.kv_heads; ++h)
      kernels.attention(cache.view, problem.params, all, h, 0, rows, split, split + 1, states.data(), scratch.at);
  }
  const int passes = (rows * problem.shape.heads / problem.shape.kv_heads + 95) / 96;
  const size_t tile_bytes = kv_tile_layout(problem.shape.type, problem.shape.head_dim).bytes * (kTileTokens / 16);
  check(bytes == (uint64_t)passes * problem.shape.kv_heads * tiles * tile_bytes, "%s together: %llu bytes read of %d tiles", kernels.name,
        (unsigned long long)bytes, tiles);
  for (int i = 0; i < rows; ++i) {
    AttentionSequence own = problem.sequence(cache, start + order[(size_t)i], 1, out);
    own.head = {states.data(), tiles * kTileTokens, i, splits};
    const int first = tiles * kTileTokens / kSplitTokens, num_splits = attention_num_splits(own);
    std::vector<float> partial((size_t)problem.shape.kv_heads * num_splits * floats, NAN);
    float* to = rng.below(2) ? partial.data() : nullptr;
    for (int h = 0; h < problem.shape.kv_heads; ++h) {
      kernels.attention(cache.view, problem.params, own, h, 0, 1, first, num_splits, to, scratch.at);
      if (to) kernels.attention_merge(problem.params, own, h, 0, num_splits, to);
    }
  }
}

void check_against_reference(const Kernels& kernels, const Problem& problem, const Cache& cache, int row, const std::vector<float>& got) {
  std::vector<double> want;
  for (int h = 0; h < problem.shape.heads; ++h) {
    const float* q = &problem.q[(size_t)row * problem.width + h * problem.shape.head_dim];
    const double bound = scalar_attention(cache.view, cache.table.data(), problem.params, AttentionRounding(kernels, problem.shape.type), q, row, h, want);
    for (int d = 0; d < problem.shape.head_dim; ++d) {
      const float x = got[(size_t)row * problem.width + h * problem.shape.head_dim + d];
      if (!check(std::fabs(x - want[d]) <= bound, "%s %s head_dim %d window %d row %d head %d d %d: %.9g, expected %.9g +- %.2g",
                 kernels.name, type_name(problem.shape.type), problem.shape.head_dim,
                 problem.shape.window, row, h, d, x, want[d], bound)) return;
    }
  }
}

// Rows [from, to) of a and b are the same bits.
void check_same(const char* level, const char* form, const Problem& problem, const std::vector<float>& a, const std::vector<float>& b,
                int from, int to) {
  const Shape& s = problem.shape;
  for (int row = from; row < to; ++row) {
    const size_t at = (size_t)row * problem.width;
    if (!check(same_bits(&a[at], &b[at], problem.width), "%s %s: %s head_dim %d heads %d/%d window %d row %d of %d differs", level, form,
               type_name(s.type), s.head_dim, s.heads, s.kv_heads, s.window, row, problem.tokens)) return;
  }
}

// Every form of computing the same rows: whole, row by row as decode does, chunks of 7, partial and merged, blocks of 32.
void check_forms(const Kernels& kernels, const Shape& shape, int tokens, uint64_t seed) {
  Rng rng{seed};
  const Problem problem(shape, tokens, seed + 1);
  const std::vector<float> empty((size_t)tokens * problem.width, NAN);
  std::vector<float> whole = empty, out = empty;
  Cache cache(shape, 16, tokens, rng), growing(shape, 16, tokens, rng), wide(shape, 32, tokens, rng);
  problem.store(kernels, cache, 0, tokens);
  problem.store(kernels, wide, 0, tokens);
  run_rows(kernels, problem, cache, 0, tokens, whole);
  for (int row : {0, 1, 15, 16, 30, 31, 32, 63, 64, 65, tokens / 2, tokens - 2, tokens - 1})
    if (row >= 0 && row < tokens) check_against_reference(kernels, problem, cache, row, whole);

  for (int row = 0; row < tokens; ++row) {
    problem.store(kernels, growing, row, row + 1);
    run_rows(kernels, problem, growing, row, 1, out);
  }
  check_same(kernels.name, "row by row", problem, whole, out, 0, tokens);
  out = empty;
  for (int row = 0; row < tokens; row += 7) run_rows(kernels, problem, cache, row, std::min(7, tokens - row), out);
  check_same(kernels.name, "chunks of 7", problem, whole, out, 0, tokens);
  out = empty;
  run_rows(kernels, problem, wide, 0, tokens, out);
  check_same(kernels.name, "block size 32", problem, whole, out, 0, tokens);
  for (int i = 0; i < 3; ++i) {
    out = empty;
    run_partial(kernels, problem, cache, 0, tokens, rng, out);
    check_same(kernels.name, "partial and merged", problem, whole, out, 0, tokens);
  }
}

// Later rows whose K and V are infinite or NaN leave earlier rows' bits alone.
void check_later_rows(const Kernels& kernels, const Shape& shape, int tokens) {
  Rng rng{7};
  Problem problem(shape, tokens, 8);
  std::vector<float> clean((size_t)tokens * problem.width), poisoned = clean;
  Cache cache(shape, 16, tokens, rng);
  problem.store(kernels, cache, 0, tokens);
  run_rows(kernels, problem, cache, 0, tokens, clean);
  const int first_bad = tokens - 3;
  for (int i = first_bad * problem.kv_width; i < tokens * problem.kv_width; ++i)
    problem.k[i] = problem.v[i] = i % 3 ? (i % 2 ? INFINITY : -INFINITY) : NAN;
  problem.store(kernels, cache, first_bad, tokens);
  run_rows(kernels, problem, cache, 0, tokens, poisoned);
  check_same(kernels.name, "non-finite later rows", problem, clean, poisoned, 0, first_bad);
}

// A key or value that is not finite reaches the rows that see it, and no other: int8 codes cannot hold it, its scale does.
void check_poison(const Kernels& kernels, float bad, bool in_key) {
  Rng rng{11};
  const Shape shape{2, 1, 32, 0, 0.0f, KVType::kI8};
  Problem problem(shape, 40, 12);
  Cache cache(shape, 16, 40, rng);
  (in_key ? problem.k : problem.v)[20 * problem.kv_width + 5] = bad;
  problem.store(kernels, cache, 0, 40);
  std::vector<float> out((size_t)40 * problem.width);
  run_rows(kernels, problem, cache, 0, 40, out);
  for (int row = 0; row < 40; ++row) {
    bool finite = true;
    for (int i = 0; i < problem.width; ++i) finite = finite && std::isfinite(out[(size_t)row * problem.width + i]);
    check(finite == (row < 20), "%s int8: %f in %s of token 20, row %d is %s", kernels.name, bad, in_key ? "K" : "V", row,
          finite ? "finite" : "not finite");
  }
}

// A key that is NaN, with a finite value: whoever sees it must say so.
void check_nan_key(const Kernels& kernels, const Shape& shape, int tokens) {
  Rng rng{9};
  Problem problem(shape, tokens, 10);
  std::vector<float> out((size_t)tokens * problem.width);
  Cache cache(shape, 16, tokens, rng);
  const int bad = tokens / 2;
  for (int h = 0; h < shape.kv_heads; ++h) problem.k[(size_t)bad * problem.kv_width + h * shape.head_dim] = NAN;
  problem.store(kernels, cache, 0, tokens);
  run_rows(kernels, problem, cache, 0, tokens, out);
  bool right = true;
  for (int row = 0; row < tokens; ++row) {
    const bool sees = row >= bad && (shape.window == 0 || row - bad < shape.window);
    for (int i = 0; i < problem.width; ++i) right = right && std::isnan(out[(size_t)row * problem.width + i]) == sees;
  }
  check(right, "%s %s: a NaN key, window %d, soft cap %g", kernels.name, type_name(shape.type), shape.window, shape.softcap);
}

// A prompt's end and decode steps behind a long context, KV before the window never written.
void check_long(const Kernels& kernels, const Shape& shape, int start, int rows) {
  Rng rng{(uint64_t)start};
  const int tokens = start + rows;
  const Problem problem(shape, tokens, 99);
  const std::vector<float> empty((size_t)tokens * problem.width, NAN);
  std::vector<float> whole = empty, out = empty;
  Cache cache(shape, 16, tokens, rng);
  problem.store(kernels, cache, shape.window ? std::max(0, start - shape.window + 1) : 0, tokens);
  run_rows(kernels, problem, cache, start, rows, whole);
  check_against_reference(kernels, problem, cache, start, whole);
  check_against_reference(kernels, problem, cache, tokens - 1, whole);
  for (int row = start; row < tokens; ++row) run_rows(kernels, problem, cache, row, 1, out);
  check_same(kernels.name, "long, row by row", problem, whole, out, start, tokens);
  out = empty;
  run_partial(kernels, problem, cache, start, rows, rng, out);
  check_same(kernels.name, "long, partial and merged", problem, whole, out, start, tokens);
  for (int i = 0; i < 3 && shape.window == 0; ++i) {
    out = empty;
    run_together(kernels, problem, cache, start, rows, rng, out);
    check_same(kernels.name, "long, together", problem, whole, out, start, tokens);
  }
}

void check_level(const Kernels& kernels) {
  const KVType types[] = {KVType::kBF16, KVType::kI8, KVType::kF16, KVType::kF32};
  const int heads[][2] = {{1, 1}, {2, 2}, {3, 1}, {9, 3}, {4, 1}, {7, 1}, {16, 1}, {20, 1}};
  const int head_dims[] = {2, 8, 16, 24, 48, 64, 80, 112, 128};
  const int lengths[] = {1, 15, 16, 17, 31, 32, 33, 34, 63, 64, 65, 129};
  int i = 0;
  for (int head_dim : head_dims)
    for (const int* h : heads) {
      const int window = i % 5 == 1 ? 32 : i % 5 == 3 ? 5 : 0;
      const float softcap = i % 4 == 3 ? 20.0f : 0.0f;
      check_forms(kernels, {h[0], h[1], head_dim, window, softcap, types[(i + i / 12) % 4]}, lengths[i % 12], (uint64_t)i);
      ++i;
    }
  for (float bad : {INFINITY, -INFINITY, NAN}) for (bool in_key : {false, true}) check_poison(kernels, bad, in_key);
  for (KVType type : types) {
    for (int tokens : {31, 32, 33, 34, 63, 64, 65, 200}) check_forms(kernels, {2, 1, 16, 32, 0.0f, type}, tokens, 500);
    for (int tokens : {255, 256, 257, 300}) check_forms(kernels, {3, 1, 16, 0, tokens == 300 ? 15.0f : 0.0f, type}, tokens, 600);
    for (int window : {1, 2, 3}) check_forms(kernels, {2, 2, 16, window, 0.0f, type}, 70, 650);
    check_forms(kernels, {1, 1, 16, 250, 0.0f, type}, 520, 700);
    check_later_rows(kernels, {3, 1, 32, 0, 0.0f, type}, 70);
    check_later_rows(kernels, {1, 1, 16, 20, 0.0f, type}, 80);
    for (float softcap : {0.0f, 20.0f})
      for (int window : {0, 20}) check_nan_key(kernels, {2, 1, 32, window, softcap, type}, 150);
    check_long(kernels, {3, 1, 64, 0, 0.0f, type}, 2040, 12);
    check_long(kernels, {4, 1, 64, 512, 30.0f, type}, 2300, 40);
    for (int start : {63, 64, 127, 255, 256, 300, 1023}) check_long(kernels, {6, 2, 24, 0, start % 2 ? 0.0f : 20.0f, type}, start, 5);
    check_long(kernels, {3, 1, 16, 0, 0.0f, type}, 4400, 7);
  }
  for (KVType type : {KVType::kBF16, KVType::kI8, KVType::kF16}) {
    check_long(kernels, {4, 1, 256, 512, 0.0f, type}, 1020, 8);
    check_long(kernels, {2, 1, 512, 0, 0.0f, type}, 250, 8);
    check_long(kernels, {40, 1, 16, 0, 0.0f, type}, 500, 30);
  }
}

}  // namespace

int main() {
  for (const Kernels* kernels : levels()) check_level(*kernels);
  return finish("test_attention");
}
