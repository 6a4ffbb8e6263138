// A second pool of KV blocks in ordinary memory, for blocks that have to leave the first: no layers, no policy, whole blocks of bytes.
// The first `num_blocks` of it are kept as they are, those behind them packed to int8 (Kernels::pack_kv), which loses what rounding takes.
//
// Pages come from anonymous mmap: memory that was never written costs nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/kernels.h"
#include "kv/kv_store.h"
#include "runtime/lazy_memory.h"

namespace octavo {

class HostStore {
 public:
  // Throws std::invalid_argument for fewer than one block, std::bad_alloc when the memory is not to be had.
  HostStore(const KVStore& kv, int num_blocks, int num_packed);

  int num_blocks() const { return num_blocks_ + num_packed_; }
  bool is_packed(int i) const { return i >= num_blocks_; }
  size_t block_bytes(int i) const { return is_packed(i) ? packed_bytes_ : block_bytes_; }
  uint8_t* block(int i) { return memory_->data() + (is_packed(i) ? (size_t)num_blocks_ * block_bytes_ + (size_t)(i - num_blocks_) * packed_bytes_ : (size_t)i * block_bytes_); }

 private:
  int num_blocks_, num_packed_;
  size_t block_bytes_, packed_bytes_;
  std::unique_ptr<LazyMemory> memory_;
};

constexpr int kLeftOut = -1;  // in place of a page: that column is not moved

// Moves of a block's pages, by column, and the host block, flat. First all saves (pool -> host), then all loads (host -> pool), each in its
// order.
// Throws std::invalid_argument, and moves nothing, when an id is in neither pool.
void move_blocks(const Kernels& kernels, KVStore& kv, HostStore& host, const int32_t* saves, size_t num_saves, const int32_t* loads,
                 size_t num_loads);

}  // namespace octavo
