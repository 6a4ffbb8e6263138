// The vocabulary loops of sampling: scan a row of logits, mask it, draw a token, take log-probabilities.
//
// The rule is octavo/sampling/reference.py; these kernels give its answers bit for bit on every ISA level. They know one row and
// one set of parameters; what a sequence has said so far, and the edits that follow from it, are SamplerSlots'.
// sampling.cc is compiled once per level; each level's table is reached through its function below.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int kMaxLogprobs = 20;   // top entries a row may ask for
constexpr int kScanBlock = 64;     // tokens that share one entry of LogitRow::block_best
constexpr int kNoiseBlock = 1024;  // tokens that share one run of noise counters; also the block of a lane sum

// A scanned row. Blocks whose best logit is too low need not be looked at again.
struct LogitRow {
  const float* logits;  // [size]
  int size;
  const float* block_best;  // [ceil(size / kScanBlock)] greatest logit of each block
  float best;         // greatest logit; a zero is +0
  int best_id;        // its lowest id
  int bad_id;         // lowest id whose logit is nan or +inf, -1: none; best and best_id mean nothing then
};

struct DrawParams {
  float temperature;  // > 0
  float top_p;        // in (0, 1]; 1: off
  float min_p;        // in [0, 1]; 0: off
  int top_k;          // 0: off
  uint64_t seed;
  uint64_t position;
};

// Room for the tokens that are left after a filter, by ascending id; each array holds the whole vocabulary.
struct Candidates {
  float* logits;
  int32_t* ids;
  uint32_t* weights;
};

struct TokenLogprobs {
  int32_t token_id;
  float logprob;
  int32_t rank;  // 1: best
  int32_t num_top;
  int32_t top_ids[kMaxLogprobs];
  float top_logprobs[kMaxLogprobs];
};

struct SamplingKernels {
  const char* name;  // "portable", "avx2", "avx512_vnni"

  // Fill block_best for tokens [begin, end) of a row; begin is a multiple of kScanBlock, and end too unless it is the row's. Returns
  // the lowest id whose logit is nan or +inf, or -1; with one, block_best means nothing. Parts may be scanned in any order.
  int (*scan)(const float* logits, int begin, int end, float* block_best);
  // best and best_id from logits and block_best of a row without a bad_id.
  void (*find_best)(LogitRow* row);
  // out[t] = logits[t] where every given mask allows t, -inf elsewhere; masks are packed bits, either may be null.
  void (*copy_masked)(const float* logits, const uint32_t* mask, const uint32_t* other_mask, int size, float* out);
  // The drawn token: filters, then Gumbel-max. row.best is finite.
  int (*draw)(const LogitRow& row, const DrawParams& params, Candidates room);
  // Log-probabilities of token_id and of the k best; row.best is finite, k at most kMaxLogprobs and row.size.
  void (*logprobs)(const LogitRow& row, int token_id, int k, Candidates room, TokenLogprobs* out);
};

const SamplingKernels* sampling_kernels_portable();
const SamplingKernels* sampling_kernels_avx2();    // null when not compiled in
const SamplingKernels* sampling_kernels_avx512_vnni();

// The table of a level's name, or null when this machine or build lacks it.
const SamplingKernels* sampling_kernels_by_name(const char* name);

}  // namespace octavo
