#include "kv/kv_store.h"

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

void check_layout(const KVPageLayout& layout, int block_size, KVType type, const std::vector<KVLayerShape>& layers) {
  if (block_size < 16 || block_size % 16) throw std::invalid_argument("block_size: a multiple of 16");
  for (const auto& s : layers)
    if (kv_is_paired(type) && s.head_dim % 2) throw std::invalid_argument("head_dim: " + std::to_string(s.head_dim) + "; bf16 and int8 KV need an even number");
  if (layout.columns.size() != layers.size() || layout.offsets.size() != layers.size()) throw std::invalid_argument("KV layout: one place per layer");
  for (size_t i = 0; i < layers.size(); ++i)
    if (layout.columns[i] < 0 || layout.columns[i] >= layout.num_columns || layout.offsets[i] % 64 || layout.offsets[i] > layout.page_bytes ||
        kv_layer_bytes(type, layers[i].kv_heads, layers[i].head_dim, block_size) > layout.page_bytes - layout.offsets[i])
      throw std::invalid_argument("KV layout: layer " + std::to_string(i) + " does not fit its page");
}

}  // namespace

KVPageLayout KVStore::one_page(int block_size, KVType type, const std::vector<KVLayerShape>& layers) {
  KVPageLayout layout;
  for (const auto& s : layers) {
    layout.columns.push_back(0);
    layout.offsets.push_back(layout.page_bytes);
    layout.page_bytes += kv_layer_bytes(type, s.kv_heads, s.head_dim, block_size);
  }
  return layout;
}

size_t KVStore::bytes_per_block(int block_size, KVType type, const std::vector<KVLayerShape>& layers) {
  return one_page(block_size, type, layers).page_bytes;
}

KVStore::KVStore(int num_pages, int block_size, KVType type, const std::vector<KVLayerShape>& layers)
    : KVStore(num_pages, block_size, type, layers, one_page(block_size, type, layers)) {}

KVStore::KVStore(int num_pages, int block_size, KVType type, const std::vector<KVLayerShape>& layers, const KVPageLayout& layout)
    : num_pages_(num_pages), block_size_(block_size), layout_(layout) {
  if (num_pages < 1) throw std::invalid_argument("num_blocks: at least 1");
  if (layout.num_columns < 1 || num_pages % layout.num_columns) throw std::invalid_argument("KV layout: whole blocks of pages");
  check_layout(layout, block_size, type, layers);
  memory_ = std::make_shared<LazyMemory>(layout.page_bytes * (size_t)num_pages);
  memory_->ask_for_huge_pages();  // attention walks whole blocks: fewer TLB misses
  view_layers(type, layers);
}

KVStore::KVStore(const KVStore& owner, int block_size, KVType type, const std::vector<KVLayerShape>& layers, const KVPageLayout& layout)
    : num_pages_(0), block_size_(block_size), layout_(layout), memory_(owner.memory_) {
  const size_t bytes = owner.page_bytes() * (size_t)owner.num_pages();
  if (layout.num_columns < 1 || !layout.page_bytes || bytes % layout.page_bytes) throw std::invalid_argument("KV layout: pages that divide those of another");
  if (bytes / layout.page_bytes > (size_t)std::numeric_limits<int>::max()) throw std::invalid_argument("KV layout: more pages than int32 counts");
  num_pages_ = (int)(bytes / layout.page_bytes);
  check_layout(layout, block_size, type, layers);
  view_layers(type, layers);
}

void KVStore::view_layers(KVType type, const std::vector<KVLayerShape>& layers) {
  for (size_t i = 0; i < layers.size(); ++i)
    views_.push_back(KVLayerView{memory_->data() + layout_.offsets[i], layout_.page_bytes, layers[i].kv_heads, layers[i].head_dim, block_size_, type});
}

void KVStore::copy_page(int src, int dst) {
  if (src < 0 || dst < 0 || src >= num_pages_ || dst >= num_pages_) throw std::invalid_argument("copy of page " + std::to_string(src) + " to page " + std::to_string(dst) + ": pages are 0 to " + std::to_string(num_pages_ - 1));
  std::memcpy(page(dst), page(src), layout_.page_bytes);
}

}  // namespace octavo
