// How fast this machine reads memory: plain loads of the widest vectors, by number of streams, prefetch distance and page size.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "runtime/thread_pool.h"

namespace octavo {

// One way of reading. Each thread reads its own part of the buffer, `streams` equal pieces of it side by side.
struct ReadVariant {
  int streams;          // 1, 2 or 4
  int prefetch_bytes;   // software prefetch this far ahead; 0: none
  bool huge_pages;      // asked for; the system may not grant them
};

struct ReadResult {
  ReadVariant variant;
  double bytes;    // read by all threads in one pass
  double seconds;  // of the fastest pass
};

// Width of the loads in bits: 512, 256, or 64 where there are no vectors to count on.
int read_probe_bits();

// Times every variant of the probe on all threads of the pool, over a buffer of total_bytes (split evenly, at least 64 KiB a
// thread), about budget_s each. Throws std::bad_alloc.
std::vector<ReadResult> probe_reads(ThreadPool& pool, size_t total_bytes, double budget_s);

}  // namespace octavo
