// Value -> id, built once and read by many threads. Value number k (from 0) has id k + 1; all others are 0.
#pragma once
#include <algorithm>
#include <optional>

#include "arrays.hpp"
#include "hashing.hpp"

inline size_t slots_for(size_t values) { return values * 10 / 6 + 8; }

inline void check_size(size_t values) {
  if (values >= (1ull << 31) - 1) throw std::invalid_argument("a vocabulary holds at most 2^31 - 2 values");
}

class IntLookup {
 public:
  explicit IntLookup(In<int64_t> values) : entries_(slots_for(values.size()), Entry{0, 0}) {
    check_size(values.size());
    nb::gil_scoped_release release;
    for (size_t k = 0; k < values.size(); ++k) {
      Entry& entry = entries_[find_slot(values.data()[k], hash_of(values.data()[k]))];
      if (entry.id) throw std::invalid_argument("a vocabulary holds each value once");
      entry = Entry{values.data()[k], static_cast<int32_t>(k + 1)};
    }
  }

  Out<int32_t> find(In<int64_t> values, Mask mask) const {
    const size_t rows = values.size();
    const uint8_t* valid = mask_data(mask, rows);
    std::vector<int32_t> ids(rows);
    {
      nb::gil_scoped_release release;
      int64_t places[BLOCK];
      for (size_t start = 0; start < rows; start += BLOCK) {
        const size_t count = std::min(rows - start, BLOCK);
        find_block(values.data() + start, count, places);
        for (size_t i = 0; i < count; ++i)
          ids[start + i] = valid && !valid[start + i] ? 0 : static_cast<int32_t>(places[i] + 1);
      }
    }
    return to_numpy(std::move(ids));
  }

  size_t num_bytes() const { return entries_.capacity() * sizeof(Entry); }

  // Places of up to BLOCK values; -1 for those that are not there.
  static constexpr size_t BLOCK = 16;
  void find_block(const int64_t* values, size_t count, int64_t* places) const {
    uint64_t hashes[BLOCK];
    for (size_t i = 0; i < count; ++i) {
      hashes[i] = hash_of(values[i]);
      __builtin_prefetch(&entries_[slot_of(hashes[i], entries_.size())]);
    }
    for (size_t i = 0; i < count; ++i) places[i] = entries_[find_slot(values[i], hashes[i])].id - int64_t{1};
  }

 private:
  struct Entry { int64_t value; int32_t id; };

  static uint64_t hash_of(int64_t value) { return xxh64::of_int(static_cast<uint64_t>(value), 0); }

  // The slot that holds the value, or the empty one where it would be.
  size_t find_slot(int64_t value, uint64_t hash) const {
    size_t slot = slot_of(hash, entries_.size());
    while (entries_[slot].id && entries_[slot].value != value) slot = slot + 1 == entries_.size() ? 0 : slot + 1;
    return slot;
  }

  std::vector<Entry> entries_;
};
