// Vocabularies and rows of mapped tables by key.
#include "mapped_tables.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

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

using VectorRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vectors = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// One feature of some rows: a key for each row, or lists of keys, whose rows are added up.
struct KeyColumn {
  const int64_t* keys;
  size_t count;
  const int64_t* offsets;  // null: a key for each row
  bool is_mean;

  KeyColumn(const In<int64_t>& keys, const std::optional<In<int64_t>>& offsets, bool is_mean, size_t rows)
      : keys(keys.data()), count(keys.size()), offsets(offsets ? offsets->data() : nullptr), is_mean(is_mean) {
    if (!offsets && count != rows) throw std::invalid_argument("features must have the same number of rows");
    if (offsets && (offsets->size() != rows + 1 || this->offsets[0] != 0 || static_cast<size_t>(this->offsets[rows]) != count ||
                    !std::is_sorted(this->offsets, this->offsets + rows + 1)))
      throw std::invalid_argument("features must have the same number of rows, and offsets run from 0 to the number of keys");
  }
};

// Adds up the vectors of each row's keys.
void add_lists(const KeyColumn& column, const std::vector<float>& vectors, size_t rows, size_t dim, float* to, size_t stride) {
  for (size_t row = 0; row < rows; ++row, to += stride) {
    std::fill_n(to, dim, 0.0f);
    const auto begin = static_cast<size_t>(column.offsets[row]), end = static_cast<size_t>(column.offsets[row + 1]);
    for (size_t i = begin; i < end; ++i)
      for (size_t d = 0; d < dim; ++d) to[d] += vectors[i * dim + d];
    if (column.is_mean && end > begin)
      for (size_t d = 0; d < dim; ++d) to[d] /= static_cast<float>(end - begin);
  }
}

// The rows of features by key, one table each: those of feature f go to out[:, f]. Keys that have none in the file are returned, with
// the number of their feature, in their order; called again with rows for them in `own`, the features are complete.
std::vector<std::pair<size_t, Out<int64_t>>> pool(const MappedTables& from, const std::vector<In<int64_t>>& keys,
                                                   const std::vector<std::optional<In<int64_t>>>& offsets, const std::vector<bool>& is_mean,
                                                   Vectors out, const std::vector<std::pair<size_t, VectorRows>>& own) {
  const size_t rows = out.shape(0), num = out.shape(1), dim = out.shape(2), stride = num * dim;
  if (from.tables.size() != num || keys.size() != num || offsets.size() != num || is_mean.size() != num)
    throw std::invalid_argument("each feature needs a table, keys and a place");
  const dense::ServingKernels& kernels = dense::serving_kernels();
  std::vector<std::vector<int64_t>> missing(num);
  std::vector<KeyColumn> columns;
  size_t total = 0;
  for (size_t f = 0; f < num; ++f) {
    if (from.tables[f].rows.dim != dim) throw std::invalid_argument("rows go into an array of their dim");
    columns.emplace_back(keys[f], offsets[f], is_mean[f], rows), total += keys[f].size();
  }
  for (const auto& [f, given] : own)
    if (f >= num || given.shape(1) != dim) throw std::invalid_argument("own rows are of one of the features");
  {
    const ReleaseGil release(total > 256);
    std::vector<int64_t> slots;
    std::vector<float> vectors;
    for (size_t f = 0; f < num; ++f) {
      const KeyColumn& column = columns[f];
      const size_t count = column.count;
      const auto given = std::find_if(own.begin(), own.end(), [f](const auto& one) { return one.first == f; });
      slots.resize(count);
      const bool found = from.tables[f].find(column.keys, count, slots.data());
      if (found && !column.offsets) {
        kernels.gather(from.tables[f].rows, slots.data(), count, out.data() + f * dim, stride);
        continue;
      }
      vectors.resize(count * dim);
      for (size_t i = 0, number = 0; i < count; ++i) {
        if (static_cast<uint64_t>(slots[i]) < from.tables[f].num_rows) {
          if (!found) kernels.gather(from.tables[f].rows, &slots[i], 1, vectors.data() + i * dim, dim);
        } else if (given == own.end()) {
          missing[f].push_back(column.keys[i]);
        } else if (number < given->second.shape(0)) {
          std::copy_n(given->second.data() + number++ * dim, dim, vectors.data() + i * dim);
        }
      }
      if (found) kernels.gather(from.tables[f].rows, slots.data(), count, vectors.data(), dim);
      if (!missing[f].empty()) continue;
      if (column.offsets) add_lists(column, vectors, rows, dim, out.data() + f * dim, stride);
      else for (size_t row = 0; row < rows; ++row) std::copy_n(vectors.data() + row * dim, dim, out.data() + row * stride + f * dim);
    }
  }
  std::vector<std::pair<size_t, Out<int64_t>>> all;
  for (size_t f = 0; f < num; ++f)
    if (!missing[f].empty()) all.emplace_back(f, to_numpy(std::move(missing[f])));
  return all;
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
      .def("pool", &pool, nb::arg("keys"), nb::arg("offsets"), nb::arg("is_mean"), nb::arg("out"), nb::arg("own"));
}
