// What one of several workers asks of all: the different keys of a batch, sorted by who holds them.
//
// Rows come back in the order of the keys, and gradients go out in it, so that both are one matrix for all tables.
#pragma once
#include <numeric>
#include <vector>

#include "embedding_batch.hpp"

namespace embedding {

constexpr uint64_t OWNER_SEED = 0x0A11;  // not the index's: a shard must not fill one side of its index only

// Ids of a vocabulary are dealt in turn, so that a shard's are as dense as the vocabulary's; other keys go by hash, and
// those that share a row while they wait go together.
inline size_t owner_of(int64_t key, const Options& options, size_t num_owners) {
  const uint64_t bits = static_cast<uint64_t>(key);
  if (options.num_rows > 0) return bits % num_owners;
  if (options.shared_rows > 0) return shared_row_of(hash_of(key), options.shared_rows) % num_owners;
  return slot_of(xxh64::of_int(bits, OWNER_SEED), num_owners);
}

struct Request {
  std::vector<int64_t> keys;  // by owner, then by table, then by first occurrence
  std::vector<uint32_t> counts;
  std::vector<int64_t> sizes;                  // [owner][table]
  std::vector<std::vector<uint32_t>> inverse;  // of each table: occurrence -> place in keys
};

inline Request request_keys(const std::vector<Table*>& tables, const std::vector<std::vector<Segment>>& segments,
                            size_t num_owners, int threads) {
  const size_t num_tables = tables.size();
  std::vector<Lookup> found(num_tables);
  std::vector<std::vector<uint32_t>> owners(num_tables);
  Request request;
  request.sizes.resize(num_owners * num_tables);
  request.inverse.resize(num_tables);
  for_items(num_tables, threads, [&](size_t t, int) {
    find_duplicates(segments[t], found[t]);
    owners[t].reserve(found[t].keys.size());
    for (const int64_t key : found[t].keys) {
      const size_t owner = owner_of(key, tables[t]->options, num_owners);
      owners[t].push_back(static_cast<uint32_t>(owner));
      request.sizes[owner * num_tables + t] += 1;
    }
  });
  const size_t size = static_cast<size_t>(std::accumulate(request.sizes.begin(), request.sizes.end(), int64_t{0}));
  if (size >= ABSENT) throw std::invalid_argument("a batch must have fewer than 2^32 keys");
  request.keys.resize(size);
  request.counts.resize(size);
  for_items(num_tables, threads, [&](size_t t, int) {
    std::vector<uint32_t> next(num_owners), place(found[t].keys.size());
    for (size_t owner = 0, first = 0; owner < num_owners; ++owner) {
      const auto row = request.sizes.begin() + static_cast<ptrdiff_t>(owner * num_tables);
      next[owner] = static_cast<uint32_t>(std::accumulate(row, row + static_cast<ptrdiff_t>(t), static_cast<int64_t>(first)));
      first = static_cast<size_t>(std::accumulate(row, row + static_cast<ptrdiff_t>(num_tables), static_cast<int64_t>(first)));
    }
    for (size_t i = 0; i < place.size(); ++i) {
      place[i] = next[owners[t][i]]++;
      request.keys[place[i]] = found[t].keys[i];
      request.counts[place[i]] = found[t].counts[i];
    }
    request.inverse[t] = std::move(found[t].inverse);
    for (uint32_t& unique : request.inverse[t]) unique = place[unique];
  });
  return request;
}

inline void pool_request(const Request& request, const std::vector<std::vector<Segment>>& segments, const float* rows,
                         size_t dim, int threads) {
  for_items(segments.size(), threads, [&](size_t t, int inside) {
    pool_segments(segments[t], [=](uint32_t place) { return rows + place * dim; }, request.inverse[t].data(), dim, inside);
  });
}

// The gradient of each asked key, added up over the batch. `sums` must be zeros.
inline void sum_request(const Request& request, const std::vector<std::vector<Segment>>& segments, float* sums, size_t dim,
                        int threads) {
  for_items(segments.size(), threads, [&](size_t t, int inside) {
    for_ranges(request.keys.size(), inside, MIN_ROWS_PER_THREAD, [&](size_t begin, size_t end) {
      const uint32_t* inverse = request.inverse[t].data();
      for (const Segment& segment : segments[t]) {
        add_gradients(segment, inverse, begin, end, sums, dim);
        inverse += segment.num_keys;
      }
    });
  });
}

}  // namespace embedding
