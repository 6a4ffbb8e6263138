// One step of a Runner: how its phases are shared out among the threads.
//
// Many rows: by panels of rows. A thread takes a panel through every phase while its activations stay in the core's own cache,
// reading all weights; threads meet only where rows of one sequence need each other's keys and values, which is before each
// attention, and not at all when no sequence has rows in two panels (a step of decoding sequences). Where many sequences share a long
// prefix threads meet too, to walk it once; a shorter one each thread walks once for its panel.
// Few rows: by phases. Every thread takes some of each phase's weights, and the threads meet between phases.
// Meeting is waiting for the work of a phase to be done, not for threads that the system has put aside and that have taken none of it.
// Which thread computes what, and with which other rows, never changes a bit.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "program/runner.h"

namespace octavo {
namespace {

constexpr int kRowsAlone = 4;  // by phases: row ops of fewer rows than this are one thread's work
constexpr int kChunksPerThread = 8;
constexpr size_t kPrefetchAhead = 16 << 10;
constexpr int kPanelRows = 32, kMaxPanelRows = 48;  // on average, at most: activations that the second-level cache holds beside weights

void prefetch_bytes(const uint8_t* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

}  // namespace

void Runner::step(const StepInput& in, LogitsConsumer& consumer) {
  if (!kv_) throw std::logic_error("step before allocate_kv");
  if (in.num_rows == 0) return;
  prepare(in);
  kv_progress_.begin(in.num_rows);
  pool_.share([&](Turn& turn) { run_step(in, consumer, turn); });
}

// ---- plan ------------------------------------------------------------------------------------------------------------

void Runner::prepare(const StepInput& in) {
  const size_t rows = (size_t)in.num_rows;
  for (auto& b : buffers_) {
    const size_t width = (size_t)b->width;
    b->x.reserve(rows * (size_t)b->stride);
    if (b->quantized) {
      b->q.reserve(rows * width);
      b->scale.reserve(rows * ((width + 31) / 32));
      b->sum16.reserve(rows * ((width + 15) / 16));
    }
  }
  place_rows(in);
  place_tables(in);
  find_shared_prefixes(in);
  plan_stages(in);
  find_shared_in_panels(in);
  if (in.num_logit_rows > 0) {
    const size_t head_rows = (size_t)std::min(head_rows_, in.num_logit_rows);
    logits_.reserve(head_rows * logits_stride());
    block_best_.reserve(head_rows * scan_blocks());
    bad_ids_.assign((size_t)pool_.size() * (size_t)head_rows_, vocab());
  }
  const size_t chunks = in.num_logit_rows ? (size_t)((in.num_logit_rows + head_rows_ - 1) / head_rows_) : 0;
  const size_t needed = (phases_.size() + chunks) * counters_per_phase();
  while (counters_.size() < needed) counters_.push_back(std::make_unique<std::atomic<int>>(0));
  for (auto& c : counters_) c->store(0, std::memory_order_relaxed);
  if (!stages_[0].panels.empty()) return;
  for (const auto& p : phases_)
    if (p.kind == PhaseKind::kAttention) {
      plan_attention(in, p.attention.params.kv_heads);
      break;
    }
}

void Runner::place_rows(const StepInput& in) {
  places_.resize((size_t)in.num_rows);
  seq_first_row_.resize((size_t)in.num_seqs);
  const int block_size = kv_->block_size();
  int row = 0;
  for (int s = 0; s < in.num_seqs; ++s) {
    seq_first_row_[(size_t)s] = row;
    for (int i = 0; i < in.seq_rows[s]; ++i, ++row) {
      const int p = in.seq_start[s] + i;
      places_[(size_t)row] = RowPlace{s, p, p / block_size, p % block_size};
    }
  }
}

// Block ids become pages. What is not there of a block, because its window has passed, is nowhere read: any page stands for it.
void Runner::place_tables(const StepInput& in) {
  const int columns = kv_->num_columns(), block_size = kv_->block_size();
  page_tables_.clear();
  if (columns == 1 && !in.pages) return;
  table_begin_.clear();
  for (int s = 0; s < in.num_seqs; ++s) {
    const int32_t* table = in.tables + in.table_offset[s];
    const int blocks = (in.seq_start[s] + in.seq_rows[s] + block_size - 1) / block_size;
    table_begin_.push_back(page_tables_.size());
    page_tables_.resize(page_tables_.size() + (size_t)blocks * (size_t)columns);
    int32_t* out = page_tables_.data() + table_begin_.back();
    for (int b = 0; b < blocks; ++b)
      for (int c = 0; c < columns; ++c) {
        const size_t at = (size_t)table[b] * (size_t)columns + (size_t)c;
        out[c * blocks + b] = in.pages ? in.pages[at] : (int32_t)at;
      }
  }
  table_begin_.push_back(page_tables_.size());
}

// The phases before rows are selected, and those behind; one stage when all rows go on and no two panels need each other.
void Runner::plan_stages(const StepInput& in) {
  size_t select = 0;
  while (select < phases_.size() && phases_[select].kind != PhaseKind::kSelect) ++select;
  Stage &all = stages_[0], &rest = stages_[1];
  all = {0, select, in.num_rows, cut_panels(in.num_rows, true), false};
  for (size_t i = 1; i + 1 < all.panels.size(); ++i) {
    const size_t row = (size_t)all.panels[i];
    all.meets = all.meets || places_[row].seq == places_[row - 1].seq;
  }
  const bool joined = !all.panels.empty() && !all.meets && in.num_logit_rows == in.num_rows;
  if (joined) all.end = phases_.size();
  rest = {joined ? phases_.size() : std::min(select + 1, phases_.size()), phases_.size(), in.num_logit_rows, cut_panels(in.num_logit_rows, false), false};
}

// First rows of panels of equal cost, as many for each thread, and the number of rows; empty when rows go by phases.
std::vector<int> Runner::cut_panels(int rows, bool attends) const {
  const int threads = pool_.size();
  if (by_phases(rows)) return {};
  const int wanted = threads * ((rows + threads * kPanelRows - 1) / (threads * kPanelRows));
  const auto cost = [&](int row) {
    const RowPlace& p = places_[(size_t)row];
    return attends ? row_cost(p.position, shared_.prefixes.tokens(p.seq)) : 1.0;
  };
  double left = 0.0;
  for (int row = 0; row < rows; ++row) left += cost(row);
  std::vector<int> first{0};
  for (int row = 0; row < rows;) {
    const double share = left / std::max(1, wanted - (int)first.size() + 1);
    double taken = 0.0;
    const int begin = row;
    while (row < rows && row - begin < kMaxPanelRows && (row == begin || taken + cost(row) / 2 <= share)) taken += cost(row++);
    left -= taken;
    first.push_back(row);
  }
  return first;
}

// Of the phases that attend, in 8-bit multiply-adds; those of attention take longer. `shared` positions are walked elsewhere.
double Runner::row_cost(int position, int shared) const {
  constexpr double kAttentionCost = 3.0;
  double cost = row_products_;
  for (const auto& [window, products] : seen_products_)
    cost += kAttentionCost * products * (window > 0 ? std::min(window, position + 1) : position + 1 - shared);
  return cost;
}

// ---- run -------------------------------------------------------------------------------------------------------------

// Every thread walks this alike: what it decides depends on the step alone. Threads have met where a stage begins.
void Runner::run_step(const StepInput& in, LogitsConsumer& consumer, Turn& turn) {
  Work work;
  if (!run_stage(stages_[0], in, turn, work)) return;
  if (stages_[0].end < phases_.size()) {
    const auto select = [&] {
      if (in.num_logit_rows < in.num_rows) run_select(phases_[stages_[0].end], in);
    };
    if (!turn.meet_then(work, select)) return;
    work = {};
    if (in.num_logit_rows > 0 && !run_stage(stages_[1], in, turn, work)) return;
  }
  // Without logits KV is written, and the rest is not needed.
  if (turn.meet(work) && in.num_logit_rows > 0) run_head(in, consumer, turn, phases_.size());
}

bool Runner::needs_others(const Stage& stage, size_t phase) const {
  return phases_[phase].kind == PhaseKind::kAttention && (stage.meets || shares(phases_[phase].attention));
}

bool Runner::run_stage(const Stage& stage, const StepInput& in, Turn& turn, Work& work) {
  if (stage.panels.empty()) return run_by_phases(stage, in, turn, work);
  const int panels = (int)stage.panels.size() - 1;
  for (size_t begin = stage.begin; begin < stage.end;) {  // a stretch: phases that need nothing of other panels
    size_t end = begin + 1;
    while (end < stage.end && !needs_others(stage, end)) ++end;
    if (begin > stage.begin && !turn.meet(work)) return false;
    if (phases_[begin].kind == PhaseKind::kAttention && !walk_shared(phases_[begin].attention, in, turn, begin)) return false;
    work = {0, panels};
    std::atomic<int>& next = counter(begin, 0);
    for (int i = next.fetch_add(1); i < panels; i = next.fetch_add(1), ++work.done)
      run_panel(begin, end, stage, (size_t)(panels - 1 - i), in, turn.thread());
    begin = end;
  }
  return true;
}

void Runner::run_panel(size_t begin, size_t end, const Stage& stage, size_t panel, const StepInput& in, int thread) {
  const Rows rows{stage.panels[panel], stage.panels[panel + 1]};
  for (size_t i = begin; i < end; ++i) {
    const Phase& phase = phases_[i];
    if (phase.kind == PhaseKind::kRows) run_rows(phase, in, rows);
    if (phase.kind == PhaseKind::kMatmul)
      for (const MatmulOp& op : phase.matmuls) run_matmul(op, rows, 0, matrices_[(size_t)op.weight]->num_blocks);
    if (phase.kind == PhaseKind::kAttention) attend_panel(phase.attention, rows, panel, in, thread);
  }
}

bool Runner::run_by_phases(const Stage& stage, const StepInput& in, Turn& turn, Work& work) {
  work = {};
  for (size_t i = stage.begin; i < stage.end; ++i) {
    const Phase& phase = phases_[i];
    // Few rows are sooner done by one thread than shared out between two meetings.
    if (phase.kind == PhaseKind::kRows && stage.rows < kRowsAlone) {
      if (!turn.meet_then(work, [&] { run_rows(phase, in, {0, stage.rows}); })) return false;
      work = {};
      continue;
    }
    if ((work.total > 0 && !turn.meet(work)) || !run_shared(phase, in, stage.rows, turn, i, work)) return false;
    if (phase.next_matmul < phases_.size() && turn.open()) prefetch_share(phases_[phase.next_matmul], turn.thread());
  }
  return true;
}

bool Runner::run_shared(const Phase& phase, const StepInput& in, int rows, Turn& turn, size_t index, Work& work) {
  if (phase.kind == PhaseKind::kAttention) return attend(phase, in, turn, index, work);
  work = phase.kind == PhaseKind::kMatmul ? run_matmuls(phase, rows, turn, index) : Work{0, rows};
  if (phase.kind == PhaseKind::kMatmul) return true;
  std::atomic<int>& next = counter(index, 0);
  for (int row = next.fetch_add(1); row < rows; row = next.fetch_add(1), ++work.done) run_row(phase, in, row);
  for (int layer : phase.stores) kv_progress_.add(layer, work.done);
  return true;
}

bool Runner::attend(const Phase& phase, const StepInput& in, Turn& turn, size_t index, Work& work) {
  if (!walk_shared(phase.attention, in, turn, index)) return false;
  work = run_attention(phase, in, turn.thread(), counter(index, 0));
  if (!any_partial_) return true;
  if (!turn.meet(work)) return false;
  work = run_merge(phase, in, counter(index, 1));
  return true;
}

void Runner::run_rows(const Phase& phase, const StepInput& in, Rows rows) {
  for (int row = rows.begin; row < rows.end; ++row) run_row(phase, in, row);
  for (int layer : phase.stores) kv_progress_.add(layer, rows.end - rows.begin);
}

void Runner::run_row(const Phase& phase, const StepInput& in, int row) {
  for (const RowOp& op : phase.rows) run_row_op(op, in, row);
}

void Runner::run_row_op(const RowOp& op, const StepInput& in, int row) {
  const auto at = [&](int buffer, int col) {
    Buffer& b = *buffers_[(size_t)buffer];
    return b.x.data() + (size_t)row * (size_t)b.stride + col;
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
      const int block = table(in, p.seq, kv_->column(op.layer))[p.index];
      kernels_.store_kv(kv_->layer(op.layer), block, p.offset, at(op.in, op.in_col), at(op.in2, op.in2_col));
      break;
    }
    case RowOpKind::kGatedAct: kernels_.gated_act(at(op.in, op.in_col), at(op.in2, op.in2_col), op.dim, op.activation, at(op.out, op.out_col)); break;
    case RowOpKind::kAdd: kernels_.add(at(op.in, op.in_col), at(op.in2, op.in2_col), op.dim, at(op.out, op.out_col)); break;
    case RowOpKind::kQuantize: kernels_.quantize(at(op.in, 0), buffers_[(size_t)op.in]->width, buffers_[(size_t)op.in]->rows(0), row); break;
  }
}

// Each thread begins with its own share of the blocks, one stretch of memory, and then helps with what others have left.
Work Runner::run_matmuls(const Phase& phase, int rows, const Turn& turn, size_t index) {
  const int threads = pool_.size(), chunk = std::max(1, phase.num_blocks / (threads * kChunksPerThread));
  Work work{0, phase.num_blocks};
  for (int i = 0; i < threads && turn.open(); ++i) {
    const int share = (turn.thread() + i) % threads, first = first_block(phase, share), last = first_block(phase, share + 1);
    std::atomic<int>& next = counter(index, kOwnCounters + share);
    for (int begin = first + next.fetch_add(chunk); begin < last; begin = first + next.fetch_add(chunk)) {
      const int end = std::min(last, begin + chunk);
      run_blocks(phase, rows, begin, end);
      work.done += end - begin;
    }
  }
  return work;
}

// Blocks [begin, end) of a phase's products, counted through all of them.
void Runner::run_blocks(const Phase& phase, int rows, int begin, int end) {
  int base = 0;
  for (const MatmulOp& op : phase.matmuls) {
    const int blocks = matrices_[(size_t)op.weight]->num_blocks, lo = std::max(begin - base, 0), hi = std::min(end - base, blocks);
    if (lo < hi) run_matmul(op, {0, rows}, lo, hi);
    base += blocks;
  }
}

// Asks for the beginning of a thread's share of the next weights, so that memory is busy while threads meet.
void Runner::prefetch_share(const Phase& phase, int thread) {
  int block = first_block(phase, thread);
  for (const MatmulOp& op : phase.matmuls) {
    const PackedMatrix& m = *matrices_[(size_t)op.weight];
    if (block < m.num_blocks) return prefetch_bytes(m.data + (size_t)block * m.block_bytes, std::min(kPrefetchAhead, (size_t)(m.num_blocks - block) * m.block_bytes));
    block -= m.num_blocks;
  }
}

void Runner::run_matmul(const MatmulOp& op, Rows rows, int block_begin, int block_end) {
  Buffer &in = *buffers_[(size_t)op.in], &out = *buffers_[(size_t)op.out];
  const float* bias = op.bias >= 0 ? vectors_[(size_t)op.bias]->data() : nullptr;
  kernels_.matmul(*matrices_[(size_t)op.weight], in.row(rows.begin), in.rows(rows.begin), rows.end - rows.begin, block_begin, block_end, bias,
                  op.accumulate, out.row(rows.begin) + op.out_col, out.stride);
}

void Runner::run_select(const Phase& phase, const StepInput& in) {
  for (int b : phase.buffers) {
    Buffer& buffer = *buffers_[(size_t)b];
    const size_t width = (size_t)buffer.width;
    for (int i = 0; i < in.num_logit_rows; ++i)  // ascending, so a row is read before it is overwritten
      if (in.logit_rows[i] != i) std::memcpy(buffer.row(i), buffer.row(in.logit_rows[i]), width * sizeof(float));
  }
}

bool Runner::run_head(const StepInput& in, LogitsConsumer& consumer, Turn& turn, size_t index) {
  int request = 0;
  for (int first = 0; first < in.num_logit_rows; first += head_rows_, ++index) {
    const Rows rows{first, std::min(first + head_rows_, in.num_logit_rows)};
    if (!turn.meet(compute_logits(first, rows.end - first, consumer, turn.thread(), counter(index, 0)))) return false;
    int end_request = request;
    while (end_request < consumer.num_requests() && consumer.logit_index(end_request) < rows.end) ++end_request;
    const Work work = consume_logits(in, consumer, rows, {request, end_request}, turn.thread(), counter(index, 1));
    if (!turn.meet_then(work, [&] { std::fill(bad_ids_.begin(), bad_ids_.end(), vocab()); })) return false;
    request = end_request;
  }
  return true;
}

// Units: the requests of these rows, and the rows themselves as they are wanted outside.
Work Runner::consume_logits(const StepInput& in, LogitsConsumer& consumer, Rows rows, Rows requests, int thread, std::atomic<int>& next) {
  const size_t n = (size_t)vocab();
  Work work{0, requests.end - requests.begin + 1};
  for (int i = next.fetch_add(1); i < work.total; i = next.fetch_add(1), ++work.done) {
    const int r = requests.begin + i;
    if (r == requests.end && in.logits_out)
      for (int row = rows.begin; row < rows.end; ++row)
        std::memcpy(in.logits_out + (size_t)row * n, logits_.data() + (size_t)(row - rows.begin) * logits_stride(), sizeof(float) * n);
    if (r == requests.end || (i > 0 && consumer.follows(r))) continue;  // whoever has the first of them takes them all
    for (int j = r; j == r || (j < requests.end && consumer.follows(j)); ++j) consumer.consume(j, scanned_row(consumer.logit_index(j) - rows.begin), thread);
  }
  return work;
}

// Logits of rows [first, first + rows), each part scanned by the thread that has just made it.
Work Runner::compute_logits(int first, int rows, const LogitsConsumer& consumer, int thread, std::atomic<int>& next) {
  const PackedMatrix& m = *matrices_[(size_t)head_.weight];
  Buffer& x = *buffers_[(size_t)head_.in];
  const size_t stride = logits_stride();
  constexpr int kBlocksPerScan = kScanBlock / kRowBlock;
  const int chunk = std::max(1, m.num_blocks / (pool_.size() * 16 * kBlocksPerScan)) * kBlocksPerScan;
  int* bad = bad_ids_.data() + (size_t)thread * (size_t)head_rows_;
  Work work{0, m.num_blocks};
  for (int b = next.fetch_add(chunk); b < work.total; b = next.fetch_add(chunk)) {
    const int end = std::min(work.total, b + chunk), begin_id = b * kRowBlock, end_id = std::min(end * kRowBlock, m.n);
    kernels_.matmul(m, x.row(first), x.rows(first), rows, b, end, nullptr, false, logits_.data(), (int)stride);
    for (int r = 0; r < rows; ++r) {
      float* logits = logits_.data() + (size_t)r * stride;
      if (head_.softcap > 0.0f) kernels_.softcap(logits + begin_id, end_id - begin_id, head_.softcap, logits + begin_id);
      const int found = consumer.scan(logits, begin_id, end_id, block_best_.data() + (size_t)r * scan_blocks());
      if (found >= 0) bad[r] = std::min(bad[r], found);
    }
    work.done += end - b;
  }
  return work;
}

LogitRow Runner::scanned_row(int row) const {
  int bad = vocab();
  for (int t = 0; t < pool_.size(); ++t) bad = std::min(bad, bad_ids_[(size_t)t * (size_t)head_rows_ + (size_t)row]);
  return {logits_.data() + (size_t)row * logits_stride(), vocab(), block_best_.data() + (size_t)row * scan_blocks(), 0.0f, 0, bad < vocab() ? bad : -1};
}

}  // namespace octavo
