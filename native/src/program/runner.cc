#include "program/runner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

constexpr int kRowsAlone = 4;  // fewer rows than this are one thread's work
constexpr int kRowsPerAttentionItem = 32;
constexpr int kSplitRows = 4;                        // sequences with more rows than this have work enough without splits
constexpr size_t kLogitsBudgetFloats = 16u << 20;    // 64 MB of logits at a time

}  // namespace

// ---- building --------------------------------------------------------------------------------------------------------

int Runner::add_buffer(int width) {
  auto b = std::make_unique<Buffer>();
  b->width = width;
  buffers_.push_back(std::move(b));
  return (int)buffers_.size() - 1;
}

int Runner::add_vector(const float* values, int n) {
  auto v = std::make_unique<AlignedArray<float>>((size_t)n);
  std::memcpy(v->data(), values, sizeof(float) * (size_t)n);
  vectors_.push_back(std::move(v));
  return (int)vectors_.size() - 1;
}

int Runner::add_matrix(const char* dtype, const uint8_t* raw, int n, int k, bool widen, bool mapped) {
  matrices_.push_back(packer_.plan(dtype, raw, n, k, widen, mapped));
  return (int)matrices_.size() - 1;
}

int Runner::add_embedding(const char* dtype, const uint8_t* raw, int k) {
  embeddings_.push_back(Embedding{std::vector<char>(dtype, dtype + std::strlen(dtype) + 1), raw, k, row_bytes(dtype, k), nullptr});
  return (int)embeddings_.size() - 1;
}

int Runner::add_embedding_of(int matrix) {
  const PackedMatrix& packed = this->matrix(matrix);
  embeddings_.push_back(Embedding{{}, nullptr, packed.k, 0, &packed});
  return (int)embeddings_.size() - 1;
}

int Runner::add_rope() {
  ropes_.push_back(std::make_unique<RopeTable>());
  return (int)ropes_.size() - 1;
}

void Runner::extend_rope(int index, const float* cos_sin, int positions, int half_dim) {
  RopeTable& t = *ropes_.at((size_t)index);
  if (t.half_dim && t.half_dim != half_dim) throw std::invalid_argument("rope table: rows of another width");
  t.cos_sin.insert(t.cos_sin.end(), cos_sin, cos_sin + (size_t)positions * (size_t)half_dim * 2);
  t.half_dim = half_dim;
}

int Runner::rope_positions() const {
  int least = std::numeric_limits<int>::max();  // without rotary embeddings there is no limit
  for (const auto& t : ropes_) least = std::min(least, t->positions());
  return least;
}

Runner::Phase& Runner::phase_of(PhaseKind kind) {
  const bool joins = !phases_.empty() && phases_.back().kind == kind && (kind == PhaseKind::kRows || (kind == PhaseKind::kMatmul && group_open_));
  if (!joins) {
    phases_.emplace_back();
    phases_.back().kind = kind;
  }
  group_open_ = kind == PhaseKind::kMatmul;
  return phases_.back();
}

void Runner::add_row_op(const RowOp& op) {
  if (op.kind == RowOpKind::kQuantize) buffers_.at((size_t)op.in)->quantized = true;
  phase_of(PhaseKind::kRows).rows.push_back(op);
}

void Runner::add_matmul(const MatmulOp& op) { phase_of(PhaseKind::kMatmul).matmuls.push_back(op); }

void Runner::begin_group() { group_open_ = false; }

void Runner::add_attention(const AttentionOp& op) {
  for (const Phase& p : phases_)  // the items of a step are planned once for all layers
    if (p.kind == PhaseKind::kAttention && p.attention.params.kv_heads != op.params.kv_heads)
      throw std::invalid_argument("layers with different numbers of KV heads: " + std::to_string(p.attention.params.kv_heads) + " and " +
                                  std::to_string(op.params.kv_heads));
  phase_of(PhaseKind::kAttention).attention = op;
}

void Runner::add_select(const std::vector<int>& buffers) { phase_of(PhaseKind::kSelect).buffers = buffers; }

void Runner::set_head(const HeadOp& op) {
  head_ = op;
  const size_t padded = ((size_t)vocab() + 15) / 16 * 16;
  head_rows_ = (int)std::min<size_t>(64, std::max<size_t>(1, kLogitsBudgetFloats / padded));
}

void Runner::allocate_kv(int num_blocks, int block_size, KVType type, const std::vector<KVLayerShape>& layers) {
  kv_ = std::make_unique<KVStore>(num_blocks, block_size, type, layers);
  size_t scratch = 64;
  for (const auto& p : phases_)
    if (p.kind == PhaseKind::kAttention) scratch = std::max(scratch, kernels_.attention_scratch_bytes(p.attention.params));
  scratch_.clear();
  for (int t = 0; t < pool_.size(); ++t) scratch_.emplace_back(scratch);
}

size_t Runner::packed_bytes() const {
  size_t total = 0;
  for (const auto& m : matrices_) total += m->bytes;
  return total;
}

// ---- one step ----------------------------------------------------------------------------------------------------------

void Runner::step(const StepInput& in, LogitsConsumer& consumer) {
  if (!kv_) throw std::logic_error("step before allocate_kv");
  if (in.num_rows == 0) return;
  prepare(in);
  pool_.each([&](int thread) { run_phases(in, consumer, thread); });
}

void Runner::prepare(const StepInput& in) {
  const size_t rows = (size_t)in.num_rows;
  for (auto& b : buffers_) {
    const size_t width = (size_t)b->width;
    b->x.reserve(rows * width);
    if (b->quantized) {
      b->q.reserve(rows * width);
      b->scale.reserve(rows * ((width + 31) / 32));
      b->sum16.reserve(rows * ((width + 15) / 16));
    }
  }
  places_.resize(rows);
  seq_first_row_.resize((size_t)in.num_seqs);
  const int block_size = kv_->block_size();
  int row = 0;
  for (int s = 0; s < in.num_seqs; ++s) {
    seq_first_row_[(size_t)s] = row;
    const int32_t* table = in.tables + in.table_offset[s];
    for (int i = 0; i < in.seq_rows[s]; ++i, ++row) {
      const int p = in.seq_start[s] + i;
      places_[(size_t)row] = RowPlace{p, table[p / block_size], p % block_size};
    }
  }
  if (in.num_logit_rows > 0) {
    const size_t padded = ((size_t)vocab() + 15) / 16 * 16;
    logits_.reserve((size_t)std::min(head_rows_, in.num_logit_rows) * padded);
  }
  const size_t chunks = in.num_logit_rows ? (size_t)((in.num_logit_rows + head_rows_ - 1) / head_rows_) : 0;
  const size_t needed = phases_.size() * 2 + chunks * 2;
  while (counters_.size() < needed) counters_.push_back(std::make_unique<std::atomic<int>>(0));
  for (auto& c : counters_) c->store(0, std::memory_order_relaxed);
  for (const auto& p : phases_)
    if (p.kind == PhaseKind::kAttention) {
      plan_attention(in, p.attention.params.kv_heads);
      break;
    }
}

// Items of one attention phase. Splitting a row's positions over items is worth a merge only when there are too few items.
void Runner::plan_attention(const StepInput& in, int kv_heads) {
  items_.clear();
  any_partial_ = false;
  partial_base_.assign((size_t)in.num_seqs, 0);
  int whole = 0;
  for (int s = 0; s < in.num_seqs; ++s) whole += kv_heads * ((in.seq_rows[s] + kRowsPerAttentionItem - 1) / kRowsPerAttentionItem);
  const bool few = pool_.size() > 1 && whole < 4 * pool_.size();
  size_t partial_floats = 0;
  for (const auto& p : phases_)
    if (p.kind == PhaseKind::kAttention) partial_floats = std::max(partial_floats, kernels_.attention_partial_floats(p.attention.params));
  size_t total = 0;
  for (int s = 0; s < in.num_seqs; ++s) {
    const int rows = in.seq_rows[s], last = in.seq_start[s] + rows - 1, splits = last / kSplitTokens + 1;
    if (few && rows <= kSplitRows && splits > 1) {
      any_partial_ = true;
      partial_base_[(size_t)s] = total;
      total += (size_t)rows * (size_t)kv_heads * (size_t)splits * partial_floats;
      for (int h = 0; h < kv_heads; ++h)
        for (int k = 0; k < splits; ++k) items_.push_back({s, h, 0, rows, k, k + 1, true});
      continue;
    }
    // Later rows see more positions; the largest items go first so that threads end together.
    for (int end = rows; end > 0; end -= kRowsPerAttentionItem)
      for (int h = 0; h < kv_heads; ++h) items_.push_back({s, h, std::max(0, end - kRowsPerAttentionItem), end, 0, -1, false});
  }
  if (total) partials_.reserve(total);
}

// Every thread walks this loop alike: what it decides depends on the step alone.
void Runner::run_phases(const StepInput& in, LogitsConsumer& consumer, int thread) {
  int rows = in.num_rows;
  bool met = true;  // all threads have finished what comes before
  for (size_t i = 0; i < phases_.size(); ++i) {
    const Phase& phase = phases_[i];
    if (runs_alone(phase, rows)) {
      pool_.barrier_then([&] { run_alone(phase, in, rows); });
      if (phase.kind == PhaseKind::kSelect) rows = in.num_logit_rows;
      if (rows == 0) return;  // nobody wants this step's logits: KV is written, the rest is not needed
      met = true;
      continue;
    }
    if (!met) pool_.barrier();
    run_shared(phase, in, rows, thread, i);
    met = false;
  }
  if (!met) pool_.barrier();
  run_head(in, consumer, thread, phases_.size() * 2);
}

// Few rows are sooner done by one thread than shared out between two meetings.
bool Runner::runs_alone(const Phase& phase, int rows) const {
  return phase.kind == PhaseKind::kSelect || (phase.kind == PhaseKind::kRows && rows < kRowsAlone);
}

void Runner::run_alone(const Phase& phase, const StepInput& in, int rows) {
  if (phase.kind == PhaseKind::kSelect) {
    if (in.num_logit_rows < rows) run_select(phase, in);
    return;
  }
  for (int row = 0; row < rows; ++row)
    for (const RowOp& op : phase.rows) run_row_op(op, in, row);
}

void Runner::run_shared(const Phase& phase, const StepInput& in, int rows, int thread, size_t index) {
  std::atomic<int>& next = *counters_[2 * index];
  if (phase.kind == PhaseKind::kRows) run_rows(phase, in, rows, next);
  if (phase.kind == PhaseKind::kMatmul) run_matmuls(phase.matmuls, rows, next);
  if (phase.kind != PhaseKind::kAttention) return;
  run_attention(phase, in, thread, next);
  if (!any_partial_) return;
  pool_.barrier();
  run_merge(phase, in, *counters_[2 * index + 1]);
}

void Runner::run_rows(const Phase& phase, const StepInput& in, int rows, std::atomic<int>& next) {
  const int chunk = rows > 8 * pool_.size() ? 4 : 1;
  for (int begin = next.fetch_add(chunk); begin < rows; begin = next.fetch_add(chunk))
    for (int row = begin; row < std::min(rows, begin + chunk); ++row)
      for (const RowOp& op : phase.rows) run_row_op(op, in, row);
}

void Runner::run_row_op(const RowOp& op, const StepInput& in, int row) {
  const auto at = [&](int buffer, int col) {
    Buffer& b = *buffers_[(size_t)buffer];
    return b.x.data() + (size_t)row * (size_t)b.width + col;
  };
  switch (op.kind) {
    case RowOpKind::kEmbed: {
      const Embedding& e = embeddings_[(size_t)op.weight];
      float* out = at(op.out, 0);
      if (e.packed) unpack_row(*e.packed, in.tokens[row], out);
      else dequantize_row(e.dtype.data(), e.raw + (size_t)in.tokens[row] * e.row_bytes, e.k, out);
      if (op.scale != 1.0f)
        for (int i = 0; i < e.k; ++i) out[i] *= op.scale;
      break;
    }
    case RowOpKind::kNorm: {
      const float* w = vectors_[(size_t)op.weight]->data();
      for (int h = 0; h < op.heads; ++h) kernels_.rmsnorm(at(op.in, op.in_col + h * op.dim), w, op.eps, op.dim, at(op.out, op.out_col + h * op.dim));
      break;
    }
    case RowOpKind::kRope: {
      const RopeTable& t = *ropes_[(size_t)op.weight];
      const float* cs = t.cos_sin.data() + (size_t)places_[(size_t)row].position * (size_t)t.half_dim * 2;
      kernels_.rope(at(op.in, op.in_col), op.heads, op.dim, op.rotary_dim, op.interleaved, cs);
      break;
    }
    case RowOpKind::kStoreKV: {
      const RowPlace& p = places_[(size_t)row];
      kernels_.store_kv(kv_->layer(op.layer), p.block, p.offset, at(op.in, op.in_col), at(op.in2, op.in2_col));
      break;
    }
    case RowOpKind::kGatedAct: kernels_.gated_act(at(op.in, op.in_col), at(op.in2, op.in2_col), op.dim, op.activation, at(op.out, op.out_col)); break;
    case RowOpKind::kAdd: kernels_.add(at(op.in, op.in_col), at(op.in2, op.in2_col), op.dim, at(op.out, op.out_col)); break;
    case RowOpKind::kQuantize: kernels_.quantize(at(op.in, 0), buffers_[(size_t)op.in]->width, buffers_[(size_t)op.in]->rows(), row); break;
  }
}

void Runner::run_matmuls(const std::vector<MatmulOp>& ops, int rows, std::atomic<int>& next) {
  int total = 0;
  for (const MatmulOp& op : ops) total += matrices_[(size_t)op.weight]->num_blocks;
  const int chunk = std::max(2, total / (pool_.size() * 6) / 2 * 2);
  for (int begin = next.fetch_add(chunk); begin < total; begin = next.fetch_add(chunk)) {
    const int end = std::min(total, begin + chunk);
    int base = 0;
    for (const MatmulOp& op : ops) {
      const PackedMatrix& m = *matrices_[(size_t)op.weight];
      const int blocks = m.num_blocks, lo = std::max(begin - base, 0), hi = std::min(end - base, blocks);
      if (lo < hi) {
        Buffer &in = *buffers_[(size_t)op.in], &out = *buffers_[(size_t)op.out];
        const float* bias = op.bias >= 0 ? vectors_[(size_t)op.bias]->data() : nullptr;
        kernels_.matmul(m, in.x.data(), in.rows(), rows, lo, hi, bias, op.accumulate, out.x.data() + op.out_col, out.width);
      }
      base += blocks;
    }
  }
}

AttentionSequence Runner::sequence_view(const AttentionOp& op, const StepInput& in, int seq) {
  Buffer &q = *buffers_[(size_t)op.q], &out = *buffers_[(size_t)op.out];
  const size_t first = (size_t)seq_first_row_[(size_t)seq];
  AttentionSequence s{};
  s.q = q.x.data() + first * (size_t)q.width + op.q_col;
  s.out = out.x.data() + first * (size_t)out.width;
  s.q_stride = q.width;
  s.out_stride = out.width;
  s.start = in.seq_start[seq];
  s.rows = in.seq_rows[seq];
  s.block_table = in.tables + in.table_offset[seq];
  return s;
}

void Runner::run_attention(const Phase& phase, const StepInput& in, int thread, std::atomic<int>& next) {
  const AttentionOp& op = phase.attention;
  const KVLayerView& kv = kv_->layer(op.layer);
  for (int i = next.fetch_add(1); i < (int)items_.size(); i = next.fetch_add(1)) {
    const AttentionItem& item = items_[(size_t)i];
    const AttentionSequence s = sequence_view(op, in, item.seq);
    const int splits = attention_num_splits(s);
    float* partial = item.partial ? partials_.data() + partial_base_[(size_t)item.seq] : nullptr;
    kernels_.attention(kv, op.params, s, item.kv_head, item.row_begin, item.row_end, item.split_begin, item.partial ? item.split_end : splits, partial,
                       scratch_[(size_t)thread].data());
  }
}

void Runner::run_merge(const Phase& phase, const StepInput& in, std::atomic<int>& next) {
  const AttentionOp& op = phase.attention;
  // One merge per (row, kv_head) of each split item's first split.
  for (int i = next.fetch_add(1); i < (int)items_.size(); i = next.fetch_add(1)) {
    const AttentionItem& item = items_[(size_t)i];
    if (!item.partial || item.split_begin != 0) continue;
    const AttentionSequence s = sequence_view(op, in, item.seq);
    const int splits = attention_num_splits(s);
    for (int row = item.row_begin; row < item.row_end; ++row)
      kernels_.attention_merge(op.params, s, item.kv_head, row, splits, partials_.data() + partial_base_[(size_t)item.seq]);
  }
}

void Runner::run_select(const Phase& phase, const StepInput& in) {
  for (int b : phase.buffers) {
    Buffer& buffer = *buffers_[(size_t)b];
    const size_t width = (size_t)buffer.width;
    for (int i = 0; i < in.num_logit_rows; ++i)  // ascending, so a row is read before it is overwritten
      if (in.logit_rows[i] != i) std::memcpy(buffer.x.data() + (size_t)i * width, buffer.x.data() + (size_t)in.logit_rows[i] * width, width * sizeof(float));
  }
}

void Runner::run_head(const StepInput& in, LogitsConsumer& consumer, int thread, size_t counter) {
  const PackedMatrix& m = *matrices_[(size_t)head_.weight];
  Buffer& x = *buffers_[(size_t)head_.in];
  const int blocks = m.num_blocks, n = m.n, padded = blocks * 16, chunk = std::max(2, blocks / (pool_.size() * 8) / 2 * 2);
  int request = 0;
  for (int first = 0; first < in.num_logit_rows; first += head_rows_) {
    const int rows = std::min(head_rows_, in.num_logit_rows - first);
    QuantRows q = x.rows();
    if (x.quantized) q = QuantRows{q.q + (size_t)first * (size_t)x.width, q.scale + (size_t)first * (size_t)(x.width / 32), q.sum16 + (size_t)first * (size_t)(x.width / 16)};
    std::atomic<int>& next = *counters_[counter++];
    for (int b = next.fetch_add(chunk); b < blocks; b = next.fetch_add(chunk)) {
      const int end = std::min(blocks, b + chunk);
      kernels_.matmul(m, x.x.data() + (size_t)first * (size_t)x.width, q, rows, b, end, nullptr, false, logits_.data(), padded);
      if (head_.softcap > 0.0f)
        for (int r = 0; r < rows; ++r) {
          float* p = logits_.data() + (size_t)r * (size_t)padded + b * 16;
          kernels_.softcap(p, std::min(end * 16, n) - b * 16, head_.softcap, p);
        }
    }
    pool_.barrier();
    int end_request = request;
    while (end_request < consumer.num_requests() && consumer.logit_index(end_request) < first + rows) ++end_request;
    std::atomic<int>& next_request = *counters_[counter++];
    for (int r = next_request.fetch_add(1); request + r < end_request; r = next_request.fetch_add(1))
      consumer.consume(request + r, logits_.data() + (size_t)(consumer.logit_index(request + r) - first) * (size_t)padded, thread);
    if (in.logits_out && thread == 0)
      for (int r = 0; r < rows; ++r) std::memcpy(in.logits_out + (size_t)(first + r) * (size_t)n, logits_.data() + (size_t)r * (size_t)padded, sizeof(float) * (size_t)n);
    request = end_request;
    pool_.barrier();
  }
}

}  // namespace octavo
