// Hashes of columns, and the order-free digest of rows.
#include "hashing.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "arrays.hpp"

namespace {

constexpr uint64_t MISSING = 0x6d697373696e6721ull;

Out<uint64_t> hash_ints(In<int64_t> values, uint64_t seed) {
  std::vector<uint64_t> out(values.size());
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < out.size(); ++i) out[i] = xxh64::of_int(static_cast<uint64_t>(values.data()[i]), seed);
  }
  return to_numpy(std::move(out));
}

Out<uint64_t> hash_texts(In<int64_t> offsets, In<uint8_t> bytes, uint64_t seed) {
  Texts texts(offsets, bytes);
  std::vector<uint64_t> out(texts.rows);
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < texts.rows; ++i) out[i] = xxh64::of_bytes(texts.at(i), texts.length(i), seed);
  }
  return to_numpy(std::move(out));
}

uint64_t bits_of(int64_t value) { return static_cast<uint64_t>(value); }
uint64_t bits_of(uint64_t value) { return value; }
uint64_t bits_of(double value) {
  value += 0.0;  // -0.0 and 0.0 are one value
  uint64_t bits;
  std::memcpy(&bits, &value, 8);
  return bits;
}

uint64_t fold(uint64_t state, uint64_t bits) { return xxh64::avalanche(state * xxh64::P1 + (bits ^ xxh64::P5)); }

template <class T, class Wide>
void fold_column(InOut<uint64_t> states, In<T> values, Mask mask) {
  const size_t rows = states.size();
  if (values.size() != rows) throw std::invalid_argument("states and values differ in length");
  const uint8_t* valid = mask_data(mask, rows);
  nb::gil_scoped_release release;
  for (size_t i = 0; i < rows; ++i) {
    const uint64_t bits = valid && !valid[i] ? MISSING : bits_of(static_cast<Wide>(values.data()[i]));
    states.data()[i] = fold(states.data()[i], bits);
  }
}

// One hash per list, from hashes of its elements.
Out<uint64_t> hash_lists(In<int64_t> offsets, In<uint64_t> element_hashes) {
  std::vector<uint64_t> out(offsets.size() - 1);
  {
    nb::gil_scoped_release release;
    for (size_t row = 0; row < out.size(); ++row) {
      uint64_t state = xxh64::P3;
      for (int64_t k = offsets.data()[row]; k < offsets.data()[row + 1]; ++k) state = fold(state, element_hashes.data()[k]);
      out[row] = state;
    }
  }
  return to_numpy(std::move(out));
}

// Sums of two independent mixes of each row's state: equal for equal multisets of rows, in any order.
std::pair<uint64_t, uint64_t> sum_states(In<uint64_t> states) {
  uint64_t low = 0, high = 0;
  nb::gil_scoped_release release;
  for (size_t i = 0; i < states.size(); ++i) {
    low += xxh64::avalanche(states.data()[i]);
    high += xxh64::avalanche(states.data()[i] ^ xxh64::P4);
  }
  return {low, high};
}

}  // namespace

void register_hashing(nb::module_& m) {
  m.def("hash_ints", &hash_ints, nb::arg("values"), nb::arg("seed"));
  m.def("hash_texts", &hash_texts, nb::arg("offsets"), nb::arg("bytes"), nb::arg("seed"));
  m.def("hash_lists", &hash_lists, nb::arg("offsets"), nb::arg("element_hashes"));
  m.def("fold_column", &fold_column<int64_t, int64_t>, nb::arg("states"), nb::arg("values"), nb::arg("mask").none());
  m.def("fold_column", &fold_column<int32_t, int64_t>, nb::arg("states"), nb::arg("values"), nb::arg("mask").none());
  m.def("fold_column", &fold_column<uint64_t, uint64_t>, nb::arg("states"), nb::arg("values"), nb::arg("mask").none());
  m.def("fold_column", &fold_column<float, double>, nb::arg("states"), nb::arg("values"), nb::arg("mask").none());
  m.def("fold_column", &fold_column<double, double>, nb::arg("states"), nb::arg("values"), nb::arg("mask").none());
  m.def("sum_states", &sum_states, nb::arg("states"));
}
