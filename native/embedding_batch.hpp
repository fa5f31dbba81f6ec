// What a batch needs of its keys, wherever their rows are: different ones, pooled rows, summed gradients.
#pragma once
#include <cstring>
#include <vector>

#include "embedding_parallel.hpp"
#include "embedding_table.hpp"
#include "hashing.hpp"

namespace embedding {

constexpr size_t AHEAD = 16, MIN_ROWS_PER_THREAD = 256;

inline size_t shared_row_of(uint64_t hash, size_t shared_rows) { return hash % shared_rows; }
inline uint64_t hash_of(int64_t key) { return xxh64::of_int(static_cast<uint64_t>(key), 0); }

inline void add_row(float* __restrict out, const float* __restrict row, float weight, size_t dim) {
  for (size_t i = 0; i < dim; ++i) out[i] += weight * row[i];
}
inline void add_row(float* __restrict out, const float* __restrict row, size_t dim) {
  for (size_t i = 0; i < dim; ++i) out[i] += row[i];
}
inline void scale_row(float* __restrict out, float factor, size_t dim) {
  for (size_t i = 0; i < dim; ++i) out[i] *= factor;
}

struct Bag { size_t begin, end; };

inline Bag bag_of(const Segment& segment, size_t row) {
  if (!segment.offsets) return {row, row + 1};
  return {static_cast<size_t>(segment.offsets[row]), static_cast<size_t>(segment.offsets[row + 1])};
}

// A weighted mean divides by the sum of the weights; weights that cancel out give zeros.
inline float factor_of(const Segment& segment, Bag bag) {
  if (segment.mode != Mode::mean || bag.begin == bag.end) return 1.0f;
  if (!segment.weights) return 1.0f / static_cast<float>(bag.end - bag.begin);
  float total = 0.0f;
  for (size_t i = bag.begin; i < bag.end; ++i) total += segment.weights[i];
  return total == 0.0f ? 0.0f : 1.0f / total;
}

// row_of(unique key) is where that key's row lies.
template <class RowOf>
void pool_bag(const Segment& segment, RowOf row_of, const uint32_t* inverse, Bag bag, float* out, size_t dim) {
  if (bag.end - bag.begin == 1 && !segment.weights) {
    std::memcpy(out, row_of(inverse[bag.begin]), dim * sizeof(float));
    return;
  }
  std::fill(out, out + dim, 0.0f);
  for (size_t i = bag.begin; i < bag.end; ++i) {
    if (segment.weights) add_row(out, row_of(inverse[i]), segment.weights[i], dim);
    else add_row(out, row_of(inverse[i]), dim);
  }
  if (segment.mode == Mode::mean) scale_row(out, factor_of(segment, bag), dim);
}

// Adds a segment's gradients to the unique keys begin..end, in the order of the occurrences.
inline void add_gradients(const Segment& segment, const uint32_t* inverse, size_t begin, size_t end, float* sums,
                          size_t dim) {
  for (size_t r = 0; r < segment.num_rows; ++r) {
    const Bag bag = bag_of(segment, r);
    const float factor = factor_of(segment, bag);
    const float* grad = segment.data + static_cast<ptrdiff_t>(r * segment.stride);
    for (size_t i = bag.begin; i < bag.end; ++i) {
      const size_t unique = inverse[i];
      if (unique < begin || unique >= end) continue;
      const float weight = segment.weights ? segment.weights[i] * factor : factor;
      if (weight == 1.0f) add_row(sums + unique * dim, grad, dim);
      else add_row(sums + unique * dim, grad, weight, dim);
    }
  }
}

// Unique keys in the order of their first occurrence, through a small table that stays in cache.
inline std::vector<uint64_t> find_duplicates(const std::vector<Segment>& segments, Lookup& lookup) {
  size_t size = 0;
  for (const Segment& segment : segments) size += segment.num_keys;
  size_t slots = 16;
  while (slots < 2 * size) slots *= 2;
  std::vector<uint32_t> seen(slots, ABSENT);
  std::vector<uint64_t> hashes;
  hashes.reserve(size);
  lookup.keys.reserve(size);
  lookup.counts.reserve(size);
  lookup.inverse.reserve(size);
  for (const Segment& segment : segments) {
    for (size_t i = 0; i < segment.num_keys; ++i) {
      const int64_t key = segment.keys[i];
      const uint64_t hash = hash_of(key);
      size_t at = (hash >> 20) & (slots - 1);
      while (seen[at] != ABSENT && lookup.keys[seen[at]] != key) at = (at + 1) & (slots - 1);
      if (seen[at] == ABSENT) {
        seen[at] = static_cast<uint32_t>(lookup.keys.size());
        lookup.keys.push_back(key);
        lookup.counts.push_back(0);
        hashes.push_back(hash);
      }
      lookup.counts[seen[at]] += segment.counts ? segment.counts[i] : 1;
      lookup.inverse.push_back(seen[at]);
    }
  }
  return hashes;
}

// Writes the bags of all segments that ask for them.
template <class RowOf>
void pool_segments(const std::vector<Segment>& segments, RowOf row_of, const uint32_t* inverse, size_t dim, int threads) {
  for (const Segment& segment : segments) {
    const auto pool_rows = [&](size_t begin, size_t end) {
      for (size_t r = begin; r < end; ++r) {
        const Bag bag = bag_of(segment, r);
        for (size_t i = bag.begin + AHEAD; i < std::min(bag.end + AHEAD, segment.num_keys); ++i)
          __builtin_prefetch(row_of(inverse[i]));
        pool_bag(segment, row_of, inverse, bag, segment.data + static_cast<ptrdiff_t>(r * segment.stride), dim);
      }
    };
    if (segment.data) for_ranges(segment.num_rows, threads, MIN_ROWS_PER_THREAD, pool_rows);
    inverse += segment.num_keys;
  }
}

}  // namespace embedding
