#include "repeats.hpp"

#include <algorithm>

namespace dense {

namespace {

// What it costs to add a vector's products to a row, and the row's gradients to a vector's, in columns of a product.
// Measured with AVX-512; without it products are slower, and it pays sooner.
constexpr size_t COLUMNS_OF_A_ROW = 6;

// Numbers of different ids, found by hashing. Entries of another feature are told by their stamp, so that nothing is
// cleared between features.
class Numbers {
 public:
  void begin(size_t rows) {
    size_t size = 16;
    while (size < 2 * rows) size *= 2;
    if (entries_.size() < size || ++stamp_ == 0) {
      entries_.assign(std::max(size, entries_.size()), Entry{});
      stamp_ = 1;
    }
    shift_ = 64 - __builtin_ctzll(entries_.size());
  }

  // The id's number, which is `next` for a new one.
  uint32_t of(int64_t id, uint32_t next) {
    const size_t mask = entries_.size() - 1;
    size_t at = static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull >> shift_;
    for (; entries_[at].stamp == stamp_; at = (at + 1) & mask)
      if (entries_[at].id == id) return entries_[at].number;
    entries_[at] = Entry{id, next, stamp_};
    return next;
  }

 private:
  struct Entry {
    int64_t id = 0;
    uint32_t number = 0, stamp = 0;
  };
  std::vector<Entry> entries_;
  uint32_t stamp_ = 0;
  int shift_ = 0;
};

thread_local Numbers numbers;

// columns: [features][rows], numbers of ids below num_ids.
void group_rows(size_t rows, const std::vector<uint32_t>& columns, size_t num_ids, RepeatedIds& repeats) {
  const size_t count = repeats.features.size();
  repeats.index.resize(rows * count);
  repeats.rows_of.resize(rows * count);
  repeats.begins.assign(num_ids + 2, 0);
  for (size_t i = 0; i < rows * count; ++i) ++repeats.begins[columns[i] + 2];
  for (size_t id = 2; id < repeats.begins.size(); ++id) repeats.begins[id] += repeats.begins[id - 1];
  for (size_t f = 0; f < count; ++f)
    for (size_t row = 0; row < rows; ++row) {
      const uint32_t id = columns[f * rows + row];
      repeats.index[row * count + f] = id;
      repeats.rows_of[repeats.begins[id + 1]++] = static_cast<uint32_t>(row);
    }
}

}  // namespace

RepeatedIds find_repeats(size_t rows, const std::vector<const int64_t*>& ids, size_t width) {
  RepeatedIds repeats;
  if (width <= COLUMNS_OF_A_ROW) return repeats;
  const size_t most = rows * (width - COLUMNS_OF_A_ROW) / width;  // different ids
  std::vector<uint32_t> columns;                                  // [features][rows]
  uint32_t before = 0;                                            // different ids of the features so far
  for (size_t feature = 0; feature < ids.size(); ++feature) {
    if (!ids[feature]) continue;
    RepeatedFeature repeated{feature, {}};
    const size_t column = repeats.features.size() * rows;
    columns.resize(column + rows);
    numbers.begin(rows);
    for (size_t row = 0; row < rows && repeated.first.size() <= most; ++row) {
      const uint32_t next = static_cast<uint32_t>(repeated.first.size());
      const uint32_t number = numbers.of(ids[feature][row], next);
      columns[column + row] = before + number;
      if (number == next) repeated.first.push_back(static_cast<uint32_t>(row));
    }
    if (repeated.first.size() > most) continue;
    before += static_cast<uint32_t>(repeated.first.size());
    repeats.features.push_back(std::move(repeated));
  }
  group_rows(rows, columns, before, repeats);
  return repeats;
}

}  // namespace dense
