// Loops shared among OpenMP threads: torch's own pool when torch was imported first. A pool of ours would fight it.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <exception>

namespace embedding {

// run(begin, end) over 0..size, one range per thread; a thread gets at least min_size.
template <class Run>
void for_ranges(size_t size, int threads, size_t min_size, Run run) {
  const int parts = static_cast<int>(std::min<size_t>(static_cast<size_t>(std::max(threads, 1)), size / min_size));
  if (parts <= 1) {
    run(size_t{0}, size);
    return;
  }
#pragma omp parallel for num_threads(parts) schedule(static, 1)
  for (int part = 0; part < parts; ++part) run(size * part / parts, size * (part + 1) / parts);
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
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (size_t i = 0; i < size; ++i) {
    try {
      run(i, 1);
    } catch (...) {
#pragma omp critical(embedding_failure)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace embedding
