// Vocabularies and rows of mapped tables by key.
#include "lookup.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

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

// Rows of mapped tables by key: the keys of one feature, and where their rows go.
struct RowSegment {
  const IntLookup* keys_of_rows;  // null: a key is its row's number
  const float* floats = nullptr;
  const int8_t* bytes = nullptr;
  const float* scales = nullptr;
  size_t num_rows, dim, count;
  const int64_t* keys;
  float* out;
  int64_t stride;

  explicit RowSegment(const nb::tuple& given) {
    keys_of_rows = given[0].is_none() ? nullptr : nb::cast<const IntLookup*>(given[0]);
    auto rows = nb::cast<nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>>(given[1]);
    num_rows = rows.shape(0), dim = rows.shape(1);
    if (rows.dtype() == nb::dtype<float>()) {
      floats = static_cast<const float*>(rows.data());
    } else if (rows.dtype() == nb::dtype<int8_t>()) {
      bytes = static_cast<const int8_t*>(rows.data());
      auto given_scales = nb::cast<In<float>>(given[2]);
      if (given_scales.size() != num_rows) throw std::invalid_argument("rows and scales differ in length");
      scales = given_scales.data();
    } else {
      throw std::invalid_argument("rows must be float32 or int8");
    }
    auto given_keys = nb::cast<In<int64_t>>(given[3]);
    keys = given_keys.data(), count = given_keys.size();
    auto to = nb::cast<nb::ndarray<float, nb::ndim<2>, nb::device::cpu>>(given[4]);
    if (to.shape(0) != count || to.shape(1) != dim || (dim > 1 && to.stride(1) != 1))
      throw std::invalid_argument("rows go into a float32 array of their own shape");
    out = to.data(), stride = to.stride(0);
  }

  // How many keys have no row; what they would read is left as it was.
  size_t gather() const {
    size_t missing = 0;
    int64_t places[IntLookup::BLOCK];
    for (size_t start = 0; start < count; start += IntLookup::BLOCK) {
      const size_t size = std::min(count - start, IntLookup::BLOCK);
      if (keys_of_rows) keys_of_rows->find_block(keys + start, size, places);
      else std::copy(keys + start, keys + start + size, places);
      for (size_t i = 0; i < size; ++i) {
        if (static_cast<uint64_t>(places[i]) >= num_rows) places[i] = -1, ++missing;
        else if (floats) __builtin_prefetch(floats + places[i] * dim);
        else __builtin_prefetch(bytes + places[i] * dim), __builtin_prefetch(scales + places[i]);
      }
      for (size_t i = 0; i < size; ++i)
        if (places[i] >= 0) copy(places[i], out + static_cast<int64_t>(start + i) * stride);
    }
    return missing;
  }

  void copy(int64_t place, float* to) const {
    if (floats) {
      std::copy_n(floats + place * dim, dim, to);
    } else {
      const int8_t* from = bytes + place * dim;
      for (size_t j = 0; j < dim; ++j) to[j] = static_cast<float>(from[j]) * scales[place];
    }
  }
};

// Fills each segment's array; how many keys of each segment have no row.
std::vector<size_t> gather_rows(const nb::list& given) {
  std::vector<RowSegment> segments;
  for (nb::handle segment : given) segments.emplace_back(nb::cast<nb::tuple>(segment));
  std::vector<size_t> missing;
  nb::gil_scoped_release release;
  for (const RowSegment& segment : segments) missing.push_back(segment.gather());
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
  m.def("gather_rows", &gather_rows);
}
