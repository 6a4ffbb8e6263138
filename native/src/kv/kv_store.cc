#include "kv/kv_store.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace octavo {

size_t KVStore::bytes_per_block(int block_size, KVType type, const std::vector<KVLayerShape>& layers) {
  size_t total = 0;
  for (const auto& s : layers) total += kv_layer_bytes(type, s.kv_heads, s.head_dim, block_size);
  return total;
}

KVStore::KVStore(int num_blocks, int block_size, KVType type, const std::vector<KVLayerShape>& layers)
    : num_blocks_(num_blocks), block_size_(block_size), block_bytes_(0) {
  if (num_blocks < 1) throw std::invalid_argument("num_blocks: at least 1");
  if (block_size < 16 || block_size % 16) throw std::invalid_argument("block_size: a multiple of 16");
  for (const auto& s : layers)
    if (kv_is_paired(type) && s.head_dim % 2) throw std::invalid_argument("head_dim: " + std::to_string(s.head_dim) + "; bf16 and int8 KV need an even number");
  block_bytes_ = bytes_per_block(block_size, type, layers);
  memory_ = std::make_unique<LazyMemory>(block_bytes_ * (size_t)num_blocks);
  memory_->ask_for_huge_pages();  // attention walks whole blocks: fewer TLB misses
  size_t offset = 0;
  for (const auto& s : layers) {
    views_.push_back(KVLayerView{memory_->data() + offset, block_bytes_, s.kv_heads, s.head_dim, block_size, type});
    offset += kv_layer_bytes(type, s.kv_heads, s.head_dim, block_size);
  }
}

void KVStore::copy_block(int src, int dst) {
  if (src < 0 || dst < 0 || src >= num_blocks_ || dst >= num_blocks_) throw std::invalid_argument("block copy " + std::to_string(src) + " -> " + std::to_string(dst) + ": block ids are 0 to " + std::to_string(num_blocks_ - 1));
  std::memcpy(block(dst), block(src), block_bytes_);
}

}  // namespace octavo
