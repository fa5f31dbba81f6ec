// Vocabularies and rows of mapped tables by key.
#include "mapped_tables.hpp"

#include <nanobind/stl/optional.h>

#include <optional>

namespace {

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

// The ids of users or items by hash, sorted, where a bundle has mapped them. Ids with the same hash are told apart.
class MappedIds {
 public:
  // `ids` has the id of each index: numbers, or (offsets, bytes) of texts.
  MappedIds(In<uint64_t> hashes, In<int64_t> indices, nb::object ids) : hashes_(hashes), indices_(indices), ids_(ids) {
    if (nb::isinstance<nb::tuple>(ids)) {
      const auto texts = nb::cast<nb::tuple>(ids);
      texts_.emplace(nb::cast<In<int64_t>>(texts[0]), nb::cast<In<uint8_t>>(texts[1]));
    } else {
      const auto ints = nb::cast<In<int64_t>>(ids);
      ints_ = ints.data(), num_ = ints.size();
    }
    if (texts_) num_ = texts_->rows;
    if (hashes.size() != num_ || indices.size() != num_) throw std::invalid_argument("each id needs a hash and an index");
  }

  // The index of each id, -1 for one that is not there. Ids are all ints, or all texts.
  Out<int64_t> find(const nb::list& ids) const {
    std::vector<int64_t> found;
    for (nb::handle id : ids) {
      if (ints_) {
        const int64_t wanted = nb::cast<int64_t>(id);
        found.push_back(search(xxh64::of_int(static_cast<uint64_t>(wanted), 0), [&](size_t i) { return ints_[i] == wanted; }));
      } else {
        Py_ssize_t size = 0;
        const char* text = PyUnicode_AsUTF8AndSize(id.ptr(), &size);
        if (!text) throw nb::python_error();
        const auto length = static_cast<size_t>(size);
        found.push_back(search(xxh64::of_bytes(text, length, 0), [&](size_t i) {
          return texts_->length(i) == length && std::equal(text, text + length, texts_->at(i));
        }));
      }
    }
    return to_numpy(std::move(found));
  }

 private:
  template <class Same>
  int64_t search(uint64_t hash, const Same& is_same) const {
    const uint64_t* end = hashes_.data() + hashes_.size();
    for (const uint64_t* at = std::lower_bound(hashes_.data(), end, hash); at != end && *at == hash; ++at) {
      const int64_t index = indices_.data()[at - hashes_.data()];
      if (static_cast<uint64_t>(index) < num_ && is_same(static_cast<size_t>(index))) return index;
    }
    return -1;
  }

  In<uint64_t> hashes_;
  In<int64_t> indices_;
  nb::object ids_;  // kept for its arrays
  const int64_t* ints_ = nullptr;
  std::optional<Texts> texts_;
  size_t num_ = 0;
};

// Rows by key: `keys` has as many for each table as `out` has rows, and the rows of table t go to out[:, places[t]].
// The numbers of the tables in which some key has no row; their part of `out` is left as it was.
std::vector<size_t> gather(const MappedTables& from, const In<int64_t>& keys, const In<int64_t>& places,
                           nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu> out) {
  const size_t count = out.shape(0), width = out.shape(1), dim = out.shape(2), num = from.tables.size();
  if (keys.size() != num * count || places.size() != num) throw std::invalid_argument("each table needs a place and its keys");
  for (size_t t = 0; t < num; ++t)
    if (from.tables[t].rows.dim != dim || static_cast<uint64_t>(places.data()[t]) >= width)
      throw std::invalid_argument("rows go into an array of their dim");
  const dense::ServingKernels& kernels = dense::serving_kernels();
  std::vector<size_t> missing;
  const ReleaseGil release(num * count > 256);
  std::vector<int64_t> slots(count);
  for (size_t t = 0; t < num; ++t) {
    const MappedTable& table = from.tables[t];
    if (!table.find(keys.data() + t * count, count, slots.data())) missing.push_back(t);
    else kernels.gather(table.rows, slots.data(), count, out.data() + static_cast<size_t>(places.data()[t]) * dim, width * dim);
  }
  return missing;
}

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
  nb::class_<MappedIds>(m, "MappedIds")
      .def(nb::init<In<uint64_t>, In<int64_t>, nb::object>(), nb::arg("hashes"), nb::arg("indices"), nb::arg("ids"))
      .def("find", &MappedIds::find, nb::arg("ids"));
  nb::class_<MappedTables>(m, "MappedTables")
      .def(nb::init<nb::list>(), nb::arg("tables"))
      .def("gather", &gather, nb::arg("keys"), nb::arg("places"), nb::arg("out"));
}
