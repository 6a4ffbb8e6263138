// How fast kernels are: seconds, and the bytes and operations counted, of a product or an attention on all threads at once.
#pragma once

#include <cstddef>
#include <string>

#include "kernels/kernels.h"
#include "runtime/thread_pool.h"

namespace octavo {

struct KernelSpeed {
  double seconds;     // median of one call on all threads
  double bytes;       // of weights or KV that one call reads, all threads together
  double operations;  // 2 per multiply-add, all threads together
};

// n x k weights of a file type times `rows` activation rows; the threads share the matrix' blocks. Throws as pack_begin does.
KernelSpeed time_matmul(const Kernels& table, ThreadPool& pool, const std::string& dtype, int n, int k, int rows, double budget_s);

struct AttentionCase {
  AttentionParams params;
  KVType type;
  int context;       // positions, those of the rows included
  int rows;          // the last positions, computed at once: 1 for decoding, context for a whole prompt
  size_t kv_bytes;   // walk at least this much KV per thread, layer by layer, so that a decode step finds none of it in a cache
};

// Each thread computes a sequence of its own. Throws std::invalid_argument for rows outside 1 .. context, std::bad_alloc.
KernelSpeed time_attention(const Kernels& table, ThreadPool& pool, const AttentionCase& c, double budget_s);

}  // namespace octavo
