// The thread pool: every run and every barrier is a meeting of all threads, however many there are beside the cores.
//
// What threads hand each other here is plain memory: under -fsanitize=thread any meeting that orders too little is a report.
#include "runtime/thread_pool.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "testing.h"

using namespace octavo_test;
using octavo::ThreadPool;

namespace {

using Clock = std::chrono::steady_clock;

void rest(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// Each thread writes its number of the round, meets, and reads its neighbours': one early or late thread is a wrong number.
void test_barriers(int threads, int runs, int rounds) {
  ThreadPool pool(threads);
  std::vector<int> written((size_t)threads, -1), wrong((size_t)threads, 0), entered((size_t)threads, 0);
  int alone = 0;  // written by whoever arrives last
  for (int run = 0; run < runs; ++run) {
    pool.each([&](int thread) {
      ++entered[(size_t)thread];
      for (int round = 0; round < rounds; ++round) {
        const int number = run * rounds + round;
        written[(size_t)thread] = number;
        pool.barrier();
        for (int other = 0; other < threads; ++other) wrong[(size_t)thread] += written[(size_t)other] != number;
        pool.barrier_then([&] { ++alone; });
        wrong[(size_t)thread] += alone != number + 1;
        pool.barrier();
      }
    });
    if (run % 64 == 0) rest(run % 128 ? 50 : 5000);  // short of, and long past, the spinning of the workers
  }
  for (int t = 0; t < threads; ++t) {
    check(wrong[(size_t)t] == 0, "%d threads: thread %d met others at a wrong moment %d times", threads, t, wrong[(size_t)t]);
    check(entered[(size_t)t] == runs, "%d threads: thread %d entered %d of %d runs", threads, t, entered[(size_t)t], runs);
  }
  check(alone == runs * rounds, "%d threads: %d of %d lone pieces of work were done", threads, alone, runs * rounds);
}

// A run without a barrier of its own still ends after all of its threads, and the next one sees what they wrote.
void test_run_is_a_meeting(int threads, int runs) {
  ThreadPool pool(threads);
  std::vector<int> count((size_t)threads, 0);
  for (int run = 1; run <= runs; ++run) {
    pool.each([&](int thread) { ++count[(size_t)((thread + run) % threads)]; });  // another thread's number each time
    for (int t = 0; t < threads; ++t) check(count[(size_t)t] == run, "%d threads: run %d returned before thread %d had done its part", threads, run, t);
  }
}

// Work handed out by a counter is done once, whichever thread takes it.
void test_shared_counter(int threads, int runs) {
  ThreadPool pool(threads);
  std::vector<int> done(100, 0);
  for (int run = 1; run <= runs; ++run) {
    std::atomic<int> next{0};
    pool.each([&](int) {
      for (int i = next.fetch_add(1); i < (int)done.size(); i = next.fetch_add(1)) ++done[(size_t)i];
    });
  }
  for (size_t i = 0; i < done.size(); ++i) check(done[i] == runs, "%d threads: item %d was done %d of %d times", threads, (int)i, done[i], runs);
}

void test_exceptions(int threads) {
  ThreadPool pool(threads);
  for (int culprit = 0; culprit < threads; ++culprit) {
    std::string caught;
    try {
      pool.each_or_throw([&](int thread) {
        if (thread == culprit) throw std::runtime_error("thread " + std::to_string(thread));
      });
    } catch (const std::runtime_error& e) {
      caught = e.what();
    }
    check(caught == "thread " + std::to_string(culprit), "%d threads: the exception of thread %d came out as '%s'", threads, culprit, caught.c_str());
    int all = 0;
    try {
      pool.each_or_throw([&](int) { throw 1; });
    } catch (int one) {
      all = one;
    }
    check(all == 1, "%d threads: when all throw, one exception comes out", threads);
  }
  std::atomic<int> count{0};
  pool.each([&](int) { ++count; });
  check(count == threads, "%d threads: %d run after an exception", threads, count.load());
}

// Pools that end before their workers have begun, while they spin, while they sleep, and right after a run.
void test_ends(int threads, int pools) {
  for (int i = 0; i < pools; ++i) {
    ThreadPool pool(threads);
    std::atomic<int> count{0};
    if (i % 2) pool.each([&](int) { ++count; });
    if (i % 4 == 3) pool.each([&](int) { ++count; });
    if (i % 3 == 1) rest(30);
    if (i % 16 == 2) rest(4000);
    check(count == threads * (i % 2) * (1 + i % 4 / 2), "%d threads: pool %d ran %d times", threads, i, count.load());
  }
}

void test_pools_side_by_side() {
  ThreadPool first(2), second(3);
  int total = 0;
  for (int i = 0; i < 200; ++i) {
    std::vector<int> a(2, 0), b(3, 0);
    first.each([&](int t) { a[(size_t)t] = 1; });
    second.each([&](int t) { b[(size_t)t] = 1; });
    total += a[0] + a[1] + b[0] + b[1] + b[2];
  }
  check(total == 1000, "two pools: %d of 1000 parts were done", total);
}

void test_refusals() {
  for (int threads : {0, -1}) {
    bool refused = false;
    try {
      ThreadPool pool(threads);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    check(refused, "a pool of %d threads was not refused", threads);
  }
}

}  // namespace

int main() {
  const auto started = Clock::now();
  // More threads than cores take the kernel's scheduler to meet; fewer runs say as much.
  const int runs[] = {4000, 2000, 300, 60};
  const int threads[] = {1, 2, 3, 8};
  for (int i = 0; i < 4; ++i) {
    test_barriers(threads[i], runs[i], 3);
    test_run_is_a_meeting(threads[i], runs[i]);
    test_shared_counter(threads[i], runs[i]);
    test_exceptions(threads[i]);
    test_ends(threads[i], 60);
  }
  test_pools_side_by_side();
  test_refusals();
  std::printf("%.2f s\n", std::chrono::duration<double>(Clock::now() - started).count());
  return finish("thread_pool");
}
