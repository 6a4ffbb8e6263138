#include "program/weight_packer.h"

#include <algorithm>
#include <atomic>

#if defined(__unix__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

constexpr size_t kPieceBytes = size_t{512} << 10;  // of the file: shared out evenly, and what a thread holds of the file at a time

// Let go of the whole pages in [begin, end) of a file mapping. Only for read-only maps of files: other memory would lose its contents.
void drop_file_pages(const uint8_t* begin, const uint8_t* end) {
#if defined(__unix__) && defined(MADV_DONTNEED)
  static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page, last = reinterpret_cast<uintptr_t>(end) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);  // refused: costs memory only
#else
  (void)begin, (void)end;
#endif
}

}  // namespace

std::unique_ptr<PackedMatrix> WeightPacker::plan(const char* dtype, const uint8_t* raw, int n, int k, bool widen, bool mapped) {
  auto matrix = pack_plan(dtype, n, k, widen);
  pending_.push_back(Pending{matrix.get(), dtype, raw, mapped});
  return matrix;
}

std::vector<WeightPacker::Piece> WeightPacker::pieces() const {
  std::vector<Piece> out;
  for (const Pending& p : pending_) {
    const size_t block_bytes = kRowBlock * row_bytes(p.dtype.c_str(), p.matrix->k);
    const int step = static_cast<int>(std::max<size_t>(1, kPieceBytes / block_bytes)), count = p.matrix->num_blocks;
    for (int b = 0; b < count; b += std::min(step, count - b)) out.push_back(Piece{&p, b, b + std::min(step, count - b)});
  }
  return out;
}

void WeightPacker::pack_piece(const Piece& piece) {
  const Pending& p = *piece.source;
  pack_blocks(*p.matrix, p.dtype.c_str(), p.raw, piece.block_begin, piece.block_end);
  if (!p.mapped) return;
  const size_t stride = row_bytes(p.dtype.c_str(), p.matrix->k);
  const size_t end = std::min<size_t>(static_cast<size_t>(piece.block_end) * kRowBlock, p.matrix->n);
  drop_file_pages(p.raw + static_cast<size_t>(piece.block_begin) * kRowBlock * stride, p.raw + end * stride);
}

void WeightPacker::pack(ThreadPool& pool) {
  if (pending_.empty()) return;
  std::vector<PackedMatrix*> matrices;
  for (const Pending& p : pending_) matrices.push_back(p.matrix);
  pack_allocate(matrices);
  const std::vector<Piece> all = pieces();
  std::atomic<size_t> next{0};
  pool.each_or_throw([&](int) {  // widening allocates
    for (size_t i = next.fetch_add(1); i < all.size(); i = next.fetch_add(1)) pack_piece(all[i]);
  });
  pending_.clear();
}

}  // namespace octavo
