#include "runtime/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <stdexcept>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

// A thread that waits polls, since what it waits for is nearly always a few microseconds away. Where others have lately taken its CPU
// it sleeps then, since whoever it waits for may need that CPU or have been put aside for longer; else it goes on for half a millisecond.
constexpr int kFewPolls = 400, kPolls = 20000;  // 10 us, 500 us
constexpr int kSharedPolls = 50;                // more threads than cores: the one waited for may not be running
constexpr std::chrono::milliseconds kLately{20};

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The half of a word that the kernel compares.
const uint32_t* low_half(const std::atomic<uint64_t>& word) {
  return reinterpret_cast<const uint32_t*>(&word) + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

void futex_wait(const std::atomic<uint64_t>& word, uint32_t old) {
#if defined(__linux__)
  syscall(SYS_futex, low_half(word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
  if ((uint32_t)word.load() == old) sched_yield();
#endif
}

void futex_wake_all(const std::atomic<uint64_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, low_half(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
}

void pin(int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a refusal costs speed only
#endif
}

// Whether the system has lately taken the CPU from the calling thread, in favour of another that wants it.
bool is_crowded() {
#if defined(__linux__)
  thread_local long taken = 0;
  thread_local Clock::time_point until{};
  rusage usage;
  if (getrusage(RUSAGE_THREAD, &usage) != 0) return false;
  const Clock::time_point now = Clock::now();
  if (usage.ru_nivcsw != taken) until = now + kLately;
  taken = usage.ru_nivcsw;
  return now < until;
#else
  return false;
#endif
}

bool changes_within(const std::atomic<uint64_t>& word, uint32_t old, int polls) {
  for (int i = 0; i < polls; ++i) {
    if ((uint32_t)word.load(std::memory_order_acquire) != old) return true;
    pause_cpu();
  }
  return false;
}

}  // namespace

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int c = 0; c < CPU_SETSIZE; ++c)
      if (CPU_ISSET(c, &set)) cpus.push_back(c);
#endif
  return cpus;
}

// ---- waiting ---------------------------------------------------------------------------------------------------------

void WaitedNumber::wait_while(uint32_t old, bool own_core) {
  if (changes_within(state_, old, own_core ? kFewPolls : kSharedPolls)) return;
  if (own_core && !is_crowded() && changes_within(state_, old, kPolls - kFewPolls)) return;
  for (uint64_t seen = state_.load(); (uint32_t)seen == old;) {
    if (!(seen & kSleepers) && !state_.compare_exchange_weak(seen, seen | kSleepers)) continue;
    futex_wait(state_, old);
    seen = state_.load();
  }
}

void WaitedNumber::wake() { futex_wake_all(state_); }

// ---- threads ---------------------------------------------------------------------------------------------------------

ThreadPool::ThreadPool(int threads) : threads_(threads), owner_pid_(getpid()) {
  if (threads < 1) throw std::invalid_argument("threads: at least 1");
  const std::vector<int> cpus = allowed_cpus();
  const bool whole_machine = (int)cpus.size() == threads;
  own_core_ = (int)cpus.size() >= threads;
  members_ = std::make_unique<Member[]>((size_t)threads);
  try {
    for (int t = 1; t < threads; ++t) {
      workers_.emplace_back([this, t, whole_machine, cpus] {
        // Pinned only when the pool is the machine: a smaller pool beside others must not pile up on the first CPUs. The
        // caller is not pinned (it is Python's thread), so workers leave the first CPU to it.
        if (whole_machine) pin(cpus[(size_t)t]);
        work(t);
      });
    }
  } catch (...) {  // the system gives no more threads: end those that run, or their std::thread would end the process
    stop_workers();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() != owner_pid_) {
    for (auto& w : workers_) w.detach();  // they live in the parent only
    return;
  }
  stop_workers();
}

void ThreadPool::stop_workers() {
  stop_.store(true);
  runs_.set(runs_.get() + 1);
  for (auto& w : workers_) w.join();
}

void ThreadPool::work(int thread) {
  for (uint32_t seen = 0;;) {
    runs_.wait_while(seen, own_core_);
    seen = runs_.get();
    if (stop_.load()) return;
    if (seen % 2 == 0 || !enter(thread, seen)) continue;
    Turn turn(*this, thread);
    fn_(context_, turn);
    leave(thread);
  }
}

// ---- shares ----------------------------------------------------------------------------------------------------------

void ThreadPool::run(void (*fn)(void*, Turn&), void* context) {
  if (threads_ > 1) {
    if (getpid() != owner_pid_) throw std::runtime_error("thread pool used after fork(); load the model in the process that runs it");
    fn_ = fn;
    context_ = context;
    first_phase_ = phase_.get();
    runs_.set(runs_.get() + 1);
  }
  Turn turn(*this, 0);
  fn(context, turn);
  if (threads_ == 1) return;
  runs_.set(runs_.get() + 1);
  // Whoever is inside has no work left and leaves; whoever enters from now on sees that it is too late, and leaves too.
  for (int t = 1; t < threads_; ++t) {
    const uint32_t moves = members_[(size_t)t].moves.get();
    if (moves % 2) members_[(size_t)t].moves.wait_while(moves, own_core_);
  }
}

// Whether the share is still open; then the worker is inside. It says so before it looks: run() closes before it looks.
bool ThreadPool::enter(int thread, uint32_t run) {
  Member& me = members_[(size_t)thread];
  me.run = run;
  me.moves.set(me.moves.get() + 1);
  if (runs_.get() == run) return true;
  leave(thread);
  return false;
}

void ThreadPool::leave(int thread) {
  WaitedNumber& moves = members_[(size_t)thread].moves;
  if (moves.get() % 2) moves.set(moves.get() + 1);
}

// Whether this thread has done the last of the work; without work, whether it is the first here.
bool ThreadPool::finishes(Work work, uint32_t phase) {
  if (work.total == 0) {
    uint32_t last = claimed_.load();
    return last != phase && phase_.get() == phase && claimed_.compare_exchange_strong(last, phase);
  }
  if (work.done == 0 || done_.fetch_add(work.done) + work.done < work.total) return false;
  done_.store(0, std::memory_order_relaxed);
  return true;
}

bool ThreadPool::Turn::follow() {
  if (pool_.phase_.get() == phase_) {
    if (thread_) pool_.leave(thread_);
    pool_.phase_.wait_while(phase_, pool_.own_core_);
    if (thread_ && !pool_.enter(thread_, run_)) return false;
  }
  ++phase_;
  return true;
}

}  // namespace octavo
