// Features whose ids repeat in a batch: their part of a product is computed once for each different id, not for each row.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dense {

// One feature: each of its different ids is first in one of these rows.
struct RepeatedFeature {
  size_t feature;  // which of those that were given
  std::vector<uint32_t> first;
};

struct RepeatedIds {
  std::vector<RepeatedFeature> features;
  std::vector<uint32_t> index;  // [rows][features]: the row's id among the different ones of all features in their order
  std::vector<uint32_t> begins, rows_of;  // id i of all is in rows rows_of[begins[i]...begins[i + 1]], in their order
};

// Those of the features, each with an id for every row or null, whose ids repeat so often that it pays to multiply vectors of
// `width` floats once for each id.
RepeatedIds find_repeats(size_t rows, const std::vector<const int64_t*>& ids, size_t width);

}  // namespace dense
