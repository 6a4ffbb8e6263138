// Which decoding sequences of a step begin in the same blocks, and how those tiles are walked once for all of them.
//
// A tile is kTileTokens positions, the step of attention's running state; a split kSplitTokens. Sequences whose tables begin alike form a
// tree: a *run* is a set of them that share a stretch of tiles. Runs within the same split depend on one another (who shares more goes on
// from the state of those who share less), splits do not: a *unit* is one split's runs, the piece of work that threads take.
// Plans only; which keys and values a row sees, and every bit of the result, are the same without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "program/step_input.h"

namespace octavo {

// Sequences that share fewer tiles are not walked together: each row then stores a state and goes on from it, which costs what it saves.
constexpr int kLeastSharedTiles = 8;

// Rows [begin, end) of SharedPrefixes::rows walk tiles [tile_begin, tile_end) of one split together.
struct SharedRun {
  int begin, end, tile_begin, tile_end;
};

class SharedPrefixes {
 public:
  struct Machine {
    int threads, kv_heads, block_size;
    size_t state_floats;  // of a row, KV head and split
    int worth;            // fewer tiles saved in all than this are not worth it
    int least_tiles;      // that two sequences have to share
  };

  // Among the sequences of few rows that lie in [row_begin, row_end). Nothing when too little is saved.
  void find(const StepInput& in, const Machine& machine, int row_begin, int row_end);
  void clear();
  // Tiles walked, times the rows that walk each.
  int64_t row_tiles() const;

  bool empty() const { return runs.empty(); }
  int num_units() const { return empty() ? 0 : (int)units.size() - 1; }
  // Positions of a sequence that are walked together with others.
  int tokens(int seq) const { return empty() ? 0 : tiles[(size_t)seq] * kTileTokens; }
  size_t num_states(int kv_heads) const { return rows.size() * (size_t)kv_heads * (size_t)splits; }

  std::vector<int> rows;       // rows of the step, those that share most beside each other
  std::vector<int> place;      // per sequence: index of its first row in rows; -1: it shares nothing
  std::vector<int> tiles;      // per sequence: leading tiles that are walked together with others
  std::vector<SharedRun> runs;
  std::vector<int> units;      // index of each unit's first run, and the number of runs
  int splits = 0;              // that states are kept of, per row

 private:
  struct Sequence { int seq, row, tiles; };  // its first row; leading tiles that all of its rows see whole

  void list_sequences(const StepInput& in, int row_begin, int row_end);
  void sort_by_table(const StepInput& in, int block_size);
  int pieces_for(const Machine& machine) const;
  void cut(int pieces);
  void plan(const StepInput& in);
  void add_runs(int begin, int end, int tile, int tile_end);

  std::vector<Sequence> order_;
  std::vector<int> alike_;  // per place in order_: leading tiles shared with the one before; 0 for the first
  std::vector<int> first_;  // per place in order_, and at its end: index of the first row in rows
};

}  // namespace octavo
