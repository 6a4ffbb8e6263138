// Attention in a step of a Runner: which threads walk which keys and values.
//
// Tiles that several decoding sequences share are walked first, once for all of them, by all threads or by that of their panel; each
// sequence then goes on from its states. By phases, items of (sequence, KV head, rows, splits) are handed out for that; by panels, a thread attends for the rows of its
// panel. No form changes a bit (kernels/attention.inl).
#include <algorithm>

#include "program/runner.h"

namespace octavo {
namespace {

constexpr int kRowsPerAttentionItem = 32;
// Threads meet twice a layer to walk shared tiles: for at least so many tiles saved (a tile takes a core 2 to 4 us), and, where they would
// not meet otherwise, so many tiles per row and thread (a third of a millisecond in a small model). On a busy machine a meeting is waiting.
constexpr int kWorthMeeting = 16, kLongWalk = 256;
constexpr int kWorthWalking = 4;  // tiles saved where nobody meets for it
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

// A sequence with the states of what it shares with others; attention goes on from there.
AttentionSequence Runner::own_part(const AttentionOp& op, const Shared& shared, const StepInput& in, int seq, int thread) {
  AttentionSequence s = sequence_view(op, in, seq);
  s.bytes_read = reads_of(thread, false);
  const int tokens = op.params.window ? 0 : shared.prefixes.tokens(seq);
  if (tokens) s.head = {shared.states.data(), tokens, shared.prefixes.place[(size_t)seq], shared.prefixes.splits};
  return s;
}

Work Runner::run_attention(const Phase& phase, const StepInput& in, int thread, std::atomic<int>& next) {
  const AttentionOp& op = phase.attention;
  const KVLayerView& kv = kv_->layer(op.layer);
  Work work{0, (int)items_.size()};
  for (int i = next.fetch_add(1); i < work.total; i = next.fetch_add(1), ++work.done) {
    const AttentionItem& item = items_[(size_t)i];
    const AttentionSequence s = own_part(op, shared_, in, item.seq, thread);
    const int begin = std::max(item.split_begin, s.head.tokens / kSplitTokens), end = item.partial ? item.split_end : attention_num_splits(s);
    if (item.partial && begin >= end) continue;  // walked together with others
    float* partial = item.partial ? partials_.data() + partial_base_[(size_t)item.seq] : nullptr;
    kernels_.attention(kv, op.params, s, item.kv_head, item.row_begin, item.row_end, begin, end, partial, scratch_[(size_t)thread].data());
  }
  return work;
}

Work Runner::run_merge(const Phase& phase, const StepInput& in, std::atomic<int>& next) {
  const AttentionOp& op = phase.attention;
  Work work{0, (int)items_.size()};
  // One merge per (row, kv_head) of each split item's first split.
  for (int i = next.fetch_add(1); i < work.total; i = next.fetch_add(1), ++work.done) {
    const AttentionItem& item = items_[(size_t)i];
    if (!item.partial || item.split_begin != 0) continue;
    const AttentionSequence s = own_part(op, shared_, in, item.seq, 0);
    const int splits = attention_num_splits(s);
    for (int row = item.row_begin; row < item.row_end; ++row)
      kernels_.attention_merge(op.params, s, item.kv_head, row, splits, partials_.data() + partial_base_[(size_t)item.seq]);
  }
  return work;
}

// ---- by panels -----------------------------------------------------------------------------------------------------------

void Runner::attend_panel(const AttentionOp& op, Rows rows, size_t panel, const StepInput& in, int thread) {
  Shared& shared = shares(op) ? shared_ : panel_shared_[panel];
  if (!shares(op) && !op.params.window)
    for (int h = 0; h < op.params.kv_heads; ++h)
      for (int unit = 0; unit < shared.prefixes.num_units(); ++unit) walk_unit(op, shared, in, h, unit, thread);
  for (int row = rows.begin; row < rows.end;) {
    const int seq = places_[(size_t)row].seq, first = seq_first_row_[(size_t)seq];
    const int end = std::min(rows.end, first + in.seq_rows[seq]);
    const AttentionSequence s = own_part(op, shared, in, seq, thread);
    for (int h = 0; h < op.params.kv_heads; ++h)
      kernels_.attention(kv_->layer(op.layer), op.params, s, h, row - first, end - first, s.head.tokens / kSplitTokens, attention_num_splits(s), nullptr,
                         scratch_[(size_t)thread].data());
    row = end;
  }
}

// ---- what sequences share ------------------------------------------------------------------------------------------------

SharedPrefixes::Machine Runner::sharing_machine() const {
  SharedPrefixes::Machine machine{pool_.size(), 0, kv_->block_size(), 0, pool_.size() > 1 ? kWorthMeeting : kWorthWalking, least_shared_tiles_};
  for (const auto& p : phases_)
    if (p.kind == PhaseKind::kAttention && p.attention.params.window == 0) {
      machine.kv_heads = p.attention.params.kv_heads;
      machine.state_floats = std::max(machine.state_floats, kernels_.attention_partial_floats(p.attention.params));
    }
  return machine;
}

// By all sequences of the step, if threads are to meet for it.
void Runner::find_shared_prefixes(const StepInput& in) {
  SharedPrefixes& prefixes = shared_.prefixes;
  prefixes.clear();
  const SharedPrefixes::Machine machine = sharing_machine();
  if (!walk_together_ || !machine.kv_heads || in.num_seqs < 2) return;
  prefixes.find(in, machine, 0, in.num_rows);
  const bool meets = by_phases(in.num_rows) || pool_.size() == 1 || prefixes.row_tiles() >= (int64_t)kLongWalk * pool_.size();
  if (!meets) prefixes.clear();
  if (!prefixes.empty()) shared_.states.reserve(prefixes.num_states(machine.kv_heads) * machine.state_floats);
}

// By the sequences of a panel; its thread walks what they share and meets nobody.
void Runner::find_shared_in_panels(const StepInput& in) {
  const std::vector<int>& panels = stages_[0].panels;
  if (panels.size() > panel_shared_.size()) panel_shared_.resize(panels.size());
  SharedPrefixes::Machine machine = sharing_machine();
  machine.threads = 1;
  machine.worth = kWorthWalking;
  for (size_t i = 0; i + 1 < panels.size(); ++i) {
    Shared& shared = panel_shared_[i];
    shared.prefixes.clear();
    if (!walk_together_ || !machine.kv_heads || in.num_seqs < 2 || !shared_.prefixes.empty()) continue;
    shared.prefixes.find(in, machine, panels[i], panels[i + 1]);
    shared.states.reserve(shared.prefixes.num_states(machine.kv_heads) * machine.state_floats);
  }
}

// All threads have stored this layer's keys and values before, and meet afterwards. Each begins with a stretch of its own, one KV head's
// splits in order, and then helps the others.
bool Runner::walk_shared(const AttentionOp& op, const StepInput& in, Turn& turn, size_t index) {
  if (!shares(op)) return true;
  const int threads = pool_.size(), units = shared_.prefixes.num_units(), walks = units * op.params.kv_heads;
  Work work{0, walks};
  for (int i = 0; i < threads && turn.open(); ++i) {
    const int share = (turn.thread() + i) % threads;
    const int first = (int)((int64_t)walks * share / threads), last = (int)((int64_t)walks * (share + 1) / threads);
    std::atomic<int>& next = counter(index, kOwnCounters + share);
    for (int j = first + next.fetch_add(1); j < last; j = first + next.fetch_add(1), ++work.done) walk_unit(op, shared_, in, j / units, j % units, turn.thread());
  }
  return turn.meet(work);
}

void Runner::walk_unit(const AttentionOp& op, Shared& shared, const StepInput& in, int kv_head, int unit, int thread) {
  const Buffer& q = *buffers_[(size_t)op.q];
  const SharedPrefixes& p = shared.prefixes;
  const size_t row_floats = kernels_.attention_partial_floats(op.params) * (size_t)op.params.kv_heads * (size_t)p.splits;
  for (int i = p.units[(size_t)unit]; i < p.units[(size_t)unit + 1]; ++i) {
    const SharedRun& run = p.runs[(size_t)i];
    const int seq = places_[(size_t)p.rows[(size_t)run.begin]].seq, split = run.tile_begin * kTileTokens / kSplitTokens;
    const int walked = run.tile_end * kTileTokens;
    float* states = shared.states.data() + (size_t)run.begin * row_floats;
    AttentionSequence s = sequence_view(op, in, seq);
    s.q = q.x.data() + op.q_col;
    s.q_rows = p.rows.data() + run.begin;
    s.rows = run.end - run.begin;
    // The whole split; what lies behind it in the same table is asked for ahead.
    s.start = (walked % kSplitTokens ? walked : std::min(p.tokens(seq), walked + kTileTokens)) - 1;
    s.together = true;
    s.state_splits = p.splits;
    s.head = {states, run.tile_begin * kTileTokens, 0, p.splits};
    s.bytes_read = reads_of(thread, true);
    kernels_.attention(kv_->layer(op.layer), op.params, s, kv_head, 0, s.rows, split, split + 1, states, scratch_[(size_t)thread].data());
  }
}

// ---- counting ------------------------------------------------------------------------------------------------------------

void Runner::count_kv_reads(bool on) { kv_reads_.assign(on ? (size_t)pool_.size() : 0, {}); }

KVReads Runner::kv_reads() const {
  KVReads sum;
  for (const ThreadReads& t : kv_reads_) {
    sum.together += t.bytes.together;
    sum.alone += t.bytes.alone;
  }
  return sum;
}

uint64_t* Runner::reads_of(int thread, bool together) {
  if (kv_reads_.empty()) return nullptr;
  KVReads& bytes = kv_reads_[(size_t)thread].bytes;
  return together ? &bytes.together : &bytes.alone;
}

}  // namespace octavo
