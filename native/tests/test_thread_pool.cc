// The thread pool: a phase ends when its work is done, whoever did it and however many threads there are beside the cores.
//
// What threads hand each other here is plain memory: under -fsanitize=thread any meeting that orders too little is a report, under
// -fsanitize=address any thread that touches a share that is over.
#include "runtime/thread_pool.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <chrono>
#include <cstdarg>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "testing.h"

using namespace octavo_test;
using octavo::ThreadPool;
using octavo::Work;

namespace {

using Clock = std::chrono::steady_clock;

void rest(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// Work of which each thread has a part of its own. Each writes its number of the round, meets, and reads its neighbours': one early or
// late thread is a wrong number.
void test_own_parts(int threads, int runs, int rounds) {
  ThreadPool pool(threads);
  std::vector<int> written((size_t)threads, -1), wrong((size_t)threads, 0), entered((size_t)threads, 0);
  const Work own{1, threads};
  int alone = 0;  // written by whoever comes last
  for (int run = 0; run < runs; ++run) {
    pool.share([&](ThreadPool::Turn& turn) {
      const size_t thread = (size_t)turn.thread();
      ++entered[thread];
      for (int round = 0; round < rounds; ++round) {
        const int number = run * rounds + round;
        written[thread] = number;
        if (!turn.meet(own)) return;
        for (int other = 0; other < threads; ++other) wrong[thread] += written[(size_t)other] != number;
        if (!turn.meet_then(own, [&] { ++alone; })) return;
        wrong[thread] += alone != number + 1;
        if (!turn.meet(own)) return;
      }
    });
    if (run % 64 == 0) rest(run % 128 ? 50 : 5000);  // short of, and long past, the polling of the workers
  }
  for (int t = 0; t < threads; ++t) {
    check(wrong[(size_t)t] == 0, "%d threads: thread %d met others at a wrong moment %d times", threads, t, wrong[(size_t)t]);
    check(entered[(size_t)t] == runs, "%d threads: thread %d entered %d of %d runs", threads, t, entered[(size_t)t], runs);
  }
  check(alone == runs * rounds, "%d threads: %d of %d lone pieces of work were done", threads, alone, runs * rounds);
}

// What a share works on; it is gone as soon as the share is over.
struct Phases {
  static constexpr int kPhases = 12, kUnits = 9;
  std::atomic<int> next[kPhases]{};
  int value[kPhases][kUnits]{};  // each made from one of the phase before
  int alone[kPhases]{};

  static int units(int phase) { return phase % 4 == 2 ? 0 : kUnits - phase % 3; }
  static int made(const Phases& of, int phase, int unit) {
    int before = phase - 1;
    while (before >= 0 && !units(before)) --before;
    return before < 0 ? unit : 3 * of.value[before][(unit + phase) % units(before)] % 1009 + unit;
  }
};

// Work that is handed out, each phase's made from that of the phase before, whichever threads come: every unit is done once, after all
// units of the phase before and the lone piece of work behind them. Some units take long, so that threads are late everywhere.
void test_handed_out(int threads, int runs, bool rests) {
  ThreadPool pool(threads);
  std::atomic<int> wrong{0};
  for (int run = 0; run < runs; ++run) {
    const auto phases = std::make_unique<Phases>();
    Phases expected;
    pool.share([&, of = phases.get()](ThreadPool::Turn& turn) {
      for (int p = 0; p < Phases::kPhases; ++p) {
        Work work{0, Phases::units(p)};
        for (int i = of->next[p].fetch_add(1); i < work.total; i = of->next[p].fetch_add(1), ++work.done) {
          if (p > 0) wrong += of->alone[p - 1] != 1;
          of->value[p][i] += Phases::made(*of, p, i);
          if (rests && (run + p + i) % 37 == 0) rest(30);
        }
        if (!turn.meet_then(work, [&] { ++of->alone[p]; })) return;
      }
    });
    for (int p = 0; p < Phases::kPhases; ++p) {
      wrong += phases->alone[p] != 1;
      for (int i = 0; i < Phases::units(p); ++i) {
        expected.value[p][i] = Phases::made(expected, p, i);
        wrong += phases->value[p][i] != expected.value[p][i];
      }
    }
    int count = 0;
    std::vector<int> each((size_t)threads, 0);
    if (run % 8 == 0) pool.each([&](int t) { each[(size_t)t] = 1; });  // both kinds of run in turn
    for (int one : each) count += one;
    check(count == (run % 8 ? 0 : threads), "%d threads: %d did their part after a share", threads, count);
  }
  check(wrong == 0, "%d threads: %d units were done at a wrong moment, or not once", threads, wrong.load());
}

// Threads that have taken no work hold nobody up: the caller comes to the end while all others stand still in the first phase.
void test_others_stand_still(int threads, int runs) {
  ThreadPool pool(threads);
  for (int run = 0; run < runs; ++run) {
    std::atomic<bool> over{false};
    std::atomic<int> standing{0};
    int done = 0;
    pool.share([&](ThreadPool::Turn& turn) {
      if (turn.thread() > 0) {
        ++standing;
        while (!over) std::this_thread::yield();
      } else {
        while (run % 2 && standing < threads - 1) std::this_thread::yield();  // else some have not even entered
      }
      for (int phase = 0; phase < 20; ++phase) {
        if (turn.thread() == 0) ++done;
        if (!turn.meet({turn.thread() == 0, 1})) return;
      }
      over = true;
    });
    check(done == 20, "%d threads: the caller did %d of 20 phases", threads, done);
  }
}

// A run of all threads ends after all of them, and the next one sees what they wrote.
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

#if defined(__linux__)
std::function<void()> before_sleep;  // called by a thread that is about to sleep; before the threads of a test begin
std::atomic<int> num_wakes{0};

// Whoever has set a value and was held up before it woke those that slept does so when others sleep already, until the next value is set:
// at the worst moment, between their last look and their sleep. They are woken all the same.
void test_late_wake() {
  octavo::WaitedNumber number;
  std::atomic<bool> sleeps{false};
  before_sleep = [&] {
    number.wake();
    sleeps = true;
  };
  std::thread waiter([&] { number.wait_while(0, false); });
  while (!sleeps) std::this_thread::yield();
  const int before = num_wakes;
  number.set(1);
  const bool woken = check(num_wakes > before, "a thread that slept is not woken after another was late to wake those before it");
  if (!woken) std::exit(finish("thread_pool"));  // it sleeps for good
  waiter.join();
  before_sleep = nullptr;
}
#endif

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

#if defined(__linux__)
// In place of the C library's: what threads do when they are about to sleep, and how often somebody wakes them.
extern "C" long syscall(long number, ...) noexcept {
  static const auto real = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  va_list list;
  va_start(list, number);
  long a[6];
  for (long& one : a) one = va_arg(list, long);
  va_end(list);
  if (number == SYS_futex && (int)a[1] == FUTEX_WAKE_PRIVATE) ++num_wakes;
  if (number == SYS_futex && (int)a[1] == FUTEX_WAIT_PRIVATE && before_sleep) before_sleep();
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
#endif

int main() {
  const auto started = Clock::now();
  // More threads than cores take the kernel's scheduler to meet; fewer runs say as much.
  const int runs[] = {4000, 2000, 300, 60};
  const int threads[] = {1, 2, 3, 8};
  for (int i = 0; i < 4; ++i) {
    test_own_parts(threads[i], runs[i], 3);
    test_handed_out(threads[i], runs[i], false);
    test_handed_out(threads[i], runs[i] / 8, true);
    test_others_stand_still(threads[i], runs[i] / 8);
    test_run_is_a_meeting(threads[i], runs[i]);
    test_shared_counter(threads[i], runs[i]);
    test_exceptions(threads[i]);
    test_ends(threads[i], 60);
  }
  test_pools_side_by_side();
  test_refusals();
#if defined(__linux__)
  test_late_wake();
#endif
  std::printf("%.2f s\n", std::chrono::duration<double>(Clock::now() - started).count());
  return finish("thread_pool");
}
