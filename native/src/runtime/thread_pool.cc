#include "runtime/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <climits>
#include <stdexcept>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace octavo {
namespace {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(const std::atomic<uint32_t>& word, uint32_t old) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
  if (word.load() == old) sched_yield();
#endif
}

void futex_wake_all(const std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
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

ThreadPool::ThreadPool(int threads) : threads_(threads), owner_pid_(getpid()) {
  if (threads < 1) throw std::invalid_argument("threads: at least 1");
  const std::vector<int> cpus = allowed_cpus();
  // Spinning helps only when every thread has a core of its own; otherwise the one waited for may not be running.
  const bool own_core = (int)cpus.size() >= threads, whole_machine = (int)cpus.size() == threads;
  spin_ = own_core ? 20000 : 50;
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
  epoch_.fetch_add(1);
  futex_wake_all(epoch_);
  for (auto& w : workers_) w.join();
}

void ThreadPool::wait_for(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < spin_; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    pause_cpu();
  }
  sleepers_.fetch_add(1);
  while (word.load() == old) futex_wait(word, old);
  sleepers_.fetch_sub(1);
}

void ThreadPool::run(void (*fn)(void*, int), void* context) {
  if (threads_ == 1) {
    fn(context, 0);
    return;
  }
  if (getpid() != owner_pid_) throw std::runtime_error("thread pool used after fork(); load the model in the process that runs it");
  fn_ = fn;
  context_ = context;
  release(epoch_);
  fn(context, 0);
  barrier();  // all have returned from fn
}

void ThreadPool::release(std::atomic<uint32_t>& word) {
  word.fetch_add(1);
  if (sleepers_.load() > 0) futex_wake_all(word);
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    wait_for(epoch_, seen);
    seen = epoch_.load();
    if (stop_.load()) return;
    fn_(context_, thread);
    barrier();
  }
}

}  // namespace octavo
