// Python's view of a model's step: checks the arrays, releases the GIL, runs the program; nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bindings/model.h"
#include "program/step_outputs.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

// The arrays of one step, checked against each other and against the model before the GIL is released.
struct StepArrays {
  In<int32_t> tokens, seq_start, seq_rows, table_offset, tables, logit_rows, requests;
  In<uint32_t> masks;
  In<int32_t> mask_offset;
  std::optional<In<int32_t>> pages;  // [block ids][columns]
};

void Model::check_sequences(const StepArrays& s) const {
  const KVStore* kv = runner.kv();
  require(kv != nullptr, "step before allocate_kv");
  require(runner.packed(), "step before pack");
  const int block_size = kv->block_size(), rope_positions = runner.rope_positions();
  require(s.seq_rows.size() == s.seq_start.size() && s.table_offset.size() == s.seq_start.size(), "sequences: arrays of different lengths");
  const int columns = kv->num_columns();
  const int64_t num_ids = s.pages ? (int64_t)(s.pages->size() / (size_t)columns) : kv->num_blocks();
  int64_t rows = 0;
  for (size_t i = 0; i < s.seq_start.size(); ++i) {
    const int64_t start = s.seq_start.data()[i], count = s.seq_rows.data()[i], offset = s.table_offset.data()[i];
    require(start >= 0 && count >= 1, "sequence " + std::to_string(i) + ": starts at 0 or later and has at least one row");
    const int64_t end = start + count, blocks = (end + block_size - 1) / block_size;
    require(end <= rope_positions, "sequence " + std::to_string(i) + ": position past the rotary tables");
    require(offset >= 0 && offset + blocks <= (int64_t)s.tables.size(), "sequence " + std::to_string(i) + ": block table too short");
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t id = s.tables.data()[offset + b];
      require(id >= 0 && id < num_ids, "sequence " + std::to_string(i) + ": block " + std::to_string(id) + " is not in the pool");
      for (int c = 0; s.pages && c < columns; ++c) {
        const int32_t page = s.pages->data()[(size_t)id * (size_t)columns + (size_t)c];
        require(page >= 0 && page < kv->num_pages(), "sequence " + std::to_string(i) + ": page " + std::to_string(page) + " is not in the pool");
      }
    }
    rows += count;
  }
  require(rows == (int64_t)s.tokens.size(), "sequences: their rows are not the tokens");
  for (size_t i = 0; i < s.tokens.size(); ++i)
    require(s.tokens.data()[i] >= 0 && s.tokens.data()[i] < embedding_rows_, "token id " + std::to_string(s.tokens.data()[i]) + " is not in 0 .. " + std::to_string(embedding_rows_ - 1));
}

void Model::check_requests(const StepArrays& s, const SamplerSlots& slots, int max_top) const {
  const size_t n = s.requests.size() / 5;
  require(s.requests.size() == n * 5 && s.mask_offset.size() == n, "requests: arrays of different lengths");
  const int vocab = runner.vocab();
  int previous_row = -1, previous_index = 0;
  std::set<int> drawn;
  for (size_t i = 0; i < s.logit_rows.size(); ++i) {
    const int row = s.logit_rows.data()[i];
    require(row > previous_row && row < (int)s.tokens.size(), "logit rows: ascending rows of the step");
    previous_row = row;
  }
  bool draft = false;  // the request before has one
  for (size_t i = 0; i < n; ++i) {
    const int32_t* r = s.requests.data() + 5 * i;
    require(!draft || (r[0] == r[-5] + 1 && r[1] == r[-4]), "requests: behind a draft comes the same slot with the next row");
    require(r[0] >= previous_index && r[0] < (int)s.logit_rows.size(), "requests: in order of their logit rows");
    previous_index = r[0];
    if (r[1] >= 0) {
      require(slots.is_open(r[1]), "slot: " + std::to_string(r[1]) + " is not open");
      require(draft || drawn.insert(r[1]).second, "slot: " + std::to_string(r[1]) + " draws twice in one step");
    } else {
      require(r[3] >= 0 && r[3] < vocab, "token id " + std::to_string(r[3]) + " is not in 0 .. " + std::to_string(vocab - 1));
    }
    draft = r[1] >= 0 && r[3] >= 0;
    require(r[4] <= kMaxLogprobs && r[4] <= max_top, "logprobs: " + std::to_string(r[4]) + " is not in 0 .. " + std::to_string(kMaxLogprobs));
    const int64_t offset = s.mask_offset.data()[i];
    require(offset < 0 || offset + (vocab + 31) / 32 <= (int64_t)s.masks.size(), "masks: shorter than the vocabulary");
  }
  require(!draft, "requests: nothing is drawn behind the last draft");
}

double Model::step(SamplerSlots& slots, In<int32_t> tokens, In<int32_t> seq_start, In<int32_t> seq_rows, In<int32_t> table_offset, In<int32_t> tables,
                 In<int32_t> logit_rows, In<int32_t> requests, In<uint32_t> masks, In<int32_t> mask_offset, Out<int32_t> out_token,
                 Out<int32_t> out_status, Out<int32_t> out_rank, Out<float> out_logprob, int max_top, Out<int32_t> out_top_ids,
                 Out<float> out_top_logprobs, std::optional<Matrix> logits, std::optional<In<int32_t>> pages) {
  const StepArrays s{tokens, seq_start, seq_rows, table_offset, tables, logit_rows, requests, masks, mask_offset, pages};
  require(slots.vocab_size() == runner.vocab(), "slots: of another vocabulary");
  check_sequences(s);
  check_requests(s, slots, max_top);
  const size_t n = mask_offset.size(), top = n * (size_t)std::max(max_top, 0);
  require(out_token.size() == n && out_status.size() == n && out_rank.size() == n && out_logprob.size() == n, "outputs: one entry per request");
  require(out_top_ids.size() == top && out_top_logprobs.size() == top, "top outputs: max_top entries per request");
  if (logits) require(logits->shape(0) == logit_rows.size() && (int)logits->shape(1) == runner.vocab(), "logits: [logit rows, vocabulary]");

  StepInput in;
  in.num_rows = (int)tokens.size();
  in.tokens = tokens.data();
  in.num_seqs = (int)seq_start.size();
  in.seq_start = seq_start.data();
  in.seq_rows = seq_rows.data();
  in.table_offset = table_offset.data();
  in.tables = tables.data();
  in.pages = pages ? pages->data() : nullptr;
  in.num_logit_rows = (int)logit_rows.size();
  in.logit_rows = logit_rows.data();
  in.logits_out = logits ? logits->data() : nullptr;
  std::vector<const uint32_t*> mask_of(n);
  for (size_t i = 0; i < n; ++i) mask_of[i] = mask_offset.data()[i] < 0 ? nullptr : masks.data() + mask_offset.data()[i];
  static_assert(sizeof(LogitsRequest) == 5 * sizeof(int32_t), "requests are read as they come");
  const LogitsOutputs out{out_token.data(), out_status.data(), out_rank.data(), out_logprob.data(), max_top, out_top_ids.data(), out_top_logprobs.data()};
  StepOutputs outputs(slots, reinterpret_cast<const LogitsRequest*>(requests.data()), (int)n, std::move(mask_of), out, sampling_scratch_);
  nb::gil_scoped_release release;
  runner.step(in, outputs);
  return outputs.longest_seconds();
}

void bind_step(nb::class_<Model>& c) {
  c.def("walk_together", [](Model& m, bool on, int least_tiles) { m.runner.walk_together(on, least_tiles); }, "on"_a,
        "least_tiles"_a = kLeastSharedTiles, "Whether sequences that begin in the same blocks, so many tiles at least, walk those once for all.")
      .def("count_kv_reads", [](Model& m, bool on) { m.runner.count_kv_reads(on); }, "on"_a, "Count from zero from the next step on, or no more.")
      .def("kv_reads", [](Model& m) {
        const KVReads reads = m.runner.kv_reads();
        return std::pair(reads.together, reads.alone);
      }, "(bytes walked for several sequences at once, for one) by attention since counting began.")
      .def("step", &Model::step, "slots"_a, "tokens"_a.noconvert(), "seq_start"_a.noconvert(), "seq_rows"_a.noconvert(), "table_offset"_a.noconvert(), "tables"_a.noconvert(), "logit_rows"_a.noconvert(), "requests"_a.noconvert(),
           "masks"_a.noconvert(), "mask_offset"_a.noconvert(), "out_token"_a.noconvert(), "out_status"_a.noconvert(), "out_rank"_a.noconvert(), "out_logprob"_a.noconvert(), "max_top"_a, "out_top_ids"_a.noconvert(),
           "out_top_logprobs"_a.noconvert(), "logits"_a.noconvert().none(), "pages"_a.noconvert().none(),
           "-> seconds of drawing and log-probabilities, of the thread that spent most on them.");
}

}  // namespace octavo
