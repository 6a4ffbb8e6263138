// What a step is given: rows of tokens, sequences, block tables.
#pragma once

#include <cstdint>

namespace octavo {

// Inputs of one step. Arrays stay the caller's. Sequences are in row order: sequence s owns seq_rows[s] consecutive rows.
struct StepInput {
  int num_rows = 0;
  const int32_t* tokens = nullptr;  // [num_rows]
  int num_seqs = 0;
  const int32_t* seq_start = nullptr;     // [num_seqs] position of the first row
  const int32_t* seq_rows = nullptr;      // [num_seqs]
  const int32_t* table_offset = nullptr;  // [num_seqs] into tables
  const int32_t* tables = nullptr;        // block ids
  const int32_t* pages = nullptr;         // [block ids][columns of the KV store]; null: block b has pages b * columns and on
  int num_logit_rows = 0;
  const int32_t* logit_rows = nullptr;  // [num_logit_rows] ascending row indices
  float* logits_out = nullptr;          // null, or [num_logit_rows][vocab]: a copy of the raw logits
};

}  // namespace octavo
