#include "program/shared_prefixes.h"

#include <algorithm>
#include <cstring>

namespace octavo {
namespace {

constexpr int kSplitTiles = kSplitTokens / kTileTokens;
constexpr int kMostRows = 16;           // of a sequence: one token, or drafts to verify
constexpr size_t kStateFloats = 16u << 20;  // 64 MB bound the states kept; what lies beyond is walked sequence by sequence
constexpr int kUnitsPerThread = 4;  // so that threads end about together

}  // namespace

void SharedPrefixes::clear() {
  rows.clear();
  runs.clear();
  units.clear();
  splits = 0;
}

int64_t SharedPrefixes::row_tiles() const {
  int64_t sum = 0;
  for (const SharedRun& run : runs) sum += (int64_t)(run.end - run.begin) * (run.tile_end - run.tile_begin);
  return sum;
}

void SharedPrefixes::find(const StepInput& in, const Machine& machine, int row_begin, int row_end) {
  clear();
  list_sequences(in, row_begin, row_end);
  if (order_.size() < 2) return;
  sort_by_table(in, machine.block_size);
  for (int& tiles : alike_)
    if (tiles < machine.least_tiles) tiles = 0;
  int saved = 0, most = 0;
  for (int tiles : alike_) saved += tiles, most = std::max(most, tiles);
  if (saved < machine.worth) return;
  size_t num_rows = 0;
  for (const Sequence& s : order_) num_rows += (size_t)in.seq_rows[s.seq];
  const size_t room = kStateFloats / (machine.state_floats * (size_t)machine.kv_heads * num_rows);
  for (int& tiles : alike_) tiles = std::min(tiles, (int)std::min(room, (size_t)most) * kSplitTiles);
  plan(in);
  if (const int pieces = pieces_for(machine); pieces > 1) {
    cut(pieces);
    plan(in);
  }
}

void SharedPrefixes::list_sequences(const StepInput& in, int row_begin, int row_end) {
  order_.clear();
  for (int s = 0, row = 0; s < in.num_seqs; row += in.seq_rows[s++]) {
    const int seen = (in.seq_start[s] + 1) / kTileTokens;
    if (seen > 0 && in.seq_rows[s] <= kMostRows && row >= row_begin && row + in.seq_rows[s] <= row_end) order_.push_back({s, row, seen});
  }
}

// Any order in which tables that begin alike stand beside each other.
void SharedPrefixes::sort_by_table(const StepInput& in, int block_size) {
  const auto table = [&](const Sequence& s) { return in.tables + in.table_offset[s.seq]; };
  const auto blocks = [&](const Sequence& a, const Sequence& b) { return (std::min(a.tiles, b.tiles) * kTileTokens + block_size - 1) / block_size; };
  std::sort(order_.begin(), order_.end(), [&](const Sequence& a, const Sequence& b) {
    const int order = std::memcmp(table(a), table(b), sizeof(int32_t) * (size_t)blocks(a, b));
    if (order) return order < 0;
    return a.tiles != b.tiles ? a.tiles < b.tiles : a.seq < b.seq;
  });
  alike_.assign(order_.size(), 0);
  for (size_t i = 1; i < order_.size(); ++i) {
    const Sequence &a = order_[i - 1], &b = order_[i];
    const int64_t same = std::mismatch(table(a), table(a) + blocks(a, b), table(b)).first - table(a);
    alike_[i] = (int)std::min<int64_t>(same * block_size / kTileTokens, std::min(a.tiles, b.tiles));
  }
}

// With few units threads would wait for the last: then sequences go in pieces, each of which walks the tiles for itself.
int SharedPrefixes::pieces_for(const Machine& machine) const {
  const int work = num_units() * machine.kv_heads, wanted = kUnitsPerThread * machine.threads;
  return work ? std::min(machine.threads, (wanted + work - 1) / work) : 1;
}

void SharedPrefixes::cut(int pieces) {
  std::vector<size_t> joints;
  for (size_t i = 0; i < alike_.size(); ++i)
    if (alike_[i]) joints.push_back(i);
  pieces = std::min(pieces, ((int)joints.size() + 1) / 2);
  for (int i = 1; i < pieces; ++i) alike_[joints[joints.size() * (size_t)i / (size_t)pieces]] = 0;
}

void SharedPrefixes::plan(const StepInput& in) {
  clear();
  place.assign((size_t)in.num_seqs, -1);
  tiles.assign((size_t)in.num_seqs, 0);
  first_.clear();
  int most = 0;
  for (size_t i = 0; i < order_.size(); ++i) {
    const Sequence& s = order_[i];
    const int shared = std::max(alike_[i], i + 1 < order_.size() ? alike_[i + 1] : 0);
    first_.push_back((int)rows.size());
    if (!shared) continue;
    tiles[(size_t)s.seq] = shared;
    place[(size_t)s.seq] = (int)rows.size();
    most = std::max(most, shared);
    for (int row = 0; row < in.seq_rows[s.seq]; ++row) rows.push_back(s.row + row);
  }
  first_.push_back((int)rows.size());
  splits = (most + kSplitTiles - 1) / kSplitTiles;
  // Splits of the same sequences after each other: a thread that takes them in turn finds the next one asked for.
  const int size = (int)order_.size();
  for (int begin = 0, end; begin < size; begin = end) {
    end = begin + 1;
    while (end < size && alike_[(size_t)end] > 0) ++end;
    for (int tile = 0; tile < most && end - begin > 1; tile += kSplitTiles) {
      for (int from = begin, to; from < end; from = to) {  // those that share the split's first tile
        to = from + 1;
        while (to < end && alike_[(size_t)to] > tile) ++to;
        if (to - from < 2) continue;
        units.push_back((int)runs.size());
        add_runs(from, to, tile, tile + kSplitTiles);
      }
    }
  }
  units.push_back((int)runs.size());
}

// Runs of the sequences [begin, end) of order_, which all share `tile`, up to tile_end.
void SharedPrefixes::add_runs(int begin, int end, int tile, int tile_end) {
  const int shared = std::min(tile_end, *std::min_element(alike_.begin() + begin + 1, alike_.begin() + end));
  runs.push_back({first_[(size_t)begin], first_[(size_t)end], tile, shared});
  if (shared == tile_end) return;
  for (int from = begin, to; from < end; from = to) {
    to = from + 1;
    while (to < end && alike_[(size_t)to] > shared) ++to;
    if (to - from > 1) add_runs(from, to, shared, tile_end);
  }
}

}  // namespace octavo
