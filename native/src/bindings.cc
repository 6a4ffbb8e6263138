// Python's view of the runner: checks shapes, types and ranges, releases the GIL, runs the program; nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <malloc.h>
#endif

#include <limits>
#include <optional>
#include <set>
#include <string>

#include "host_kv.h"
#include "kv_wire_bind.h"
#include "program/runner.h"
#include "program/step_outputs.h"
#include "runtime/cpu_features.h"
#include "runtime/kernel_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

void bind_sampling(nb::module_& m);
void bind_probes(nb::module_& m);

namespace {

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const std::string& message) {
  if (!ok) throw nb::value_error(message.c_str());
}

const Kernels& kernels_of(const std::string& isa) {
  const Kernels* k = kernels_by_spec(isa);
  require(k != nullptr, "isa: " + isa + " is not one of portable, avx2, avx512, avx512_vnni, avx512_bf16 that this machine and build have");
  return *k;
}

KVType kv_type(const std::string& dtype) {
  if (dtype == "f16") return KVType::kF16;
  if (dtype == "bf16") return KVType::kBF16;
  if (dtype == "int8") return KVType::kI8;
  require(dtype == "f32", "kv_cache_dtype: " + dtype + " is not one of f16, bf16, f32, int8");
  return KVType::kF32;
}

// places: (column, offset in its page) of each layer; none: one page to a block.
KVPageLayout kv_layout(int columns, size_t page_bytes, const std::vector<std::pair<int, size_t>>& places) {
  KVPageLayout layout;
  layout.num_columns = columns;
  layout.page_bytes = page_bytes;
  for (const auto& [column, offset] : places) {
    layout.columns.push_back(column);
    layout.offsets.push_back(offset);
  }
  return layout;
}

std::vector<KVLayerShape> kv_layers(const std::vector<std::pair<int, int>>& layers) {
  std::vector<KVLayerShape> out;
  for (const auto& [heads, dim] : layers) {
    require(heads > 0 && dim > 0, "KV layers: heads and head_dim are at least 1");
    out.push_back({heads, dim});
  }
  return out;
}

void check_raw(const char* what, const std::string& dtype, const Bytes& raw, int n, int k) {
  require(n > 0 && k > 0, std::string(what) + ": rows and columns are at least 1");
  const size_t wanted = (size_t)n * row_bytes(dtype.c_str(), k);
  require(raw.size() == wanted, std::string(what) + ": " + std::to_string(raw.size()) + " bytes given, " + std::to_string(wanted) + " needed");
}

// The arrays of one step, checked against each other and against the model before the GIL is released.
struct Step {
  In<int32_t> tokens, seq_start, seq_rows, table_offset, tables, logit_rows, requests;
  In<uint32_t> masks;
  In<int32_t> mask_offset;
  std::optional<In<int32_t>> pages;  // [block ids][columns]
};

class Model {
 public:
  Model(const std::string& isa, int threads) : Model(kernels_of(isa), std::make_shared<ThreadPool>(threads)) {}
  Model(const Kernels& kernels, std::shared_ptr<ThreadPool> threads) : runner_(kernels, threads), sampling_scratch_((size_t)threads->size()) {}

  Runner runner_;
  HostKV host_kv_;

  nb::tuple add_matrix(const std::string& dtype, Bytes raw, int n, int k, bool widen, bool mapped) {
    check_raw("matrix", dtype, raw, n, k);
    const int index = runner_.add_matrix(dtype.c_str(), raw.data(), n, k, widen, mapped);
    unpacked_raw_.push_back(raw);
    return nb::make_tuple(index, runner_.matrix(index).quantised());
  }

  nb::tuple add_matrix_of(const Model& other, int index) {
    return nb::make_tuple(runner_.add_matrix_of(other.runner_, index), other.runner_.matrix(index).quantised());
  }

  void pack() {
    {
      nb::gil_scoped_release release;
      runner_.pack();
    }
    unpacked_raw_.clear();
  }

  int add_embedding(const std::string& dtype, Bytes raw, int n, int k) {
    check_raw("embedding", dtype, raw, n, k);
    embedding_rows_ = n;
    embedding_raw_.push_back(raw);
    return runner_.add_embedding(dtype.c_str(), raw.data(), k);
  }

  int add_embedding_of(int matrix) {
    embedding_rows_ = runner_.matrix(matrix).n;
    return runner_.add_embedding_of(matrix);
  }

  void extend_rope(int index, nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu> rows) {
    require(rows.shape(2) == 2, "rope table: the last axis holds cosine and sine");
    runner_.extend_rope(index, rows.data(), (int)rows.shape(0), (int)rows.shape(1));
  }

  double step(SamplerSlots& slots, In<int32_t> tokens, In<int32_t> seq_start, In<int32_t> seq_rows, In<int32_t> table_offset, In<int32_t> tables,
            In<int32_t> logit_rows, In<int32_t> requests, In<uint32_t> masks, In<int32_t> mask_offset, Out<int32_t> out_token,
            Out<int32_t> out_status, Out<int32_t> out_rank, Out<float> out_logprob, int max_top, Out<int32_t> out_top_ids,
            Out<float> out_top_logprobs, std::optional<Matrix> logits, std::optional<In<int32_t>> pages);

 private:
  void check_sequences(const Step& s) const;
  void check_requests(const Step& s, const SamplerSlots& slots, int max_top) const;
  std::vector<AlignedArray<float>> sampling_scratch_;  // per thread
  std::vector<Bytes> unpacked_raw_;   // until pack()
  std::vector<Bytes> embedding_raw_;  // read in place for as long as the model lives
  int embedding_rows_ = 0;
};

void Model::check_sequences(const Step& s) const {
  const KVStore* kv = runner_.kv();
  require(kv != nullptr, "step before allocate_kv");
  require(runner_.packed(), "step before pack");
  const int block_size = kv->block_size(), rope_positions = runner_.rope_positions();
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

void Model::check_requests(const Step& s, const SamplerSlots& slots, int max_top) const {
  const size_t n = s.requests.size() / 5;
  require(s.requests.size() == n * 5 && s.mask_offset.size() == n, "requests: arrays of different lengths");
  const int vocab = runner_.vocab();
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
  const Step s{tokens, seq_start, seq_rows, table_offset, tables, logit_rows, requests, masks, mask_offset, pages};
  require(slots.vocab_size() == runner_.vocab(), "slots: of another vocabulary");
  check_sequences(s);
  check_requests(s, slots, max_top);
  const size_t n = mask_offset.size(), top = n * (size_t)std::max(max_top, 0);
  require(out_token.size() == n && out_status.size() == n && out_rank.size() == n && out_logprob.size() == n, "outputs: one entry per request");
  require(out_top_ids.size() == top && out_top_logprobs.size() == top, "top outputs: max_top entries per request");
  if (logits) require(logits->shape(0) == logit_rows.size() && (int)logits->shape(1) == runner_.vocab(), "logits: [logit rows, vocabulary]");

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
  runner_.step(in, outputs);
  return outputs.longest_seconds();
}

RowOp row_op(RowOpKind kind) {
  RowOp op;
  op.kind = kind;
  return op;
}

void bind_building(nb::class_<Model>& c) {
  c.def("add_buffer", [](Model& m, int width) { return m.runner_.add_buffer(width); }, "width"_a)
      .def("add_vector", [](Model& m, In<float> v) { return m.runner_.add_vector(v.data(), (int)v.size()); }, "values"_a.noconvert())
      .def("add_matrix", &Model::add_matrix, "dtype"_a, "raw"_a.noconvert(), "rows"_a, "columns"_a, "widen"_a, "mapped"_a = false,
           "-> (id, takes quantised activations). Keeps `raw` alive until `pack`; `mapped`: it lies in a read-only map of a file, whose pages are given up then.")
      .def("add_matrix_of", &Model::add_matrix_of, "other"_a, "matrix"_a, "A matrix of another model. -> (id, takes quantised activations)")
      .def("pack", &Model::pack, "Pack the matrices added since the last call, on all threads, without the interpreter lock.")
      .def("add_embedding", &Model::add_embedding, "dtype"_a, "raw"_a.noconvert(), "rows"_a, "columns"_a, "Reads `raw` in place and keeps it alive.")
      .def("add_embedding_of", &Model::add_embedding_of, "matrix"_a, "The rows of a matrix that is there anyway.")
      .def("add_rope", [](Model& m) { return m.runner_.add_rope(); })
      .def("extend_rope", &Model::extend_rope, "index"_a, nb::arg("rows").noconvert(), "rows: float32 [more positions, rotary_dim / 2, 2]")
      .def("begin_group", [](Model& m) { m.runner_.begin_group(); })
      .def("matmul",
           [](Model& m, int x, int weight, int bias, int out, int out_col, bool accumulate) {
             m.runner_.add_matmul(MatmulOp{x, weight, bias, out, out_col, accumulate});
           },
           "x"_a, "weight"_a, "bias"_a, "out"_a, "out_col"_a, "accumulate"_a)
      .def("embed",
           [](Model& m, int weight, float scale, int out) {
             RowOp op = row_op(RowOpKind::kEmbed);
             op.weight = weight, op.scale = scale, op.out = out;
             m.runner_.add_row_op(op);
           },
           "weight"_a, "scale"_a, "out"_a)
      .def("norm",
           [](Model& m, int x, int x_col, int weight, float eps, int dim, int heads, int out, int out_col) {
             RowOp op = row_op(RowOpKind::kNorm);
             op.in = x, op.in_col = x_col, op.weight = weight, op.eps = eps, op.dim = dim, op.heads = heads, op.out = out, op.out_col = out_col;
             m.runner_.add_row_op(op);
           },
           "x"_a, "x_col"_a, "weight"_a, "eps"_a, "dim"_a, "heads"_a, "out"_a, "out_col"_a)
      .def("rope",
           [](Model& m, int x, int x_col, int table, int heads, int head_dim, int rotary_dim, bool interleaved) {
             RowOp op = row_op(RowOpKind::kRope);
             op.in = x, op.in_col = x_col, op.weight = table, op.heads = heads, op.dim = head_dim, op.rotary_dim = rotary_dim, op.interleaved = interleaved;
             m.runner_.add_row_op(op);
           },
           "x"_a, "x_col"_a, "table"_a, "heads"_a, "head_dim"_a, "rotary_dim"_a, "interleaved"_a)
      .def("store_kv",
           [](Model& m, int k, int k_col, int v, int v_col, int layer) {
             RowOp op = row_op(RowOpKind::kStoreKV);
             op.in = k, op.in_col = k_col, op.in2 = v, op.in2_col = v_col, op.layer = layer;
             m.runner_.add_row_op(op);
           },
           "k"_a, "k_col"_a, "v"_a, "v_col"_a, "layer"_a)
      .def("attention",
           [](Model& m, int layer, int q, int q_col, int out, int heads, int kv_heads, int head_dim, float scale, float softcap, int window) {
             m.runner_.add_attention(AttentionOp{layer, q, q_col, out, AttentionParams{heads, kv_heads, head_dim, scale, softcap, window}});
           },
           "layer"_a, "q"_a, "q_col"_a, "out"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "softcap"_a, "window"_a)
      .def("gated_act",
           [](Model& m, int gate, int gate_col, int up, int up_col, int dim, int activation, int out) {
             RowOp op = row_op(RowOpKind::kGatedAct);
             op.in = gate, op.in_col = gate_col, op.in2 = up, op.in2_col = up_col, op.dim = dim, op.activation = activation, op.out = out;
             m.runner_.add_row_op(op);
           },
           "gate"_a, "gate_col"_a, "up"_a, "up_col"_a, "dim"_a, "activation"_a, "out"_a)
      .def("add",
           [](Model& m, int a, int a_col, int b, int b_col, int dim, int out, int out_col) {
             RowOp op = row_op(RowOpKind::kAdd);
             op.in = a, op.in_col = a_col, op.in2 = b, op.in2_col = b_col, op.dim = dim, op.out = out, op.out_col = out_col;
             m.runner_.add_row_op(op);
           },
           "a"_a, "a_col"_a, "b"_a, "b_col"_a, "dim"_a, "out"_a, "out_col"_a)
      .def("quantize",
           [](Model& m, int x) {
             RowOp op = row_op(RowOpKind::kQuantize);
             op.in = x;
             m.runner_.add_row_op(op);
           },
           "x"_a)
      .def("select", [](Model& m, std::vector<int> buffers) { m.runner_.add_select(buffers); }, "buffers"_a)
      .def("head", [](Model& m, int x, int weight, float softcap) { m.runner_.set_head(HeadOp{x, weight, softcap}); }, "x"_a, "weight"_a, "softcap"_a);
}

void bind_running(nb::class_<Model>& c) {
  c.def_static(
       "bytes_per_block",
       [](int block_size, const std::string& dtype, const std::vector<std::pair<int, int>>& layers) {
         return KVStore::bytes_per_block(block_size, kv_type(dtype), kv_layers(layers));
       },
       "block_size"_a, "dtype"_a, "layers"_a)
      .def(
          "allocate_kv",
          [](Model& m, int num_blocks, int block_size, const std::string& dtype, const std::vector<std::pair<int, int>>& layers, int columns,
             size_t page_bytes, const std::vector<std::pair<int, size_t>>& places) {
            require(num_blocks >= 1 && columns >= 1 && num_blocks <= std::numeric_limits<int>::max() / columns, "num_blocks: as many pages as int32 counts");
            m.runner_.allocate_kv(num_blocks * columns, block_size, kv_type(dtype), kv_layers(layers), kv_layout(columns, page_bytes, places));
          },
          "num_blocks"_a, "block_size"_a, "dtype"_a, "layers"_a, "columns"_a, "page_bytes"_a, "places"_a,
          "places: (column, offset in its page) of each layer.")
      .def(
          "lodge_kv",
          [](Model& m, const Model& owner, int block_size, const std::string& dtype, const std::vector<std::pair<int, int>>& layers, int columns,
             size_t page_bytes, const std::vector<std::pair<int, size_t>>& places) {
            m.runner_.lodge_kv(owner.runner_, block_size, kv_type(dtype), kv_layers(layers), kv_layout(columns, page_bytes, places));
          },
          "owner"_a, "block_size"_a, "dtype"_a, "layers"_a, "columns"_a, "page_bytes"_a, "places"_a, "Layers in the pages of another model's pool.")
      .def("share_kv", [](Model& m, const Model& other, int num_layers) { m.runner_.share_kv(other.runner_, num_layers); }, "other"_a, "num_layers"_a)
      .def(
          "copy_page",
          [](Model& m, int src, int dst) {
            require(m.runner_.kv() != nullptr, "copy_page before allocate_kv");
            m.runner_.kv()->copy_page(src, dst);
          },
          "src"_a, "dst"_a)
      .def("allocate_host_kv", [](Model& m, int num_blocks, int num_packed) { m.host_kv_.allocate(m.runner_.kv(), num_blocks, num_packed); },
           "num_blocks"_a, "num_packed"_a, "Blocks that are kept as they are, and behind them blocks that are packed to int8.")
      .def("move_blocks", [](Model& m, HostKV::Moves saves, HostKV::Moves loads) { m.host_kv_.move(m.runner_.kernels(), m.runner_.kv(), saves, loads); },
           "saves"_a.noconvert(), "loads"_a.noconvert(), "int32 (pages by column, host block), flat; page -1: not moved. All saves (pool to host), then all loads; without the interpreter lock.")
      .def("read_host_block", [](Model& m, int block) { return m.host_kv_.read(block); }, "host_block"_a)
      .def("write_host_block", [](Model& m, int block, Bytes data) { m.host_kv_.write(block, data); }, "host_block"_a, "data"_a.noconvert())
      .def("packed_bytes", [](Model& m) { return m.runner_.packed_bytes(); })
      .def("walk_together", [](Model& m, bool on, int least_tiles) { m.runner_.walk_together(on, least_tiles); }, "on"_a,
           "least_tiles"_a = kLeastSharedTiles, "Whether sequences that begin in the same blocks, so many tiles at least, walk those once for all.")
      .def("count_kv_reads", [](Model& m, bool on) { m.runner_.count_kv_reads(on); }, "on"_a, "Count from zero from the next step on, or no more.")
      .def("kv_reads", [](Model& m) {
        const KVReads reads = m.runner_.kv_reads();
        return std::pair(reads.together, reads.alone);
      }, "(bytes walked for several sequences at once, for one) by attention since counting began.")
      .def("step", &Model::step, "slots"_a, "tokens"_a.noconvert(), "seq_start"_a.noconvert(), "seq_rows"_a.noconvert(), "table_offset"_a.noconvert(), "tables"_a.noconvert(), "logit_rows"_a.noconvert(), "requests"_a.noconvert(),
           "masks"_a.noconvert(), "mask_offset"_a.noconvert(), "out_token"_a.noconvert(), "out_status"_a.noconvert(), "out_rank"_a.noconvert(), "out_logprob"_a.noconvert(), "max_top"_a, "out_top_ids"_a.noconvert(),
           "out_top_logprobs"_a.noconvert(), "logits"_a.noconvert().none(), "pages"_a.noconvert().none(),
           "-> seconds of drawing and log-probabilities, of the thread that spent most on them.");
}

// One matrix product on one thread, for tests: x [rows, k] -> out [rows, n].
void matmul_test(const std::string& isa, const std::string& dtype, Bytes raw, int n, int k, Matrix x, bool widen, Matrix out) {
  const Kernels& kernels = kernels_of(isa);
  check_raw("matrix", dtype, raw, n, k);
  const int rows = (int)x.shape(0);
  require((int)x.shape(1) == k && (int)out.shape(0) == rows && (int)out.shape(1) == n, "x is [rows, columns] and out [rows, matrix rows]");
  auto m = pack_begin(dtype.c_str(), n, k, widen);
  pack_blocks(*m, dtype.c_str(), raw.data(), 0, m->num_blocks);
  AlignedArray<int8_t> q((size_t)rows * (size_t)k);
  AlignedArray<float> scale((size_t)rows * (size_t)(k / 32 + 1));
  AlignedArray<int16_t> sum16((size_t)rows * (size_t)(k / 16 + 1));
  const QuantRows quant{q.data(), scale.data(), sum16.data()};
  if (m->quantised())
    for (int r = 0; r < rows; ++r) kernels.quantize(x.data() + (size_t)r * (size_t)k, k, quant, r);
  kernels.matmul(*m, x.data(), quant, rows, 0, m->num_blocks, nullptr, false, out.data(), n);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Octavo's native CPU core: weights packed once, one call per step.";
  nb::class_<Model> model(m, "Model", "A lowered program with its weights, KV pool and threads.");
  model.def(nb::init<const std::string&, int>(), "isa"_a, "threads"_a);
  model.def("__init__", [](Model* self, const Model& base) { new (self) Model(base.runner_.kernels(), base.runner_.threads()); }, "base"_a,
            "On the threads of another model, to take matrices and KV of: the two take turns.");
  bind_building(model);
  bind_running(model);
  KVWire::bind(model, [](Model& m) -> const Runner& { return m.runner_; });
  m.def("isa_levels", [] {
    std::vector<std::string> levels;
    for (const char* name : kIsaLevels)
      if (kernels_by_name(name)) levels.emplace_back(name);
    return levels;
  }, "Kernel paths this machine and build have, best last.");
  m.def("release_free_memory", [] {
    nb::gil_scoped_release release;
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
  }, "Give memory that has been freed, and that the C library keeps for later, back to the system; nothing where it cannot be asked to.");
  m.def("isa_level", [](const std::string& isa) { return std::string(kernels_of(isa).name); }, "isa"_a, "The level that a name stands for: avx512 is the best of its kind. ValueError for one that this machine or build lacks.");
  m.def("sample_error", [](int status, int token) { return sample_error((SampleStatus)status, token); }, "status"_a, "token"_a);
  m.def("dequantize", [](const std::string& dtype, Bytes raw, int n, int k, Matrix out) {
    check_raw("matrix", dtype, raw, n, k);
    require((int)out.shape(0) == n && (int)out.shape(1) == k, "out is [rows, columns]");
    for (int r = 0; r < n; ++r) dequantize_row(dtype.c_str(), raw.data() + (size_t)r * row_bytes(dtype.c_str(), k), k, out.data() + (size_t)r * (size_t)k);
  }, "dtype"_a, "raw"_a.noconvert(), "rows"_a, "columns"_a, "out"_a.noconvert());
  m.def("matmul_test", &matmul_test, "isa"_a, "dtype"_a, "raw"_a.noconvert(), "rows"_a, "columns"_a, "x"_a.noconvert(), "widen"_a, "out"_a.noconvert());
  bind_sampling(m);
  bind_probes(m);
}

}  // namespace octavo
