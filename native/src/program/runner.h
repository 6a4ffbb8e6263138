// Runs a lowered program over a mixed batch: op table, activation buffers, weights. Knows ops, never families.
//
// A step is one pass of the pool's threads through the same list of phases: a run of row ops (norms, rope, activations: any row on
// any thread), one group of matrix products (any 16-row block on any thread), or attention. A phase begins when all work of the one
// before is done; row ops of few rows are done by whoever does the last of it. Work inside a phase is handed out by an atomic
// counter, and no phase waits for a thread that has taken none; which thread does what never changes a bit.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/packing.h"
#include "kernels/sampling.h"
#include "kv/kv_store.h"
#include "runtime/aligned.h"
#include "program/kv_progress.h"
#include "program/shared_prefixes.h"
#include "program/step_input.h"
#include "program/weight_packer.h"
#include "runtime/thread_pool.h"

namespace octavo {

enum class RowOpKind { kEmbed, kNorm, kRope, kStoreKV, kGatedAct, kAdd, kQuantize };

// One op on one row. Columns are offsets into a buffer's row; `heads` repeats the op over consecutive groups of `dim` columns.
struct RowOp {
  RowOpKind kind;
  int in = -1, in_col = 0;
  int in2 = -1, in2_col = 0;
  int out = -1, out_col = 0;
  int dim = 0;
  int heads = 1;
  int weight = -1;       // norm weight vector, embedding or rope table
  float eps = 0.0f;      // kNorm
  float scale = 1.0f;    // kEmbed
  int rotary_dim = 0;    // kRope
  bool interleaved = false;
  int activation = 0;    // kGatedAct
  int layer = -1;        // kStoreKV
};

struct MatmulOp {
  int in = -1;
  int weight = -1;
  int bias = -1;
  int out = -1, out_col = 0;
  bool accumulate = false;
};

struct AttentionOp {
  int layer = -1;
  int q = -1, q_col = 0;
  int out = -1;
  AttentionParams params{};
};

struct HeadOp {
  int in = -1;
  int weight = -1;
  float softcap = 0.0f;
};

// Bytes of keys and values that attention has walked over, a tile counted each time that a pass of queries takes it up.
struct KVReads {
  uint64_t together = 0;  // for several sequences that share them
  uint64_t alone = 0;
};

// What is done with logits. Requests are in order of their logit row; several may share one.
class LogitsConsumer {
 public:
  virtual ~LogitsConsumer() = default;
  virtual int num_requests() const = 0;
  virtual int logit_index(int request) const = 0;
  // Whether a request has to wait for the one before it.
  virtual bool follows(int request) const = 0;
  // A part of a row, while it is still in a near cache; as SamplingKernels::scan.
  virtual int scan(const float* logits, int begin, int end, float* block_best) const = 0;
  // The whole row, scanned; its best is still to be found.
  virtual void consume(int request, LogitRow row, int thread) = 0;
};

class Runner {
 public:
  // Runners may share threads, and matrices and KV pages by add_matrix_of and share_kv: then one of them steps at a time.
  Runner(const Kernels& kernels, std::shared_ptr<ThreadPool> threads) : kernels_(kernels), threads_(std::move(threads)), pool_(*threads_) {}
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  const Kernels& kernels() const { return kernels_; }
  const std::shared_ptr<ThreadPool>& threads() const { return threads_; }

  // ---- building; indices returned are used in ops ----
  int add_buffer(int width);
  int add_vector(const float* values, int n);
  // Plans the matrix: see WeightPacker::plan for raw and mapped. Its data is there after pack().
  int add_matrix(const char* dtype, const uint8_t* raw, int n, int k, bool widen, bool mapped);
  // A matrix of another runner, packed or still to be.
  int add_matrix_of(const Runner& other, int index);
  // The raw rows must stay alive as long as the runner.
  int add_embedding(const char* dtype, const uint8_t* raw, int k);
  // The rows of a matrix, which is then held once.
  int add_embedding_of(int matrix);
  // Pack the matrices added since the last call, on all threads. Throws std::bad_alloc.
  void pack() { packer_.pack(pool_); }
  bool packed() const { return packer_.done(); }
  int add_rope();
  // Append rows to a rotary table: cos_sin [positions][half_dim][2], copied. Throws std::bad_alloc and leaves the table as it was.
  void extend_rope(int index, const float* cos_sin, int positions, int half_dim);
  // Positions that every rotary table covers; a step may use none beyond.
  int rope_positions() const;
  void add_row_op(const RowOp& op);
  void add_matmul(const MatmulOp& op);  // joins the open group unless `begin_group` was called since
  void begin_group();
  void add_attention(const AttentionOp& op);  // throws std::invalid_argument when its KV heads are not as many as other layers'
  // From here on only rows with logits go on; `buffers` are those still read.
  void add_select(const std::vector<int>& buffers);
  void set_head(const HeadOp& op);
  // The pages of another runner, whose first layers are this one's. Throws std::logic_error when it has none.
  void share_kv(const Runner& other, int num_layers);
  // Layers of another model's own in the pages of another runner; std::logic_error when it has none.
  void lodge_kv(const Runner& owner, int block_size, KVType type, const std::vector<KVLayerShape>& layers, const KVPageLayout& layout);
  void allocate_kv(int num_pages, int block_size, KVType type, const std::vector<KVLayerShape>& layers, const KVPageLayout& layout);

  // ---- running ----
  void step(const StepInput& in, LogitsConsumer& consumer);

  // Whether sequences that begin in the same blocks walk those together; for benches. Not a bit depends on it.
  void walk_together(bool on, int least_tiles) {
    walk_together_ = on;
    least_shared_tiles_ = least_tiles;
  }
  // Counts from zero from here on, or not at all.
  void count_kv_reads(bool on);
  KVReads kv_reads() const;

  // Of the step that runs, for threads that do not run it.
  const KVProgress& kv_progress() const { return kv_progress_; }

  KVStore* kv() { return kv_.get(); }
  const KVStore* kv() const { return kv_.get(); }
  const PackedMatrix& matrix(int index) const { return *matrices_.at((size_t)index); }
  int vocab() const { return head_.weight < 0 ? 0 : matrices_[(size_t)head_.weight]->n; }
  size_t packed_bytes() const;

 private:
  // Rows a multiple of 4 KiB apart would all fall into the same few lines of a cache.
  static int row_stride(int width) { return width % 1024 ? width : width + 16; }
  size_t logits_stride() const { return (size_t)row_stride((vocab() + 15) / 16 * 16); }

  // Counters of a phase: two for what is handed out one by one, then one per thread for stretches that threads begin with.
  static constexpr int kOwnCounters = 2;
  static constexpr int kMinPanelRows = 6;  // with fewer rows a thread, reading all weights on every thread costs more than meeting

  enum class PhaseKind { kRows, kMatmul, kAttention, kSelect };
  struct Phase {
    PhaseKind kind;
    std::vector<RowOp> rows;
    std::vector<MatmulOp> matmuls;
    AttentionOp attention;
    std::vector<int> stores;  // layers whose keys and values its row ops store
    std::vector<int> buffers;
    int num_blocks = 0;      // of all matmuls
    size_t next_matmul = 0;  // index of the next phase of products behind this one; none: number of phases
  };
  struct Buffer {
    int width = 0;
    int stride = 0;  // floats from row to row
    bool quantized = false;
    AlignedArray<float> x;
    AlignedArray<int8_t> q;
    AlignedArray<float> scale;
    AlignedArray<int16_t> sum16;
    float* row(int r) { return x.data() + (size_t)r * (size_t)stride; }
    // The quantised rows from r on; meaningless (and harmless) for a buffer that is not quantised.
    QuantRows rows(int r) {
      if (!quantized) return QuantRows{nullptr, nullptr, nullptr};
      return QuantRows{q.data() + (size_t)r * (size_t)width, scale.data() + (size_t)r * (size_t)(width / 32), sum16.data() + (size_t)r * (size_t)(width / 16)};
    }
  };
  struct Embedding {
    std::vector<char> dtype;
    const uint8_t* raw;  // null when packed is not
    int k;
    size_t row_bytes;
    const PackedMatrix* packed;
  };
  struct RopeTable {
    std::vector<float> cos_sin;
    int half_dim = 0;
    int positions() const { return half_dim ? (int)(cos_sin.size() / (2 * (size_t)half_dim)) : 0; }
  };
  struct RowPlace {  // where a row's token lives
    int seq, position, index, offset;  // index: into the sequence's table
  };
  struct Rows { int begin, end; };
  // Phases [begin, end) over `rows` rows. panels: where each begins, and `rows`; empty: by phases. meets: panels need each other's
  // keys and values.
  struct Stage {
    size_t begin, end;
    int rows;
    std::vector<int> panels;
    bool meets;
  };
  struct AttentionItem {
    int seq, kv_head, row_begin, row_end, split_begin, split_end;
    bool partial;
  };

  void get_ready();
  void set_strides();
  void count_products();
  void prepare(const StepInput& in);
  void place_rows(const StepInput& in);
  void place_tables(const StepInput& in);
  // Where the blocks of a sequence lie, as a table for the layers of a column of the KV store.
  const int32_t* table(const StepInput& in, int seq, int column) const {
    if (page_tables_.empty()) return in.tables + in.table_offset[seq];
    return page_tables_.data() + table_begin_[(size_t)seq] + (size_t)column * (table_begin_[(size_t)seq + 1] - table_begin_[(size_t)seq]) / (size_t)kv_->num_columns();
  }
  void plan_stages(const StepInput& in);
  std::vector<int> cut_panels(int rows, bool attends) const;
  double row_cost(int position, int shared) const;
  void plan_attention(const StepInput& in, int kv_heads);
  // What runs on threads returns false when the step has ended without this one (ThreadPool::Turn). `work` is that of the phase before,
  // which threads have not met behind yet.
  using Turn = ThreadPool::Turn;
  void run_step(const StepInput& in, LogitsConsumer& consumer, Turn& turn);
  bool run_stage(const Stage& stage, const StepInput& in, Turn& turn, Work& work);
  void run_panel(size_t begin, size_t end, const Stage& stage, size_t panel, const StepInput& in, int thread);
  void attend_panel(const AttentionOp& op, Rows rows, size_t panel, const StepInput& in, int thread);
  bool run_by_phases(const Stage& stage, const StepInput& in, Turn& turn, Work& work);
  bool run_shared(const Phase& phase, const StepInput& in, int rows, Turn& turn, size_t index, Work& work);
  bool attend(const Phase& phase, const StepInput& in, Turn& turn, size_t index, Work& work);
  void run_row(const Phase& phase, const StepInput& in, int row);
  void run_rows(const Phase& phase, const StepInput& in, Rows rows);
  void run_row_op(const RowOp& op, const StepInput& in, int row);
  Work run_matmuls(const Phase& phase, int rows, const Turn& turn, size_t index);
  void run_blocks(const Phase& phase, int rows, int begin, int end);
  void prefetch_share(const Phase& phase, int thread);
  int first_block(const Phase& phase, int thread) const { return (int)((int64_t)phase.num_blocks * thread / pool_.size()); }
  size_t counters_per_phase() const { return (size_t)(kOwnCounters + pool_.size()); }
  std::atomic<int>& counter(size_t phase, int i) { return *counters_[phase * counters_per_phase() + (size_t)i]; }
  void run_matmul(const MatmulOp& op, Rows rows, int block_begin, int block_end);
  Work run_attention(const Phase& phase, const StepInput& in, int thread, std::atomic<int>& next);
  Work run_merge(const Phase& phase, const StepInput& in, std::atomic<int>& next);
  void run_select(const Phase& phase, const StepInput& in);
  bool run_head(const StepInput& in, LogitsConsumer& consumer, Turn& turn, size_t index);
  Work compute_logits(int first, int rows, const LogitsConsumer& consumer, int thread, std::atomic<int>& next);
  Work consume_logits(const StepInput& in, LogitsConsumer& consumer, Rows rows, Rows requests, int thread, std::atomic<int>& next);
  LogitRow scanned_row(int row) const;
  size_t scan_blocks() const { return ((size_t)vocab() + kScanBlock - 1) / kScanBlock; }
  AttentionSequence sequence_view(const AttentionOp& op, const StepInput& in, int seq);
  // What sequences share, and the states of it: [shared rows][kv_heads][splits], of one layer at a time.
  struct Shared {
    SharedPrefixes prefixes;
    AlignedArray<float> states;
  };
  AttentionSequence own_part(const AttentionOp& op, const Shared& shared, const StepInput& in, int seq, int thread);
  bool by_phases(int rows) const { return rows == 0 || (rows < pool_.size() * kMinPanelRows && pool_.size() > 1); }
  SharedPrefixes::Machine sharing_machine() const;
  void find_shared_prefixes(const StepInput& in);
  void find_shared_in_panels(const StepInput& in);
  // Whether all threads walk some sequences' first tiles in this op. A window sees too little of its beginning to share.
  bool shares(const AttentionOp& op) const { return !shared_.prefixes.empty() && op.params.window == 0; }
  bool needs_others(const Stage& stage, size_t phase) const;
  bool walk_shared(const AttentionOp& op, const StepInput& in, Turn& turn, size_t index);
  void walk_unit(const AttentionOp& op, Shared& shared, const StepInput& in, int kv_head, int unit, int thread);
  uint64_t* reads_of(int thread, bool together);
  Phase& phase_of(PhaseKind kind);

  const Kernels& kernels_;
  std::shared_ptr<ThreadPool> threads_;
  ThreadPool& pool_;
  std::vector<Phase> phases_;
  bool group_open_ = false;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<std::unique_ptr<AlignedArray<float>>> vectors_;
  std::vector<std::shared_ptr<PackedMatrix>> matrices_;
  WeightPacker packer_;
  std::vector<Embedding> embeddings_;
  std::vector<std::unique_ptr<RopeTable>> ropes_;
  HeadOp head_;
  std::shared_ptr<KVStore> kv_;
  KVProgress kv_progress_;

  // per step
  std::vector<RowPlace> places_;
  std::vector<int32_t> page_tables_;  // of each sequence, column by column; empty: block ids are pages
  std::vector<size_t> table_begin_;   // of each sequence's in page_tables_, and the end of them
  std::vector<int> seq_first_row_;
  double row_products_ = 0.0;  // multiply-adds of a row in the phases before the select
  std::vector<std::pair<int, double>> seen_products_;  // window (0: none), multiply-adds per position seen
  Stage stages_[2] = {};  // before rows are selected, and behind
  std::vector<AttentionItem> items_;
  Shared shared_;                      // by all sequences of the step, walked by all threads
  std::vector<Shared> panel_shared_;   // or by those of a panel, walked by its thread
  bool walk_together_ = true;
  int least_shared_tiles_ = kLeastSharedTiles;
  struct alignas(64) ThreadReads { KVReads bytes; };
  std::vector<ThreadReads> kv_reads_;  // per thread; empty: not counted
  std::vector<size_t> partial_base_;  // per sequence, in floats
  bool any_partial_ = false;
  AlignedArray<float> partials_;
  std::vector<AlignedArray<uint8_t>> scratch_;  // per thread
  AlignedArray<float> logits_;
  AlignedArray<float> block_best_;  // [head_rows_][scan blocks]
  std::vector<int> bad_ids_;        // [thread][head_rows_] lowest id a thread found bad; vocab(): none
  int head_rows_ = 0;                                  // logit rows per chunk
  std::vector<std::unique_ptr<std::atomic<int>>> counters_;
};

}  // namespace octavo
