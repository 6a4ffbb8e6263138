// Paged KV memory: a pool of equal pages. A block holds `block_size` tokens of every layer and has a page per column; each layer lies in
// one of the columns, and any page of the pool can be any column of any block. No allocation policy.
//
// Without a layout a block is one page, contiguous over all layers. Memory comes from anonymous mmap: what was never written costs nothing.
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

// Where layers lie: layer i at offsets[i] bytes of the page of column columns[i].
struct KVPageLayout {
  int num_columns = 1;
  size_t page_bytes = 0;
  std::vector<int> columns;
  std::vector<size_t> offsets;
};

class KVStore {
 public:
  // Throws std::invalid_argument for shapes it cannot hold, std::bad_alloc when the memory is not to be had.
  KVStore(int num_pages, int block_size, KVType type, const std::vector<KVLayerShape>& layers);
  KVStore(int num_pages, int block_size, KVType type, const std::vector<KVLayerShape>& layers, const KVPageLayout& layout);

  // Another model's layers in the pages of `owner`, which a layout's pages divide without a rest. One of the two is in use at a time, and
  // what is whose is the callers' business. Throws std::invalid_argument.
  KVStore(const KVStore& owner, int block_size, KVType type, const std::vector<KVLayerShape>& layers, const KVPageLayout& layout);

  // One page for all layers.
  static KVPageLayout one_page(int block_size, KVType type, const std::vector<KVLayerShape>& layers);
  static size_t bytes_per_block(int block_size, KVType type, const std::vector<KVLayerShape>& layers);

  const KVLayerView& layer(int i) const { return views_[(size_t)i]; }  // its blocks are the pages of its column
  int column(int layer) const { return layout_.columns[(size_t)layer]; }
  int num_layers() const { return (int)views_.size(); }
  int num_pages() const { return num_pages_; }
  int num_columns() const { return layout_.num_columns; }
  int num_blocks() const { return num_pages_ / layout_.num_columns; }  // that have all their pages
  int block_size() const { return block_size_; }
  size_t page_bytes() const { return layout_.page_bytes; }
  size_t block_bytes() const { return layout_.page_bytes * (size_t)layout_.num_columns; }
  uint8_t* page(int i) { return memory_->data() + (size_t)i * layout_.page_bytes; }
  void copy_page(int src, int dst);  // throws std::invalid_argument for pages outside the pool

 private:
  void view_layers(KVType type, const std::vector<KVLayerShape>& layers);

  int num_pages_, block_size_;
  KVPageLayout layout_;
  std::shared_ptr<LazyMemory> memory_;
  std::vector<KVLayerView> views_;
};

}  // namespace octavo
