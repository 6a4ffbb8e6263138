#include "program/runner.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

constexpr size_t kLogitsBudgetFloats = 16u << 20;    // 64 MB of logits at a time

}  // namespace

// ---- building --------------------------------------------------------------------------------------------------------

int Runner::add_buffer(int width) {
  auto b = std::make_unique<Buffer>();
  b->width = b->stride = width;
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

int Runner::add_matrix_of(const Runner& other, int index) {
  matrices_.push_back(other.matrices_.at((size_t)index));
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
  Phase& phase = phase_of(PhaseKind::kRows);
  if (op.kind == RowOpKind::kStoreKV) phase.stores.push_back(op.layer);
  phase.rows.push_back(op);
}

void Runner::add_matmul(const MatmulOp& op) {
  Phase& phase = phase_of(PhaseKind::kMatmul);
  phase.matmuls.push_back(op);
  phase.num_blocks += matrices_.at((size_t)op.weight)->num_blocks;
}

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
  head_rows_ = (int)std::min<size_t>(64, std::max<size_t>(1, kLogitsBudgetFloats / logits_stride()));
}

// Products of float weights read their rows without gaps; all other buffers may have some.
void Runner::set_strides() {
  std::vector<bool> dense(buffers_.size(), false);
  const auto reads = [&](int buffer, int weight) {
    if (!matrices_.at((size_t)weight)->quantised()) dense[(size_t)buffer] = true;
  };
  for (const Phase& p : phases_)
    for (const MatmulOp& op : p.matmuls) reads(op.in, op.weight);
  if (head_.weight >= 0) reads(head_.in, head_.weight);
  for (size_t i = 0; i < buffers_.size(); ++i)
    if (!dense[i]) buffers_[i]->stride = row_stride(buffers_[i]->width);
}

// What a row costs, for sharing rows out.
void Runner::count_products() {
  row_products_ = 0.0;
  seen_products_.clear();
  for (const Phase& p : phases_) {
    if (p.kind == PhaseKind::kSelect) break;
    for (const MatmulOp& op : p.matmuls) row_products_ += (double)matrices_[(size_t)op.weight]->n * matrices_[(size_t)op.weight]->k;
    if (p.kind != PhaseKind::kAttention) continue;
    const AttentionParams& a = p.attention.params;
    auto same = std::find_if(seen_products_.begin(), seen_products_.end(), [&](const auto& s) { return s.first == a.window; });
    if (same == seen_products_.end()) same = seen_products_.insert(same, {a.window, 0.0});
    same->second += 2.0 * a.heads * a.head_dim;
  }
}

void Runner::allocate_kv(int num_pages, int block_size, KVType type, const std::vector<KVLayerShape>& layers, const KVPageLayout& layout) {
  kv_ = std::make_shared<KVStore>(num_pages, block_size, type, layers, layout);
  get_ready();
}

void Runner::lodge_kv(const Runner& owner, int block_size, KVType type, const std::vector<KVLayerShape>& layers, const KVPageLayout& layout) {
  if (!owner.kv_) throw std::logic_error("lodge_kv before allocate_kv");
  kv_ = std::make_shared<KVStore>(*owner.kv_, block_size, type, layers, layout);
  get_ready();
}

void Runner::share_kv(const Runner& other, int num_layers) {
  if (!other.kv_) throw std::logic_error("share_kv before allocate_kv");
  if (num_layers > other.kv_->num_layers()) throw std::invalid_argument("KV layers: " + std::to_string(num_layers) + " are not there to be shared");
  kv_ = other.kv_;
  get_ready();
}

// The program is whole, and its KV is there.
void Runner::get_ready() {
  size_t scratch = 64;
  for (const auto& p : phases_)
    if (p.kind == PhaseKind::kAttention) scratch = std::max(scratch, kernels_.attention_scratch_bytes(p.attention.params));
  set_strides();
  count_products();
  for (size_t i = phases_.size(), next = i; i-- > 0;) {
    phases_[i].next_matmul = next;
    if (phases_[i].kind == PhaseKind::kMatmul) next = i;
  }
  kv_progress_.resize((size_t)kv_->num_layers());
  scratch_.clear();
  for (int t = 0; t < pool_.size(); ++t) scratch_.emplace_back(scratch);
}

size_t Runner::packed_bytes() const {
  size_t total = 0;
  for (const auto& m : matrices_) total += m->bytes;
  return total;
}

}  // namespace octavo
