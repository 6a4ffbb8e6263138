// What attention must give: one query in double from the stored keys and values, and how far float32 arithmetic may be from it.
//
// Reads KV memory through the layout that kernels.h documents, element by element.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace octavo {

// K or V element `d` of one token of one head.
float stored_kv(const KVLayerView& kv, const int32_t* block_table, int token, int kv_head, int d, bool value);

// What an attention kernel rounds besides float32. With bfloat16 products a query is a sum of two bfloat16 numbers, and weights are
// rounded; with int8 queries and weights are numbers of 16 bits.
struct AttentionRounding {
  bool bf16, int8;
  AttentionRounding(const Kernels& kernels, KVType type);
};

// out[d] = the query's result; q is its [head_dim]. Returns the bound on |error|.
double scalar_attention(const KVLayerView& kv, const int32_t* block_table, const AttentionParams& p, AttentionRounding rounding, const float* q,
                        int position, int head, std::vector<double>& out);

}  // namespace octavo
