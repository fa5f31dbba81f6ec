// Embedding rows of a bundle where they are mapped: looked up by key, read as float32.
#pragma once
#include <nanobind/stl/vector.h>

#include "dense/serving.hpp"
#include "lookup.hpp"

using AnyRows = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// One table, of float32, float16 or int8 rows. The arrays are the caller's.
struct MappedTable {
  const IntLookup* index = nullptr;  // null: a key is its row's number
  dense::Rows rows{};
  size_t num_rows = 0;

  MappedTable(nb::handle given_index, const AnyRows& given, nb::handle scales) {
    index = given_index.is_none() ? nullptr : nb::cast<const IntLookup*>(given_index);
    num_rows = given.shape(0);
    rows = {dense::RowType::FLOAT32, given.data(), nullptr, given.shape(1)};
    const auto type = given.dtype();
    if (type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 16) {
      rows.type = dense::RowType::FLOAT16;
    } else if (type == nb::dtype<int8_t>()) {
      const auto given_scales = nb::cast<In<float>>(scales);
      if (given_scales.size() != num_rows) throw std::invalid_argument("rows and scales differ in length");
      rows.type = dense::RowType::INT8, rows.scales = given_scales.data();
    } else if (type != nb::dtype<float>()) {
      throw std::invalid_argument("rows must be float32, float16 or int8");
    }
  }

  // The row of each key; whether every key has one.
  bool find(const int64_t* keys, size_t count, int64_t* slots) const {
    bool found = true;
    for (size_t start = 0; start < count; start += IntLookup::BLOCK) {
      const size_t size = std::min(count - start, IntLookup::BLOCK);
      if (index) index->find_block(keys + start, size, slots + start);
      else std::copy_n(keys + start, size, slots + start);
      for (size_t i = 0; i < size; ++i) found &= static_cast<uint64_t>(slots[start + i]) < num_rows;
    }
    return found;
  }
};

// Several tables, each given as (index, rows, scales). They are kept as long as this is: making it costs more than a lookup.
class MappedTables {
 public:
  explicit MappedTables(const nb::list& given) : arrays_(given) {
    for (nb::handle one : given) {
      const auto table = nb::cast<nb::tuple>(one);
      tables.emplace_back(table[0], nb::cast<AnyRows>(table[1]), table[2]);
    }
  }

  std::vector<MappedTable> tables;

 private:
  nb::list arrays_;
};
