// Tables with a deliberate fault: what each wrapper adds is one wrong value at the end of what the real kernel wrote.
#include <cstring>
#include <stdexcept>

#include "checks/kernel_check.h"

namespace octavo {
namespace {

Kernels real;    // what the wrappers call
Kernels faulty;
SamplingKernels real_sampling, faulty_sampling;

void bad_rmsnorm(const float* x, const float* w, float eps, int dim, float* out) {
  real.rmsnorm(x, w, eps, dim, out);
  out[dim - 1] += 1.0f;
}
void bad_quantize(const float* x, int k, QuantRows out, int row) {
  real.quantize(x, k, out, row);
  int8_t& last = out.q[static_cast<size_t>(row + 1) * static_cast<size_t>(k) - 1];
  last = static_cast<int8_t>(last == 0 ? 1 : -last);
}
void bad_gated_act(const float* gate, const float* up, int dim, int activation, float* out) {
  real.gated_act(gate, up, dim, activation, out);
  out[dim - 1] += 1.0f;
}
void bad_add(const float* a, const float* b, int dim, float* out) {
  real.add(a, b, dim, out);
  out[dim - 1] += 1.0f;
}
void bad_softcap(const float* x, int dim, float cap, float* out) {
  real.softcap(x, dim, cap, out);
  out[dim - 1] += 1.0f;
}
void bad_rope(float* x, int heads, int head_dim, int rotary_dim, bool interleaved, const float* cos_sin) {
  real.rope(x, heads, head_dim, rotary_dim, interleaved, cos_sin);
  x[rotary_dim - 1] += 1.0f;
}
void bad_store_kv(const KVLayerView& kv, int block, int offset, const float* k, const float* v) {
  real.store_kv(kv, block, offset, k, v);
  std::memset(kv.base + static_cast<size_t>(block) * kv.block_bytes, 0, 2);  // of the block's first token
}
void bad_pack_kv(KVType type, int head_dim, const uint8_t* tile, uint8_t* packed) {
  real.pack_kv(type, head_dim, tile, packed);
  packed[0] = static_cast<uint8_t>(packed[0] + 64);
}
void bad_matmul(const PackedMatrix& w, const float* x, const QuantRows& qx, int rows, int block_begin, int block_end, const float* bias,
                bool accumulate, float* out, int out_stride) {
  real.matmul(w, x, qx, rows, block_begin, block_end, bias, accumulate, out, out_stride);
  if (block_begin == 0 && block_end > 0) out[static_cast<size_t>(rows - 1) * static_cast<size_t>(out_stride)] += 1000.0f;
}
void bad_attention(const KVLayerView& kv, const AttentionParams& p, const AttentionSequence& s, int kv_head, int row_begin, int row_end,
                   int split_begin, int split_end, float* partial, void* scratch) {
  real.attention(kv, p, s, kv_head, row_begin, row_end, split_begin, split_end, partial, scratch);
  if (!partial) s.out[static_cast<size_t>(row_end - 1) * static_cast<size_t>(s.out_stride)] += 1.0f;
}

int bad_scan(const float* logits, int begin, int end, float* block_best) {
  const int bad = real_sampling.scan(logits, begin, end, block_best);
  if (end > begin) block_best[begin / kScanBlock] += 1.0f;
  return bad;
}
void bad_find_best(LogitRow* row) {
  real_sampling.find_best(row);
  ++row->best_id;
}
void bad_copy_masked(const float* logits, const uint32_t* mask, const uint32_t* other_mask, int size, float* out) {
  real_sampling.copy_masked(logits, mask, other_mask, size, out);
  out[size - 1] = 1.0f;
}
int bad_draw(const LogitRow& row, const DrawParams& params, Candidates room) { return real_sampling.draw(row, params, room) + 1; }
void bad_logprobs(const LogitRow& row, int token_id, int k, Candidates room, TokenLogprobs* out) {
  real_sampling.logprobs(row, token_id, k, room, out);
  out->top_logprobs[0] += 1.0f;
}

}  // namespace

const SamplingKernels& with_sampling_fault(const SamplingKernels& table) {
  real_sampling = table;
  faulty_sampling = {table.name, bad_scan, bad_find_best, bad_copy_masked, bad_draw, bad_logprobs};
  return faulty_sampling;
}

const Kernels& with_fault(const Kernels& table, const std::string& entry) {
  real = faulty = table;
  if (entry == "rmsnorm") faulty.rmsnorm = bad_rmsnorm;
  else if (entry == "quantize") faulty.quantize = bad_quantize;
  else if (entry == "gated_act") faulty.gated_act = bad_gated_act;
  else if (entry == "add") faulty.add = bad_add;
  else if (entry == "softcap") faulty.softcap = bad_softcap;
  else if (entry == "rope") faulty.rope = bad_rope;
  else if (entry == "store_kv") faulty.store_kv = bad_store_kv;
  else if (entry == "matmul") faulty.matmul = bad_matmul;
  else if (entry == "attention") faulty.attention = bad_attention;
  else if (entry == "pack_kv") faulty.pack_kv = bad_pack_kv;
  else throw std::invalid_argument("fault: no kernel entry is called " + entry);
  return faulty;
}

}  // namespace octavo
