// What attention must give: one query in double from the stored keys and values, and how far float32 arithmetic may be from it.
//
// Reads KV memory through the layout that kernels.h documents, element by element.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace octavo {

// K or V element `d` of one token of one head.
float stored_kv(const KVLayerView& kv, const int32_t* block_table, int token, int kv_head, int d, bool value);

// out[d] = the query's result; q is its [head_dim]. Returns the bound on |error|.
double scalar_attention(const KVLayerView& kv, const int32_t* block_table, const AttentionParams& p, const float* q, int position, int head,
                        std::vector<double>& out);

}  // namespace octavo
