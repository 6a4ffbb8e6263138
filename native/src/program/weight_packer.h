// Packs the matrices of a program: planned one by one, then all at once on every thread.
//
// Owns the list of what is still to be packed. Planning reads no weight, so that the caller (Python) is done with it soon and need
// not hold its interpreter lock for the rest. The matrices lie in one range of memory, in the order of planning, which is that of use.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/packing.h"
#include "runtime/thread_pool.h"

namespace octavo {

class WeightPacker {
 public:
  // raw: n rows as pack_blocks takes them, to stay as they are until pack() returns. mapped: raw lies in a read-only map of a file, whose
  // pages the process gives up once they are packed, so that it never holds its weights twice (the page cache keeps them). Throws as
  // pack_plan does.
  std::unique_ptr<PackedMatrix> plan(const char* dtype, const uint8_t* raw, int n, int k, bool widen, bool mapped);

  // Pack everything planned since the last call into matrices that must still be alive. Throws std::bad_alloc; nothing is packed then.
  void pack(ThreadPool& pool);

  bool done() const { return pending_.empty(); }

 private:
  struct Pending {
    PackedMatrix* matrix;
    std::string dtype;
    const uint8_t* raw;
    bool mapped;
  };
  struct Piece {
    const Pending* source;
    int block_begin, block_end;
  };

  std::vector<Piece> pieces() const;
  static void pack_piece(const Piece& piece);

  std::vector<Pending> pending_;
};

}  // namespace octavo
