// What the kernels exchange with Python: contiguous one-dimensional arrays, in and out.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using InOut = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

// Hands a buffer over to NumPy without a copy.
template <class T>
Out<T> to_numpy(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Out<T>(owned->data(), {owned->size()}, owner);
}

// Releases the GIL for work that takes longer than giving it to another thread and getting it back: some 10 us.
class ReleaseGil {
 public:
  explicit ReleaseGil(bool is_worth_it) {
    if (is_worth_it) release_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> release_;
};

// A validity mask with one byte per row, or nothing when every row is valid.
using Mask = std::optional<In<uint8_t>>;

inline const uint8_t* mask_data(const Mask& mask, size_t rows) {
  if (!mask) return nullptr;
  if (mask->size() != rows) throw std::invalid_argument("mask and values differ in length");
  return mask->data();
}

// Text in Arrow's layout: row i is bytes[offsets[i] .. offsets[i + 1]).
struct Texts {
  const int64_t* offsets;
  const char* bytes;
  size_t rows;
  Texts(const In<int64_t>& o, const In<uint8_t>& b)
      : offsets(o.data()), bytes(reinterpret_cast<const char*>(b.data())), rows(o.size() - 1) {
    if (o.size() == 0) throw std::invalid_argument("text offsets must hold at least one entry");
    if (static_cast<size_t>(offsets[rows]) > b.size()) throw std::invalid_argument("text offsets exceed the bytes");
  }
  const char* at(size_t row) const { return bytes + offsets[row]; }
  size_t length(size_t row) const { return static_cast<size_t>(offsets[row + 1] - offsets[row]); }
};
