// Loops shared among OpenMP threads: torch's own pool when torch was imported first. A pool of ours would fight it.
// The thread sanitizer knows nothing of libgomp, so its build runs the same ranges on std::thread.
#pragma once
#ifdef RECMILL_STD_THREADS
#include <atomic>
#include <thread>
#include <vector>
#endif

#include <algorithm>
#include <cstddef>
#include <exception>
#include <mutex>

namespace embedding {

// run(part) for each of 0..parts, on up to that many threads.
template <class Run>
void run_parts(int parts, int threads, Run run) {
#ifdef RECMILL_STD_THREADS
  std::atomic<int> next{0};
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i)
    pool.emplace_back([&] { for (int part; (part = next++) < parts;) run(part); });
  for (std::thread& thread : pool) thread.join();
#else
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int part = 0; part < parts; ++part) run(part);
#endif
}

// run(begin, end) over 0..size, one range per thread; a thread gets at least min_size.
template <class Run>
void for_ranges(size_t size, int threads, size_t min_size, Run run) {
  const int parts = static_cast<int>(std::min<size_t>(static_cast<size_t>(std::max(threads, 1)), size / min_size));
  if (parts <= 1) {
    run(size_t{0}, size);
    return;
  }
  run_parts(parts, parts, [&](int part) { run(size * part / parts, size * (part + 1) / parts); });
}

// run(i, threads inside) for each i: over the items when they are enough to keep the threads busy, else inside them.
// The first exception is thrown again when all are done.
template <class Run>
void for_items(size_t size, int threads, Run run) {
  if (threads <= 1 || size < static_cast<size_t>(threads)) {
    for (size_t i = 0; i < size; ++i) run(i, threads);
    return;
  }
  std::exception_ptr failure;
  std::mutex failing;
  run_parts(static_cast<int>(size), threads, [&](int i) {
    try {
      run(static_cast<size_t>(i), 1);
    } catch (...) {
      std::lock_guard<std::mutex> lock(failing);
      if (!failure) failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

}  // namespace embedding
