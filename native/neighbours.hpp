// Neighbours of items as Python gives them, checked once.
#pragma once
#include <nanobind/stl/optional.h>

#include "arrays.hpp"
#include "recall.hpp"

// The arrays are kept as long as this is; nobody changes them.
class NeighbourLists {
 public:
  NeighbourLists(In<int64_t> offsets, In<int32_t> indices, In<float> weights, std::optional<In<int32_t>> items)
      : offsets_(offsets), indices_(indices), weights_(weights), items_(items) {
    const size_t rows = offsets.size() ? offsets.size() - 1 : 0;
    if (!offsets.size() || offsets.data()[0] != 0 || !std::is_sorted(offsets.data(), offsets.data() + offsets.size()) ||
        static_cast<size_t>(offsets.data()[rows]) != indices.size() || indices.size() != weights.size())
      throw std::invalid_argument("offsets must run from 0 to the number of neighbours, each of which needs a weight");
    if (items && (items->size() != rows || !std::is_sorted(items->data(), items->data() + rows)))
      throw std::invalid_argument("each list needs an item, in ascending order");
    lists = {offsets.data(), indices.data(), weights.data(), rows, items ? items->data() : nullptr};
  }

  recall::Neighbours lists;

 private:
  In<int64_t> offsets_;
  In<int32_t> indices_;
  In<float> weights_;
  std::optional<In<int32_t>> items_;
};
