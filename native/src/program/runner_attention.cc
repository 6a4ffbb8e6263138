// Attention in a step of a Runner: which threads walk which keys and values.
//
// By phases, items of (sequence, KV head, rows, splits) are handed out. By panels, a thread attends for the rows of its panel; decoding
// sequences beside each other that begin in the same blocks are walked over them once. No form changes a bit (kernels/attention.inl).
#include <algorithm>

#include "program/runner.h"

namespace octavo {
namespace {

constexpr int kRowsPerAttentionItem = 32;
constexpr int kMostSharedSplits = 16;  // bounds the states that are kept of them; the rest is walked sequence by sequence
// Sequences with more rows have work enough without splits. Between the two (drafts to verify) as long as their states stay few.
constexpr int kSplitRows = 4, kMostSplitRows = 16, kMostSplitStates = 256;

bool worth_splitting(int rows, int splits) {
  return splits > 1 && (rows <= kSplitRows || (rows <= kMostSplitRows && rows * splits <= kMostSplitStates));
}

}  // namespace

// ---- by phases -----------------------------------------------------------------------------------------------------------

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
    if (few && worth_splitting(rows, splits)) {
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

AttentionSequence Runner::sequence_view(const AttentionOp& op, const StepInput& in, int seq) {
  Buffer &q = *buffers_[(size_t)op.q], &out = *buffers_[(size_t)op.out];
  const size_t first = (size_t)seq_first_row_[(size_t)seq];
  AttentionSequence s{};
  s.q = q.row((int)first) + op.q_col;
  s.out = out.row((int)first);
  s.q_stride = q.stride;
  s.out_stride = out.stride;
  s.start = in.seq_start[seq];
  s.rows = in.seq_rows[seq];
  s.block_table = table(in, seq, kv_->column(op.layer));
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

// ---- by panels -----------------------------------------------------------------------------------------------------------

// Decoding sequences that stand beside each other and begin in the same blocks: a panel attends to those splits once for all of them.
void Runner::find_shared_prefixes(const StepInput& in) {
  shared_splits_.assign((size_t)in.num_seqs, 0);
  most_shared_splits_ = 0;
  const int blocks_per_split = kSplitTokens / kv_->block_size();
  for (int s = 1; s < in.num_seqs && kSplitTokens % kv_->block_size() == 0; ++s) {
    if (in.seq_rows[s - 1] != 1 || in.seq_rows[s] != 1) continue;
    const int32_t *a = in.tables + in.table_offset[s - 1], *b = in.tables + in.table_offset[s];
    const int whole = std::min(kMostSharedSplits, (std::min(in.seq_start[s - 1], in.seq_start[s]) + 1) / kSplitTokens);
    int blocks = 0;
    while (blocks < whole * blocks_per_split && a[blocks] == b[blocks]) ++blocks;
    shared_splits_[(size_t)s] = blocks / blocks_per_split;
    most_shared_splits_ = std::max(most_shared_splits_, shared_splits_[(size_t)s]);
  }
  if (!most_shared_splits_) return;
  size_t floats = 0;  // per row and split, of all KV heads
  for (const auto& p : phases_)
    if (p.kind == PhaseKind::kAttention)
      floats = std::max(floats, kernels_.attention_partial_floats(p.attention.params) * (size_t)p.attention.params.kv_heads);
  const std::vector<int>& panels = stages_[0].panels;
  int most_rows = 0;
  for (size_t i = 1; i < panels.size(); ++i) most_rows = std::max(most_rows, panels[i] - panels[i - 1]);
  together_.resize((size_t)pool_.size());
  for (auto& t : together_) t.reserve((size_t)most_rows * (size_t)most_shared_splits_ * floats);
}

void Runner::attend_panel(const AttentionOp& op, Rows rows, const StepInput& in, int thread) {
  for (int row = rows.begin; row < rows.end;) {
    const int count = rows_together(op, {row, rows.end}, in);
    if (count > 1) {
      attend_together(op, {row, row + count}, in, thread);
      row += count;
      continue;
    }
    const int seq = places_[(size_t)row].seq, first = seq_first_row_[(size_t)seq];
    const int end = std::min(rows.end, first + in.seq_rows[seq]);
    const AttentionSequence s = sequence_view(op, in, seq);
    for (int h = 0; h < op.params.kv_heads; ++h)
      kernels_.attention(kv_->layer(op.layer), op.params, s, h, row - first, end - first, 0, attention_num_splits(s), nullptr, scratch_[(size_t)thread].data());
    row = end;
  }
}

// How many rows from the first on belong to sequences that begin in the same blocks; a sequence that shares less begins a run of its own.
// A window sees too little of its beginning to share.
int Runner::rows_together(const AttentionOp& op, Rows rows, const StepInput& in) const {
  if (!most_shared_splits_ || op.params.window > 0 || in.seq_rows[places_[(size_t)rows.begin].seq] != 1) return 1;
  const auto shared = [&](int row) { return shared_splits_[(size_t)places_[(size_t)row].seq]; };
  int row = rows.begin + 1;
  while (row < rows.end && shared(row) > 0 && shared(row) >= shared(rows.begin + 1)) ++row;
  return row - rows.begin;
}

// Rows of one sequence each. The splits that all of them share are walked once, then each goes on from its states.
void Runner::attend_together(const AttentionOp& op, Rows rows, const StepInput& in, int thread) {
  const int first = places_[(size_t)rows.begin].seq, count = rows.end - rows.begin;
  const int splits = shared_splits_[(size_t)first + 1];  // the others share as many at least
  AttentionSequence all = sequence_view(op, in, first);
  all.rows = count;
  all.start = splits * kSplitTokens - 1;
  all.together = true;
  float* states = together_[(size_t)thread].data();
  uint8_t* scratch = scratch_[(size_t)thread].data();
  const KVLayerView& kv = kv_->layer(op.layer);
  for (int h = 0; h < op.params.kv_heads; ++h) {
    kernels_.attention(kv, op.params, all, h, 0, count, 0, splits, states, scratch);
    for (int i = 0; i < count; ++i) {
      AttentionSequence s = sequence_view(op, in, first + i);
      s.head = {states, splits, i};
      kernels_.attention(kv, op.params, s, h, 0, 1, splits, attention_num_splits(s), nullptr, scratch);
    }
  }
}

}  // namespace octavo
