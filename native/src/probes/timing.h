// Seconds of a piece of work run by all threads of a pool at once. The one timing loop of probes, kernel speeds and benches.
//
// What is counted is CPU time of the slowest thread: what other processes take of a core does not count, waiting for memory does.
#pragma once

#include <ctime>

#include <algorithm>
#include <vector>

#include "runtime/thread_pool.h"

namespace octavo {

inline double thread_cpu_s() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Seconds of one call of the work: the least is what the machine can do, the median what a kernel does.
struct Timing {
  double min_s, median_s;
};

// Calls work(thread) on every thread, in up to `batches` timed batches within about budget_s in all; at least one, after one call
// to warm up unless that alone uses up the budget. work must not throw.
template <class F>
Timing time_on_threads(ThreadPool& pool, double budget_s, F&& work, int batches = 9) {
  std::vector<double> spent(static_cast<size_t>(pool.size()));
  const auto batch = [&](int repeats) {
    pool.each([&](int thread) {
      const double start = thread_cpu_s();
      for (int i = 0; i < repeats; ++i) work(thread);
      spent[static_cast<size_t>(thread)] = (thread_cpu_s() - start) / repeats;
    });
    return *std::max_element(spent.begin(), spent.end());
  };
  std::vector<double> seconds{batch(1)};
  double left_s = budget_s - seconds[0];
  if (left_s > seconds[0]) {
    const double once_s = std::max(batch(1), 1e-9);
    seconds.clear();
    const int repeats = static_cast<int>(std::clamp(left_s / batches / once_s, 1.0, 1e6));
    do {
      seconds.push_back(batch(repeats));
      left_s -= seconds.back() * repeats;
    } while (static_cast<int>(seconds.size()) < batches && left_s > 0);
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[0], seconds[seconds.size() / 2]};
}

}  // namespace octavo
