// Paged KV memory: a pool of equal blocks, each holding `block_size` tokens of every layer. No allocation policy.
//
// A block is contiguous over all layers, so copying or exporting one is one memcpy. Pages come from anonymous mmap: memory
// that was never written costs nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "runtime/lazy_memory.h"

namespace octavo {

struct KVLayerShape {
  int kv_heads, head_dim;
};

// Bytes that a layer takes in a block.
inline size_t kv_layer_bytes(KVType type, int kv_heads, int head_dim, int block_size) {
  return (kv_tile_layout(type, head_dim).bytes * (size_t)kv_heads * (size_t)(block_size / 16) + 63) / 64 * 64;
}

class KVStore {
 public:
  // Throws std::invalid_argument for shapes it cannot hold, std::bad_alloc when the memory is not to be had.
  KVStore(int num_blocks, int block_size, KVType type, const std::vector<KVLayerShape>& layers);

  static size_t bytes_per_block(int block_size, KVType type, const std::vector<KVLayerShape>& layers);

  const KVLayerView& layer(int i) const { return views_[(size_t)i]; }
  int num_layers() const { return (int)views_.size(); }
  int num_blocks() const { return num_blocks_; }
  int block_size() const { return block_size_; }
  size_t block_bytes() const { return block_bytes_; }  // over all layers, contiguous from `block`
  uint8_t* block(int i) { return memory_->data() + (size_t)i * block_bytes_; }
  void copy_block(int src, int dst);  // throws std::invalid_argument for ids outside the pool

 private:
  int num_blocks_, block_size_;
  size_t block_bytes_;
  std::unique_ptr<LazyMemory> memory_;
  std::vector<KVLayerView> views_;
};

}  // namespace octavo
