// How often each value occurs, and where it was first seen. Adding commutes, so threads share one counter.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <string>

#include "arrays.hpp"
#include "hashing.hpp"

namespace {

constexpr size_t FIRST_SLOTS = 1024;
constexpr int64_t NEVER = std::numeric_limits<int64_t>::max();

bool too_full(size_t used, size_t slots) { return used * 10 >= slots * 7; }

class IntCounter {
 public:
  explicit IntCounter(bool track_first) : track_first_(track_first) { clear(); }

  void add(In<int64_t> values, Mask mask, std::optional<In<int64_t>> counts, std::optional<In<int64_t>> firsts) {
    const size_t rows = values.size();
    const uint8_t* valid = mask_data(mask, rows);
    if (track_first_ != firsts.has_value()) throw std::invalid_argument("positions are needed exactly when first seen is tracked");
    const int64_t* first = firsts ? firsts->data() : nullptr;
    const int64_t* count = counts ? counts->data() : nullptr;
    const int64_t* value = values.data();
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    constexpr size_t BLOCK = 16;
    uint64_t hashes[BLOCK];
    for (size_t start = 0; start < rows; start += BLOCK) {
      const size_t stop = std::min(rows, start + BLOCK);
      // A miss costs more than the arithmetic: ask for the whole block's slots first.
      for (size_t i = start; i < stop; ++i) {
        hashes[i - start] = xxh64::of_int(static_cast<uint64_t>(value[i]), 0);
        __builtin_prefetch(&entries_[slot_of(hashes[i - start], entries_.size())], 1);
      }
      for (size_t i = start; i < stop; ++i) {
        if (valid && !valid[i]) { missing_ += count ? count[i] : 1; continue; }
        insert(value[i], hashes[i - start], count ? count[i] : 1, first ? first[i] : NEVER);
      }
    }
  }

  size_t size() const { return used_; }
  size_t num_bytes() const { return entries_.capacity() * sizeof(Entry) + firsts_.capacity() * sizeof(int64_t); }
  int64_t missing() const { return missing_; }

  // Everything counted so far, in no particular order; the counter is empty afterwards.
  nb::tuple drain() {
    std::vector<int64_t> values, counts, firsts;
    {
      nb::gil_scoped_release release;
      std::lock_guard<std::mutex> lock(mutex_);
      values.reserve(used_);
      counts.reserve(used_);
      if (track_first_) firsts.reserve(used_);
      for (size_t slot = 0; slot < entries_.size(); ++slot) {
        if (!entries_[slot].count) continue;
        values.push_back(entries_[slot].value);
        counts.push_back(entries_[slot].count);
        if (track_first_) firsts.push_back(firsts_[slot]);
      }
      clear();
    }
    return nb::make_tuple(to_numpy(std::move(values)), to_numpy(std::move(counts)), to_numpy(std::move(firsts)));
  }

 private:
  struct Entry { int64_t value; int64_t count; };

  void clear() {
    entries_ = std::vector<Entry>(FIRST_SLOTS, Entry{0, 0});
    firsts_ = std::vector<int64_t>(track_first_ ? FIRST_SLOTS : 0, NEVER);
    used_ = 0;
  }

  void insert(int64_t value, uint64_t hash, int64_t count, int64_t first) {
    size_t slot = slot_of(hash, entries_.size());
    while (entries_[slot].count && entries_[slot].value != value) slot = slot + 1 == entries_.size() ? 0 : slot + 1;
    if (!entries_[slot].count) { entries_[slot].value = value; ++used_; }
    entries_[slot].count += count;
    if (track_first_) firsts_[slot] = std::min(firsts_[slot], first);
    if (too_full(used_, entries_.size())) grow();
  }

  void grow() {
    std::vector<Entry> old(entries_.size() * 2, Entry{0, 0});
    std::vector<int64_t> old_firsts(track_first_ ? old.size() : 0, NEVER);
    old.swap(entries_);
    old_firsts.swap(firsts_);
    for (size_t from = 0; from < old.size(); ++from) {
      if (!old[from].count) continue;
      size_t slot = slot_of(xxh64::of_int(static_cast<uint64_t>(old[from].value), 0), entries_.size());
      while (entries_[slot].count) slot = slot + 1 == entries_.size() ? 0 : slot + 1;
      entries_[slot] = old[from];
      if (track_first_) firsts_[slot] = old_firsts[from];
    }
  }

  const bool track_first_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<int64_t> firsts_;
  size_t used_ = 0;
  int64_t missing_ = 0;
};

class TextCounter {
 public:
  explicit TextCounter(bool track_first) : track_first_(track_first) { clear(); }

  void add(In<int64_t> offsets, In<uint8_t> bytes, Mask mask, std::optional<In<int64_t>> counts,
           std::optional<In<int64_t>> firsts) {
    Texts texts(offsets, bytes);
    const uint8_t* valid = mask_data(mask, texts.rows);
    if (track_first_ != firsts.has_value()) throw std::invalid_argument("positions are needed exactly when first seen is tracked");
    const int64_t* first = firsts ? firsts->data() : nullptr;
    const int64_t* count = counts ? counts->data() : nullptr;
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < texts.rows; ++i) {
      if (valid && !valid[i]) { missing_ += count ? count[i] : 1; continue; }
      insert(texts.at(i), texts.length(i), count ? count[i] : 1, first ? first[i] : NEVER);
    }
  }

  size_t size() const { return used_; }
  size_t num_bytes() const { return entries_.capacity() * sizeof(Entry) + text_.capacity(); }
  int64_t missing() const { return missing_; }

  nb::tuple drain() {
    std::vector<int64_t> offsets{0}, counts, firsts;
    std::vector<uint8_t> bytes;
    {
      nb::gil_scoped_release release;
      std::lock_guard<std::mutex> lock(mutex_);
      bytes.reserve(text_.size());
      for (const Entry& entry : entries_) {
        if (!entry.count) continue;
        bytes.insert(bytes.end(), text_.begin() + entry.offset, text_.begin() + entry.offset + entry.length);
        offsets.push_back(static_cast<int64_t>(bytes.size()));
        counts.push_back(entry.count);
        if (track_first_) firsts.push_back(entry.first);
      }
      clear();
    }
    return nb::make_tuple(to_numpy(std::move(offsets)), to_numpy(std::move(bytes)), to_numpy(std::move(counts)),
                          to_numpy(std::move(firsts)));
  }

 private:
  struct Entry { uint64_t hash; int64_t offset; int64_t length; int64_t count; int64_t first; };

  void clear() {
    entries_ = std::vector<Entry>(FIRST_SLOTS, Entry{0, 0, 0, 0, NEVER});
    text_ = std::vector<char>();
    used_ = 0;
  }

  bool holds(const Entry& entry, uint64_t hash, const char* text, size_t length) const {
    return entry.hash == hash && entry.length == static_cast<int64_t>(length) &&
           std::memcmp(text_.data() + entry.offset, text, length) == 0;
  }

  void insert(const char* text, size_t length, int64_t count, int64_t first) {
    const uint64_t hash = xxh64::of_bytes(text, length, 0);
    size_t slot = slot_of(hash, entries_.size());
    while (entries_[slot].count && !holds(entries_[slot], hash, text, length)) slot = slot + 1 == entries_.size() ? 0 : slot + 1;
    Entry& entry = entries_[slot];
    if (!entry.count) {
      entry = Entry{hash, static_cast<int64_t>(text_.size()), static_cast<int64_t>(length), 0, NEVER};
      text_.insert(text_.end(), text, text + length);
      ++used_;
    }
    entry.count += count;
    entry.first = std::min(entry.first, first);
    if (too_full(used_, entries_.size())) grow();
  }

  void grow() {
    std::vector<Entry> old(entries_.size() * 2, Entry{0, 0, 0, 0, NEVER});
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (!entry.count) continue;
      size_t slot = slot_of(entry.hash, entries_.size());
      while (entries_[slot].count) slot = slot + 1 == entries_.size() ? 0 : slot + 1;
      entries_[slot] = entry;
    }
  }

  const bool track_first_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<char> text_;
  size_t used_ = 0;
  int64_t missing_ = 0;
};

}  // namespace

void register_counter(nb::module_& m) {
  nb::class_<IntCounter>(m, "IntCounter")
      .def(nb::init<bool>(), nb::arg("track_first"))
      .def("add", &IntCounter::add, nb::arg("values"), nb::arg("mask").none(), nb::arg("counts").none(), nb::arg("firsts").none())
      .def_prop_ro("size", &IntCounter::size)
      .def_prop_ro("num_bytes", &IntCounter::num_bytes)
      .def_prop_ro("missing", &IntCounter::missing)
      .def("drain", &IntCounter::drain);
  nb::class_<TextCounter>(m, "TextCounter")
      .def(nb::init<bool>(), nb::arg("track_first"))
      .def("add", &TextCounter::add, nb::arg("offsets"), nb::arg("bytes"), nb::arg("mask").none(), nb::arg("counts").none(),
           nb::arg("firsts").none())
      .def_prop_ro("size", &TextCounter::size)
      .def_prop_ro("num_bytes", &TextCounter::num_bytes)
      .def_prop_ro("missing", &TextCounter::missing)
      .def("drain", &TextCounter::drain);
}
