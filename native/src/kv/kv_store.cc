#include "kv/kv_store.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

size_t layer_bytes(int block_size, KVType type, const KVLayerShape& s) {
  return kv_tile_layout(type, s.head_dim).bytes * (size_t)s.kv_heads * (size_t)(block_size / 16);
}

}  // namespace

size_t KVStore::bytes_per_block(int block_size, KVType type, const std::vector<KVLayerShape>& layers) {
  size_t total = 0;
  for (const auto& s : layers) total += (layer_bytes(block_size, type, s) + 63) / 64 * 64;
  return total;
}

KVStore::KVStore(int num_blocks, int block_size, KVType type, const std::vector<KVLayerShape>& layers)
    : num_blocks_(num_blocks), block_size_(block_size) {
  if (num_blocks < 1) throw std::invalid_argument("num_blocks: at least 1");
  if (block_size < 16 || block_size % 16) throw std::invalid_argument("block_size: a multiple of 16");
  for (const auto& s : layers)
    if (kv_is_paired(type) && s.head_dim % 2) throw std::invalid_argument("head_dim: " + std::to_string(s.head_dim) + "; bf16 and int8 KV need an even number");
  block_bytes_ = bytes_per_block(block_size, type, layers);
  total_bytes_ = block_bytes_ * (size_t)num_blocks;
  void* p = mmap(nullptr, total_bytes_ ? total_bytes_ : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  madvise(p, total_bytes_, MADV_HUGEPAGE);  // attention walks whole blocks: fewer TLB misses; a refusal costs speed only
#endif
  base_ = static_cast<uint8_t*>(p);
  size_t offset = 0;
  for (const auto& s : layers) {
    views_.push_back(KVLayerView{base_ + offset, block_bytes_, s.kv_heads, s.head_dim, block_size, type});
    offset += (layer_bytes(block_size, type, s) + 63) / 64 * 64;
  }
}

KVStore::~KVStore() { munmap(base_, total_bytes_ ? total_bytes_ : 1); }

void KVStore::copy_block(int src, int dst) {
  if (src < 0 || dst < 0 || src >= num_blocks_ || dst >= num_blocks_) throw std::invalid_argument("block copy " + std::to_string(src) + " -> " + std::to_string(dst) + ": block ids are 0 to " + std::to_string(num_blocks_ - 1));
  std::memcpy(base_ + (size_t)dst * block_bytes_, base_ + (size_t)src * block_bytes_, block_bytes_);
}

}  // namespace octavo
