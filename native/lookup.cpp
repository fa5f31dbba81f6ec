// Value -> id, built once and read by many threads. Value number k (from 0) has id k + 1; all others are 0.
#include <nanobind/stl/optional.h>

#include <algorithm>

#include "arrays.hpp"
#include "hashing.hpp"

namespace {

size_t slots_for(size_t values) { return values * 10 / 6 + 8; }

void check_size(size_t values) {
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
      constexpr size_t BLOCK = 16;
      uint64_t hashes[BLOCK];
      for (size_t start = 0; start < rows; start += BLOCK) {
        const size_t stop = std::min(rows, start + BLOCK);
        for (size_t i = start; i < stop; ++i) {
          hashes[i - start] = hash_of(values.data()[i]);
          __builtin_prefetch(&entries_[slot_of(hashes[i - start], entries_.size())]);
        }
        for (size_t i = start; i < stop; ++i)
          ids[i] = valid && !valid[i] ? 0 : entries_[find_slot(values.data()[i], hashes[i - start])].id;
      }
    }
    return to_numpy(std::move(ids));
  }

  size_t num_bytes() const { return entries_.capacity() * sizeof(Entry); }

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

class TextLookup {
 public:
  TextLookup(In<int64_t> offsets, In<uint8_t> bytes) {
    Texts texts(offsets, bytes);
    check_size(texts.rows);
    entries_ = std::vector<Entry>(slots_for(texts.rows), Entry{0, 0});
    offsets_.assign(texts.offsets, texts.offsets + texts.rows + 1);
    text_.assign(texts.bytes, texts.bytes + texts.offsets[texts.rows]);
    nb::gil_scoped_release release;
    for (size_t k = 0; k < texts.rows; ++k) {
      const uint64_t hash = xxh64::of_bytes(texts.at(k), texts.length(k), 0);
      Entry& entry = entries_[find_slot(texts.at(k), texts.length(k), hash)];
      if (entry.id) throw std::invalid_argument("a vocabulary holds each value once");
      entry = Entry{static_cast<uint32_t>(hash), static_cast<int32_t>(k + 1)};
    }
  }

  Out<int32_t> find(In<int64_t> offsets, In<uint8_t> bytes, Mask mask) const {
    Texts texts(offsets, bytes);
    const uint8_t* valid = mask_data(mask, texts.rows);
    std::vector<int32_t> ids(texts.rows);
    {
      nb::gil_scoped_release release;
      for (size_t i = 0; i < texts.rows; ++i) {
        if (valid && !valid[i]) continue;
        const uint64_t hash = xxh64::of_bytes(texts.at(i), texts.length(i), 0);
        ids[i] = entries_[find_slot(texts.at(i), texts.length(i), hash)].id;
      }
    }
    return to_numpy(std::move(ids));
  }

  size_t num_bytes() const { return entries_.capacity() * sizeof(Entry) + offsets_.capacity() * 8 + text_.capacity(); }

 private:
  struct Entry { uint32_t tag; int32_t id; };

  bool holds(const Entry& entry, const char* text, size_t length, uint64_t hash) const {
    if (entry.tag != static_cast<uint32_t>(hash)) return false;
    const int64_t start = offsets_[entry.id - 1];
    return static_cast<size_t>(offsets_[entry.id] - start) == length && std::memcmp(text_.data() + start, text, length) == 0;
  }

  size_t find_slot(const char* text, size_t length, uint64_t hash) const {
    size_t slot = slot_of(hash, entries_.size());
    while (entries_[slot].id && !holds(entries_[slot], text, length, hash)) slot = slot + 1 == entries_.size() ? 0 : slot + 1;
    return slot;
  }

  std::vector<Entry> entries_;
  std::vector<int64_t> offsets_;
  std::vector<char> text_;
};

}  // namespace

void register_lookup(nb::module_& m) {
  nb::class_<IntLookup>(m, "IntLookup")
      .def(nb::init<In<int64_t>>(), nb::arg("values"))
      .def("find", &IntLookup::find, nb::arg("values"), nb::arg("mask").none())
      .def_prop_ro("num_bytes", &IntLookup::num_bytes);
  nb::class_<TextLookup>(m, "TextLookup")
      .def(nb::init<In<int64_t>, In<uint8_t>>(), nb::arg("offsets"), nb::arg("bytes"))
      .def("find", &TextLookup::find, nb::arg("offsets"), nb::arg("bytes"), nb::arg("mask").none())
      .def_prop_ro("num_bytes", &TextLookup::num_bytes);
}
